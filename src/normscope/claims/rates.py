"""With norms and without: the rates that train, and the steps to a loss."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from normscope.claims.evidence import effect
from normscope.claims.form import Case, Evidence, Figure, Kind, Line, Plot, Sentence, Setup, Source, claim
from normscope.claims.training import (
    ABOVE,
    LEVELS,
    RATES,
    STEP,
    Outcome,
    Outcomes,
    Recipe,
    best,
    curve,
    fewest_steps,
    ladder,
    trained,
)
from normscope.claims.tuned import (
    COUNTS,
    EARLY,
    LATER,
    POST,
    POST_NORMAL,
    PRE,
    PRE_XAVIER,
    longer,
    rates_plot,
)

NO_NORM, PLAIN = replace(POST, scheme="residual-no-norm"), replace(POST, scheme="plain")
DEEP_PRE, DEEP_NO_NORM = replace(PRE, depth=16), replace(NO_NORM, depth=16)
FEWER = 0.30
"""The share of steps that 004 says are saved, at least; 50 % is the most it says."""
MOST = 0.50


@claim(
    "C10",
    Source("004", "§3.3", "使得模型可以使用更大的学习率"),
    Source("004", "§6.4", "这允许我们使用更大的学习率"),
    Source("004", "§3.2 comparison", "允许使用更高的学习率"),
    says="LayerNorm allows larger learning rates.",
    asks="4 blocks, AdamW, no warm-up: at least one rung more of the ladder (1e-3 … 3e-2) trains with the "
    "norms (before the branch and on the stream, from Xavier and from normal weights) than in the same "
    "residual stack without, from Xavier weights",
    condition="the norm is before the branch",
    smallest=1.0,
    kind=Kind.TENDENCY,
    has_long=True,
)
def larger_rates(setup: Setup) -> Evidence:
    """The largest rate that trains, with norms and without."""
    rates = (*RATES, 1e-1) if setup.long else RATES
    kinds, depth = (NO_NORM, PRE, PRE_XAVIER, POST, POST_NORMAL), setup.sizes(4, 3)
    bare, *bases = (replace(base, depth=depth) for base in kinds[: setup.sizes(5, 3)])
    outcomes = trained(setup, [recipe for base in (bare, *bases) for recipe in ladder(base, rates)])
    rung = {
        (base, seed): sum(outcomes[recipe][seed].trains for recipe in ladder(base, rates))
        for base in (bare, *bases)
        for seed in setup.seeds
    }
    cases = [
        replace(
            effect(
                seed,
                f"{_name(base)}, rungs more than without norms",
                rung[base, seed] - rung[bare, seed],
                1.0,
            ),
            met=base.scheme == "pre",
        )
        for base in bases
        for seed in setup.seeds
    ]
    return Evidence(
        cases,
        Figure(
            "rungs (half a decade each) that Pre-LN trains more than without norms, Xavier weights",
            {seed: rung[bases[1], seed] - rung[bare, seed] for seed in setup.seeds},
        ),
        plots=[
            Plot(
                "The end of a run by its rate",
                "rate",
                ABOVE,
                [
                    Line.over_seeds(_name(base), {r.lr: _excesses(outcomes[r]) for r in ladder(base, rates)})
                    for base in (bare, *bases)
                ],
                log="x",
                levels=LEVELS,
            )
        ],
        notes=[
            f"{_name(base)}: {', '.join(f'{rung[base, seed]}' for seed in setup.seeds)} rungs of "
            f"{len(rates)} train, by seed."
            for base in (bare, *bases)
        ],
        of="stacks",
    )


def _name(base: Recipe) -> str:
    return base.scheme if base.init is None else f"{base.scheme}, {base.init} weights"


def _excesses(by_seed: Mapping[int, Outcome]) -> list[float]:
    """Cut at one nat, so that a run that blew up does not set the scale."""
    return [min(outcome.excess, 1.0) for outcome in by_seed.values()]


@claim(
    "C11",
    Source("004", "§7.3", "模型训练步数可减少约30%-50%"),
    Source("004", "§10 results", "**收敛速度提升了30%以上**"),
    says="LayerNorm and residuals together save 30 % or more of the steps to the same loss.",
    asks="4 blocks, each kind of stack at its best rate: steps until 0.3 nats under the byte frequencies, "
    "Pre-LN or Post-LN against a stack with neither; one that never gets there counts as the whole budget",
    kind=Kind.TENDENCY,
    smallest=FEWER,
    parts={
        "band": "What they save together is 30 to 50 %.",
        "norms": Sentence(
            "The norms alone save 30 % or more, beside residuals without norms.", smallest=FEWER
        ),
        "deep": Sentence(
            "At 16 blocks they do: the norms alone save 30 % or more of the steps to 0.1 nats.",
            smallest=FEWER,
        ),
    },
    has_long=True,
)
def fewer_steps(setup: Setup) -> Evidence:
    """Steps to a loss, with both, with residuals alone, with neither."""
    steps = {
        name: _fewest(setup, recipes, EARLY if name.endswith("deep") else LATER)
        for name, recipes in _kinds(setup.long).items()
    }
    budget = 1000 if setup.long else PRE.steps
    cases = setup.cases(lambda seed: _savings(steps, seed, budget))
    return Evidence(
        cases,
        Figure(
            "steps that norms and residuals save together, at least, in %",
            {case.seed: 100 * case.value for case in cases if not case.part},
        ),
        plots=[_kinds_plot(setup)],
        notes=[
            f"{name}: {', '.join(f'{by_seed[seed]:g}' for seed in setup.seeds)} steps, by seed."
            for name, by_seed in steps.items()
        ],
        of="seeds",
    )


def _kinds(long: bool) -> dict[str, list[Recipe]]:
    kinds = {
        "both": [r for base in (PRE, PRE_XAVIER, POST, POST_NORMAL) for r in ladder(base)],
        "residual alone": ladder(NO_NORM),
        "neither": ladder(PLAIN, (3e-4, *RATES[:3])),
        "both, deep": [DEEP_PRE],
        "residual alone, deep": ladder(DEEP_NO_NORM, RATES[:2]),
    }
    if not long:
        return kinds
    return {name: [longer(r) for r in recipes if r.lr == RATES[1]] for name, recipes in kinds.items()}


def _kinds_plot(setup: Setup) -> Plot:
    """The run of each seed and kind that ends lowest; one that blows up is cut off at 3 nats."""
    lines = []
    for name, recipes in _kinds(setup.long).items():
        outcomes = trained(setup, recipes)
        lines.append(curve(name, {seed: best(outcomes, seed)[1] for seed in setup.seeds}, most=3.0))
    return Plot("Norms and residuals, alone and together", STEP, ABOVE, lines, levels=LEVELS)


def _fewest(setup: Setup, recipes: list[Recipe], nats: float) -> dict[int, float]:
    outcomes = trained(setup, recipes)
    return {seed: fewest_steps(outcomes, seed, nats) for seed in setup.seeds}


def _saved(steps: float, than: float, budget: int) -> float:
    """Share of the steps saved, below zero for more steps; the budget counts where one never gets there."""
    return 1 - min(steps, budget) / min(than, budget)


COMPARED = {
    "": ("both", "neither"),
    "band": ("both", "neither"),
    "norms": ("both", "residual alone"),
    "deep": ("both, deep", "residual alone, deep"),
}
"""The kinds of stacks that the sentence and each part of C11 compare."""


def _savings(steps: Mapping[str, Mapping[int, float]], seed: int, budget: int) -> Iterator[Case]:
    for part, names in COMPARED.items():
        saved = _saved(steps[names[0]][seed], steps[names[1]][seed], budget)
        where = f"{names[0]} against {names[1]}, share of the steps saved"
        if part == "band":
            yield Case(seed, where, saved, FEWER <= saved <= MOST, part)
        else:
            yield effect(seed, where, saved, FEWER, part=part)


@claim(
    "C39",
    Source("004", "§5.3.2", "训练初期的数值稳定性相对较差，对学习率和初始化更加敏感"),
    says="Pre-LN is more sensitive to the learning rate than Post-LN.",
    asks="4 blocks, AdamW, no warm-up: fewer rates of the ladder train from both kinds of weights than "
    "with Post-LN",
    kind=Kind.TENDENCY,
    smallest=1.0,
    parts={
        "weights": Sentence(
            "It is more sensitive to how the weights start: at the best rate, Xavier's and N(0, 0.02²) end "
            "at least 0.05 nats farther apart.",
            smallest=COUNTS,
        ),
        "early": Sentence(
            "It is less stable early on: the loss of the first 60 steps rises higher over its start, by a "
            "tenth.",
            smallest=0.1,
        ),
    },
)
def pre_is_sensitive(setup: Setup) -> Evidence:
    """Rates that train, the spread over weights, and how high the loss rises at first."""
    bases = {"pre": (PRE, PRE_XAVIER), "post": (POST, POST_NORMAL)}
    outcomes = trained(setup, [r for pair in bases.values() for base in pair for r in ladder(base)])
    cases = setup.cases(lambda seed: _sensitivity(outcomes, bases, seed))
    return Evidence(
        cases,
        Figure(
            "settings that train, Post-LN's less Pre-LN's, of 8 each",
            {case.seed: case.value for case in cases if not case.part},
        ),
        plots=[rates_plot({n: {r: outcomes[r] for b in p for r in ladder(b)} for n, p in bases.items()})],
        of="seeds",
    )


def _sensitivity(outcomes: Outcomes, bases: Mapping[str, tuple[Recipe, Recipe]], seed: int) -> Iterator[Case]:
    ladders = {name: [ladder(base) for base in pair] for name, pair in bases.items()}
    trains = {n: sum(outcomes[r][seed].trains for rs in lists for r in rs) for n, lists in ladders.items()}
    ends = {n: [min(outcomes[r][seed].final for r in rs) for rs in lists] for n, lists in ladders.items()}
    spread = {name: abs(first - second) for name, (first, second) in ends.items()}
    rise = {n: max(_rise(outcomes[r][seed]) for rs in lists for r in rs) for n, lists in ladders.items()}
    yield effect(
        seed,
        "settings of 8 that train, Post-LN's less Pre-LN's",
        trains["post"] - trains["pre"],
        1.0,
        most=8.0,
    )
    yield effect(seed, "spread over weights, nats", spread["pre"] - spread["post"], COUNTS, part="weights")
    yield effect(seed, "largest rise over the start", rise["pre"] - rise["post"], 0.1, part="early")


def _rise(outcome: Outcome) -> float:
    """The highest of the first 60 losses over the first."""
    first = [loss for loss in outcome.losses[:60] if math.isfinite(loss)]
    return max(first) / first[0]
