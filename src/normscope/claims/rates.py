"""Stacks that are tuned alike: the learning rates that train them, how fast the loss falls, where it ends."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from normscope.claims import training
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, effect, flat
from normscope.claims.training import RATES, WARMUP, Outcome, Outcomes, Setting, curves, ladder

POST, PRE = Setting(scheme="post", depth=4), Setting(scheme="pre", depth=4)
POST_NORMAL, PRE_XAVIER = replace(POST, init="normal"), replace(PRE, init="xavier")
NO_NORM, PLAIN = replace(POST, scheme="residual-no-norm"), replace(POST, scheme="plain")
DEEP_PRE, DEEP_NO_NORM = replace(PRE, depth=16), replace(NO_NORM, depth=16)
EARLY, LATER = -0.1, -0.3
"""Nats from the byte frequencies that a run has to reach."""
FIRST = 100
"""Steps that are called early."""
FEWER, MOST = 0.30, 0.50
"""The smallest and the largest share of the steps that 004 says are saved."""


def _tried(setup: Setup, settings: Mapping[str, Sequence[Setting]]) -> dict[str, Outcomes]:
    """Outcomes of all settings, by the names in `settings`."""
    outcomes = training.trained(setup, [setting for settings in settings.values() for setting in settings])
    return {name: {setting: outcomes[setting] for setting in settings} for name, settings in settings.items()}


def _longer(settings: Sequence[Setting], *rates: float) -> list[Setting]:
    """The settings at `rates`, with 1000 steps."""
    return [replace(setting, steps=1000) for setting in settings if setting.lr in rates]


def compared(setup: Setup, score: Callable[[Outcome], float], where: str, what: str) -> Evidence:
    """Pre-LN's score less Post-LN's, seed by seed, each at the setting whose mean score is lowest."""
    settings = {
        "post": [*ladder(POST), replace(POST, warmup=WARMUP), *ladder(POST_NORMAL)],
        "pre": [*ladder(PRE), replace(PRE, warmup=WARMUP), *ladder(PRE_XAVIER)],
    }
    if setup.long:
        settings = {name: _longer(settings, *RATES[:2]) for name, settings in settings.items()}
    tried = _tried(setup, settings)

    def mean(by_seed: Mapping[int, Outcome]) -> float:
        return statistics.fmean(score(outcome) for outcome in by_seed.values())

    chosen = {name: min(outcomes.items(), key=lambda each: mean(each[1])) for name, outcomes in tried.items()}
    post, pre = (by_seed for _, by_seed in chosen.values())
    cases = [effect(seed, where, score(pre[seed]) - score(post[seed])) for seed in setup.seeds]
    return Evidence(
        cases,
        Figure.largest(what, cases),
        plots=[
            training.rates_plot("The end of a run by its rate, over seeds and weights", tried),
            curves("The best setting of each", {name: by_seed for name, (_, by_seed) in chosen.items()}),
        ],
        notes=[f"Best: {setting}, mean {mean(by_seed):.3f} nats." for setting, by_seed in chosen.values()],
    )


def early(outcome: Outcome) -> float:
    """The mean loss of the first 100 steps, infinite where the run diverged."""
    losses = outcome.losses[:FIRST]
    return statistics.fmean(losses) if len(losses) == FIRST else math.inf


@claim("B7", has_long=True)
def post_ends_better(setup: Setup) -> Evidence:
    """Final losses, both tuned."""
    what = "nats by which Post-LN ends lower than Pre-LN, both tuned"
    return compared(setup, lambda outcome: outcome.final, "4 blocks, at the end", what)


@claim("B8", has_long=True)
def post_falls_faster(setup: Setup) -> Evidence:
    """Mean losses of the first steps, both tuned for them."""
    what = "nats by which Post-LN's mean loss of the first 100 steps is lower, both tuned"
    return compared(setup, early, "4 blocks, the first 100 steps", what)


@claim("C10", has_long=True)
def larger_rates(setup: Setup) -> Evidence:
    """The largest rate that trains, with norms and without."""
    rates = (*RATES, 1e-1) if setup.long else RATES
    kinds = (NO_NORM, PRE, PRE_XAVIER, POST, POST_NORMAL)[: setup.sizes(5, 3)]
    bases = {_name(base): replace(base, depth=setup.sizes(4, 3)) for base in kinds}
    tried = _tried(setup, {name: ladder(base, rates) for name, base in bases.items()})

    def rungs(name: str, seed: int) -> int:
        return sum(by_seed[seed].trains for by_seed in tried[name].values())

    found = setup.by_seed(tried, rungs)
    bare = found.pop(NO_NORM.scheme)
    more = setup.by_seed(found, lambda name, seed: found[name][seed] - bare[seed])
    cases = []
    for name, seed, count in flat(more):
        case = effect(seed, f"{name}, rungs more than without norms", count)
        cases.append(replace(case, met=name.startswith("pre")))
    return Evidence(
        cases,
        Figure(
            "rungs (half a decade each) that Pre-LN trains more than without norms, Xavier weights",
            more[_name(PRE_XAVIER)],
        ),
        plots=[training.rates_plot("The end of a run by its rate", tried)],
        notes=[
            f"{name}: {', '.join(map(str, by_seed.values()))} rungs of {len(rates)} train, by seed."
            for name, by_seed in ({NO_NORM.scheme: bare} | found).items()
        ],
    )


def _name(base: Setting) -> str:
    return base.scheme if base.init is None else f"{base.scheme}, {base.init} weights"


@claim("C11", has_long=True)
def fewer_steps(setup: Setup) -> Evidence:
    """Steps to a loss, with both, with residuals alone, with neither."""
    kinds = KINDS
    if setup.long:
        kinds = {name: _longer(settings, RATES[1]) for name, settings in KINDS.items()}
    tried = _tried(setup, kinds)
    goals = {name: EARLY if "deep" in name else LATER for name in tried}
    steps = setup.by_seed(tried, lambda name, seed: training.fewest_steps(tried[name], seed, goals[name]))
    cases = setup.cases(lambda seed: _savings(steps, seed, 1000 if setup.long else PRE.steps))
    lowest = setup.by_seed(tried, lambda name, seed: training.best(tried[name], seed)[1])
    return Evidence(
        cases,
        Figure(
            "steps that norms and residuals save together, at least, in %",
            {case.seed: 100 * case.value for case in cases if not case.part},
        ),
        plots=[curves("Norms and residuals, alone and together", lowest, most=3.0)],
        notes=[
            f"{name}: {', '.join(f'{count:g}' for count in by_seed.values())} steps, by seed."
            for name, by_seed in steps.items()
        ],
    )


KINDS: Mapping[str, Sequence[Setting]] = {
    "both": [r for base in (PRE, PRE_XAVIER, POST, POST_NORMAL) for r in ladder(base)],
    "residual alone": ladder(NO_NORM),
    "neither": ladder(PLAIN, (3e-4, *RATES[:3])),
    "both, deep": [DEEP_PRE],
    "residual alone, deep": ladder(DEEP_NO_NORM, RATES[:2]),
}
COMPARED = {
    "": ("both", "neither"),
    "band": ("both", "neither"),
    "norms": ("both", "residual alone"),
    "deep": ("both, deep", "residual alone, deep"),
}
"""The kinds of stacks that the sentence and each part of C11 compare."""


def _savings(steps: Mapping[str, Mapping[int, float]], seed: int, budget: int) -> Iterator[Case]:
    for part, (this, that) in COMPARED.items():
        saved = _saved(steps[this][seed], steps[that][seed], budget)
        where = f"{this} against {that}, share of the steps saved"
        if part == "band":
            yield Case(seed, where, saved, FEWER <= saved <= MOST, part)
        else:
            yield effect(seed, where, saved, part=part)


def _saved(steps: float, than: float, budget: int) -> float:
    """Share of the steps saved, below zero for more steps; the budget counts where one never gets there."""
    return 1 - min(steps, budget) / min(than, budget)


@claim("C39")
def pre_is_sensitive(setup: Setup) -> Evidence:
    """Rates that train, the spread over weights, and how high the loss rises at first."""
    kinds = {"pre": (PRE, PRE_XAVIER), "post": (POST, POST_NORMAL)}
    tried = _tried(setup, {name: [r for base in pair for r in ladder(base)] for name, pair in kinds.items()})
    cases = setup.cases(lambda seed: _sensitivity(tried, seed))
    return Evidence(
        cases,
        Figure.largest("settings that train, Post-LN's less Pre-LN's, of 8 each", cases),
        plots=[training.rates_plot("The end of a run by its rate, over seeds and weights", tried)],
    )


def _sensitivity(tried: Mapping[str, Outcomes], seed: int) -> Iterator[Case]:
    trains, spread, rise = {}, {}, {}
    for name, outcomes in tried.items():
        runs = [by_seed[seed] for by_seed in outcomes.values()]
        one, other = (min(run.final for run in half) for half in (runs[: len(RATES)], runs[len(RATES) :]))
        trains[name], spread[name] = sum(run.trains for run in runs), abs(one - other)
        rise[name] = max(map(_rise, runs))
    where = "settings of 8 that train, Post-LN's less Pre-LN's"
    yield effect(seed, where, trains["post"] - trains["pre"], most=8.0)
    yield effect(seed, "spread over weights, nats", spread["pre"] - spread["post"], part="weights")
    yield effect(seed, "largest rise over the start", rise["pre"] - rise["post"], part="early")


def _rise(outcome: Outcome) -> float:
    """The highest of the first 60 losses over the first."""
    first = [loss for loss in outcome.losses[:60] if math.isfinite(loss)]
    return max(first) / first[0]


@claim("A23")
def needs_small_rates(setup: Setup) -> Evidence:
    """The rates that train, for both placements and two starts."""
    stacks = {
        "post, xavier": POST,
        "post, normal": POST_NORMAL,
        "pre, xavier": PRE_XAVIER,
        "pre, normal": PRE,
    }
    tried = _tried(setup, {name: ladder(setting) for name, setting in stacks.items()})
    largest = setup.by_seed(tried, lambda name, seed: _largest(tried[name], seed))
    cases = []
    for init in ("xavier", "normal"):
        for seed in setup.seeds:
            decades = math.log10(largest[f"pre, {init}"][seed] / largest[f"post, {init}"][seed])
            cases.append(effect(seed, f"{init} weights, decades", decades))
    return Evidence(
        cases,
        Figure("largest rate that trains Post-LN from Xavier weights", largest["post, xavier"]),
        plots=[training.rates_plot("Last losses by rate", tried)],
    )


def _largest(outcomes: Outcomes, seed: int) -> float:
    """The largest rate that trains, half a decade under the ladder for none."""
    trains = (setting.lr for setting, by_seed in outcomes.items() if by_seed[seed].trains)
    return max(trains, default=RATES[0] / 10**0.5)
