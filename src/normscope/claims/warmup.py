"""What warm-up and clipping do for Post-LN, and how its runs fail."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from normscope.claims.claim import Kind, Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.measure import NotMeasured
from normscope.claims.plots import Plot
from normscope.claims.setup import Setup
from normscope.claims.sources import Source
from normscope.claims.training import (
    ABOVE,
    LEVELS,
    RATE,
    STEP,
    WARMUP,
    Outcome,
    Outcomes,
    Recipe,
    best,
    curve,
    ladder,
    trained,
)
from normscope.train import CRITERION_STEPS, MARGIN

DEEP = 8
"""Blocks from which Post-LN from Xavier weights is called deep."""
POST = tuple(Recipe(scheme="post", depth=depth) for depth in (4, 8, 12))
POST_NORMAL = tuple(Recipe(scheme="post", init="normal", depth=depth) for depth in (4, 8))
PRE = tuple(Recipe(scheme="pre", depth=depth) for depth in (4, 8, 16))
SLOWER = 1e-3
"""A rate for runs that a long warm-up to 3e-3 does not save, or that need none at it."""
CLIP = 1.0
"""The threshold that 004 advises."""


@claim(
    "B4",
    Source("001", "§2.B", "必须使用 **Learning Rate Warm-up**"),
    Source("001", "Summary", "**必须**，且对参数敏感"),
    Source("003", "§2", "把 warm-up 步数缩短到 0-500"),
    Source("004", "§3.4", "必须配合 Warm-up"),
    Source("004", "§5.3.2", "无需复杂的warm-up技巧"),
    Source("004", "§8.3", "否则很难训练深模型"),
    Source("004", "§8.5", "**强烈需要**"),
    says="Post-LN needs warm-up: without it, it does not train.",
    asks="Post-LN decoders of 4 to 12 blocks at AdamW 3e-3 without warm-up, and of 8 at 1e-3, end less "
    "than 0.1 nats under the byte frequencies, from Xavier and from N(0, 0.02²) weights; those that fail "
    "train with a warm-up of two thirds of the steps, to 3e-3 or to 1e-3; Pre-LN trains with none",
    condition=f"the weights are Xavier's, there are {DEEP} blocks or more, and the rate is {RATE:g}",
    kind=Kind.TENDENCY,
    parts={
        "cure": Sentence(
            "A long warm-up makes a Post-LN model train that fails without it.",
            f"there are {DEEP} blocks or fewer",
        ),
        "pre": Sentence("Pre-LN trains without warm-up."),
        "short": Sentence(
            "Pre-LN needs 0 to 500 steps of warm-up at most: none ends within 0.1 nats of a long one."
        ),
    },
    has_long=True,
)
def needs_warmup(setup: Setup) -> Evidence:
    """With and without warm-up: Post-LN from two kinds of weights, Pre-LN."""
    xavier, normal, pre, warmup = _plan(setup.long)
    compared = pre if setup.long else (PRE[1],)
    warm = {recipe: replace(recipe, warmup=warmup) for recipe in (*xavier, *compared)}
    slower = {recipe: replace(warm[recipe], lr=SLOWER) for recipe in xavier if recipe.depth >= DEEP}
    cold_slower = [replace(recipe, lr=SLOWER) for recipe in xavier if recipe.depth == DEEP]
    if setup.long:
        warm |= slower  # half of the cost
    outcomes = trained(setup, [*xavier, *normal, *cold_slower, *pre, *warm.values(), *slower.values()])
    cases = [
        *_needs(outcomes, (*xavier, *normal, *cold_slower)),
        *_cured(outcomes, {recipe: (warm[recipe], slow) for recipe, slow in slower.items()}),
        *_pre_trains(outcomes, pre),
        *_no_better(outcomes, {recipe: warm[recipe] for recipe in compared}),
    ]
    deep = [recipe for recipe in xavier if recipe.depth >= DEEP]
    excess = {seed: max(outcomes[recipe][seed].excess for recipe in deep) for seed in setup.seeds}
    shown = [deep[0], warm[deep[0]], normal[-1], compared[0]]
    return Evidence(
        cases=cases,
        figure=Figure("deep Post-LN without warm-up ends above the byte frequencies by, in nats", excess),
        plots=[
            Plot(
                f"{deep[0].depth} blocks, AdamW {deep[0].lr:g}",
                STEP,
                ABOVE,
                [curve(_short_name(recipe), outcomes[recipe]) for recipe in shown],
                levels=LEVELS,
            )
        ],
        notes=[_tally(outcomes, recipe) for recipe in outcomes],
        of="runs",
    )


def _plan(long: bool) -> tuple[tuple[Recipe, ...], tuple[Recipe, ...], tuple[Recipe, ...], int]:
    """Post-LN from Xavier and from normal weights, Pre-LN, and the steps of a long warm-up."""
    if not long:
        return POST, POST_NORMAL, PRE, WARMUP
    deep = Recipe(scheme="post", depth=10, steps=1000)
    return (deep,), (replace(deep, init="normal"),), (replace(deep, scheme="pre"),), 500


def _needs(outcomes: Outcomes, recipes: tuple[Recipe, ...]) -> Iterator[Case]:
    for recipe in recipes:
        met = recipe.init is None and recipe.depth >= DEEP and recipe.lr == RATE
        for seed, outcome in outcomes[recipe].items():
            yield Case(seed=seed, where=str(recipe), value=outcome.excess, holds=not outcome.trains, met=met)


def _cured(outcomes: Outcomes, warm: Mapping[Recipe, tuple[Recipe, Recipe]]) -> Iterator[Case]:
    for cold, recipes in warm.items():
        for seed, outcome in outcomes[cold].items():
            if not outcome.trains:
                recipe, warmed = best({recipe: outcomes[recipe] for recipe in recipes}, seed)
                yield Case(
                    seed=seed,
                    where=str(recipe),
                    value=warmed.excess,
                    holds=warmed.trains,
                    met=recipe.depth <= DEEP,
                    part="cure",
                )


def _pre_trains(outcomes: Outcomes, recipes: tuple[Recipe, ...]) -> Iterator[Case]:
    for recipe in recipes:
        for seed, outcome in outcomes[recipe].items():
            yield Case(seed=seed, where=str(recipe), value=outcome.excess, holds=outcome.trains, part="pre")


def _no_better(outcomes: Outcomes, warm: Mapping[Recipe, Recipe]) -> Iterator[Case]:
    for cold, recipe in warm.items():
        for seed, outcome in outcomes[recipe].items():
            lost = outcomes[cold][seed].final - outcome.final
            yield Case(seed=seed, where=str(cold), value=lost, holds=lost <= MARGIN, part="short")


def _short_name(recipe: Recipe) -> str:
    init = "" if recipe.init is None else f", {recipe.init} weights"
    return f"{recipe.scheme}{init}, warm-up {recipe.warmup}"


def _tally(outcomes: Outcomes, recipe: Recipe) -> str:
    by_seed = outcomes[recipe].values()
    ends = sorted(outcome.excess for outcome in by_seed)
    count = sum(outcome.trains for outcome in by_seed)
    return f"{recipe}: {count} of {len(ends)} train ({ends[0]:+.2f} … {ends[-1]:+.2f} nats)."


@claim(
    "B17",
    Source("001", "§2.B", "否则模型很容易发散（Loss 飞出）"),
    Source("004", "§10", "如果 Loss 出现 NaN 或剧烈震荡"),
    says="A Post-LN model that fails for want of warm-up diverges: its loss flies off.",
    asks="the Post-LN runs without warm-up that fail end in a loss that is not finite, or above the "
    "one they started from; the alternative is a plateau within 0.1 nats of the byte frequencies",
    kind=Kind.TENDENCY,
    parts={
        "plateau": Sentence("It stands still instead, within 0.1 nats of the byte frequencies."),
        "spike": Sentence("On the way its loss rises above where it started by 10 % or more."),
    },
)
def fails_by_divergence(setup: Setup) -> Evidence:
    """How the runs of Post-LN without warm-up end that fail: a class for each."""
    outcomes = trained(setup, [*POST, *ladder(POST[0])])
    failed = [
        (recipe, seed, outcome)
        for recipe, by_seed in outcomes.items()
        for seed, outcome in by_seed.items()
        if not outcome.trains
    ]
    if not failed:
        raise NotMeasured("every Post-LN run without warm-up trains")
    cases = [case for recipe, seed, outcome in failed for case in _ends(recipe, seed, outcome)]
    ends = [outcome.excess for _, _, outcome in failed]
    shown = dict.fromkeys(recipe for recipe, _, _ in failed)
    diverged = sum(case.holds for case in cases if case.part == "")
    return Evidence(
        cases=cases,
        figure=Figure.largest("farthest from the byte frequencies at the end, in nats", cases),
        plots=[
            Plot(
                "Post-LN without warm-up, runs that fail",
                STEP,
                ABOVE,
                [curve(f"{recipe.depth} blocks, rate {recipe.lr:g}", outcomes[recipe]) for recipe in shown],
                levels=LEVELS,
            )
        ],
        notes=[
            f"{len(failed)} of {sum(map(len, outcomes.values()))} runs fail: {diverged} diverge; they end "
            f"{min(ends):+.3f} to {max(ends):+.3f} nats from the byte frequencies."
        ],
        of="failing runs",
    )


def _ends(recipe: Recipe, seed: int, outcome: Outcome) -> Iterator[Case]:
    where, value = str(recipe), abs(outcome.excess)
    flew = outcome.final > outcome.losses[0]
    yield Case(seed=seed, where=where, value=value, holds=flew)
    yield Case(seed=seed, where=where, value=value, holds=value <= MARGIN, part="plateau")
    top = max(outcome.losses) / outcome.losses[0]
    yield Case(seed=seed, where=where, value=top, holds=top >= 1.1, part="spike")


@claim(
    "C26",
    Source("004", "§10 deployment", "通常将梯度范数裁剪阈值设置为 1.0，这是确保模型收敛的“安全带”"),
    Source("004", "§7 pitfalls", "务必配合**梯度裁剪**使用"),
    says="Clipping gradients at norm 1.0 makes deep stacks converge that would not otherwise.",
    asks="runs that fail without clipping (Post-LN of 8 blocks at AdamW 3e-3; at the ladder's highest "
    "rate, Pre-LN and a stack without norms) end 0.1 nats under the byte frequencies with it",
    kind=Kind.TENDENCY,
    parts={"harm": Sentence("It costs a run that trains no more than 0.1 nats.")},
    has_long=True,
)
def clipping_rescues(setup: Setup) -> Evidence:
    """The same runs with and without clipping."""
    bare = _clipped_plan(setup.long)
    clipped = {recipe: replace(recipe, clip=CLIP) for recipe in bare}
    outcomes = trained(setup, [*bare, *clipped.values()])
    cases = []
    excess = {seed: outcome.excess for seed, outcome in outcomes[clipped[bare[0]]].items()}
    for recipe, safe in clipped.items():
        for seed, outcome in outcomes[recipe].items():
            guarded = outcomes[safe][seed]
            gain = outcome.final - guarded.final
            if outcome.trains:
                cases.append(
                    Case(seed=seed, where=str(safe), value=-gain, holds=gain >= -MARGIN, part="harm")
                )
            else:
                cases.append(Case(seed=seed, where=str(safe), value=guarded.excess, holds=guarded.trains))
    return Evidence(
        cases=cases,
        figure=Figure("clipped Post-LN ends above the byte frequencies by, in nats", excess),
        plots=[
            Plot(
                f"{bare[0].scheme}, {bare[0].depth} blocks, with and without clipping",
                STEP,
                ABOVE,
                [
                    curve("not clipped", outcomes[bare[0]]),
                    curve("clipped at 1.0", outcomes[clipped[bare[0]]]),
                ],
                levels=LEVELS,
            )
        ],
        notes=[_tally(outcomes, recipe) for recipe in outcomes],
        of="failing runs",
    )


def _clipped_plan(long: bool) -> list[Recipe]:
    """Runs that are likely to fail without clipping."""
    if long:
        deep = Recipe(scheme="post", depth=12, steps=1000)
        return [deep, replace(deep, depth=24, steps=CRITERION_STEPS)]
    return [
        POST[1],
        ladder(PRE[0])[-1],
        ladder(Recipe(scheme="residual-no-norm", depth=4))[-1],
    ]
