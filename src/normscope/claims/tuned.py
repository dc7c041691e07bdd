"""Placements tuned alike: where they end, and how fast they fall."""

import statistics
from collections.abc import Mapping
from dataclasses import replace

from normscope.claims.claim import Kind, Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.plots import Line, Plot
from normscope.claims.setup import Setup
from normscope.claims.sources import Source
from normscope.claims.training import (
    ABOVE,
    LEVELS,
    STEP,
    WARMUP,
    Outcomes,
    Recipe,
    best,
    curve,
    fewest_steps,
    ladder,
    trained,
)

POST, PRE = Recipe(scheme="post", depth=4), Recipe(scheme="pre", depth=4)
POST_NORMAL, PRE_XAVIER = replace(POST, init="normal"), replace(PRE, init="xavier")
EARLY, LATER = -0.1, -0.3
"""Nats from the byte frequencies that a run has to get to."""


def _tuned(setup: Setup) -> dict[str, Outcomes]:
    """Every setting tried of a placement, by its name."""
    settings = {
        "post": [*ladder(POST), replace(POST, warmup=WARMUP), *ladder(POST_NORMAL)],
        "pre": [*ladder(PRE), replace(PRE, warmup=WARMUP), *ladder(PRE_XAVIER)],
    }
    if setup.long:
        settings = {name: [longer(r) for r in rs if r.lr in (1e-3, 3e-3)] for name, rs in settings.items()}
    outcomes = trained(setup, [recipe for recipes in settings.values() for recipe in recipes])
    return {name: {recipe: outcomes[recipe] for recipe in recipes} for name, recipes in settings.items()}


def longer(recipe: Recipe) -> Recipe:
    return replace(recipe, steps=1000)


@claim(
    "B7",
    Source("001", "§3", "精度可能会略高于 Pre-LN"),
    Source("001", "Summary", "理论上限稍高 (若能收敛)"),
    Source("004", "§8.3", "微调性能略逊于Post-LN"),
    says="Where it trains, Post-LN ends a little better than Pre-LN.",
    asks="4 blocks, each placement at the best of its rates, weights and warm-ups on a seed: the mean "
    "of the last 20 losses (of text not seen before) is lower for Post-LN",
    kind=Kind.TENDENCY,
    has_long=True,
)
def post_ends_better(setup: Setup) -> Evidence:
    """Final losses, both tuned."""
    tuned = _tuned(setup)
    found = {name: {seed: best(tuned[name], seed) for seed in setup.seeds} for name in tuned}
    cases, worse = [], {}
    for seed in setup.seeds:
        (recipe, post), (other, pre) = found["post"][seed], found["pre"][seed]
        worse[seed] = post.final - pre.final
        cases.append(
            Case(seed=seed, where=f"{recipe} against {other}", value=worse[seed], holds=worse[seed] < 0)
        )
    return Evidence(
        cases=cases,
        figure=Figure("Post-LN's loss less Pre-LN's, both tuned, in nats", worse),
        plots=[rates_plot(tuned), _curves_plot(tuned, setup)],
        notes=[
            f"Tuned, {name} ends {statistics.fmean(o.excess for _, o in by_seed.values()):+.3f} nats from "
            f"the byte frequencies, the mean of {len(by_seed)} seeds."
            for name, by_seed in found.items()
        ],
        of="seeds",
    )


def rates_plot(tuned: Mapping[str, Outcomes]) -> Plot:
    lines = []
    for name, outcomes in tuned.items():
        points: dict[float, list[float]] = {}
        for recipe, by_seed in outcomes.items():
            if recipe.warmup == 0:
                points.setdefault(recipe.lr, []).extend(min(o.excess, 1.0) for o in by_seed.values())
        lines.append(Line.over_seeds(name, points))
    return Plot(
        "The end of a run by its rate, over seeds and weights", "rate", ABOVE, lines, log="x", levels=LEVELS
    )


def _curves_plot(tuned: Mapping[str, Outcomes], setup: Setup) -> Plot:
    lines = [
        curve(name, {seed: best(outcomes, seed)[1] for seed in setup.seeds})
        for name, outcomes in tuned.items()
    ]
    return Plot("The best run of each seed", STEP, ABOVE, lines, levels=LEVELS)


@claim(
    "B8",
    Source("002", "Post-Norm, advantage 1", "在训练初期,这种结构能更快地降低损失函数"),
    Source("002", "Pre-Norm, drawback 1", "可能需要更多的训练步骤才能达到较好的收敛速度"),
    says="Early in training Post-LN's loss falls faster than Pre-LN's.",
    asks="4 blocks, both tuned over rates, weights and warm-ups: Post-LN is 0.1 nats under the byte "
    "frequencies (mean of 20 steps) in fewer steps",
    kind=Kind.TENDENCY,
    parts={"later": Sentence("It is 0.3 nats under them in fewer steps, too.")},
    has_long=True,
)
def post_falls_faster(setup: Setup) -> Evidence:
    """Steps to two losses, both tuned for them."""
    tuned = _tuned(setup)
    cases, extra = [], {}
    for seed in setup.seeds:
        for nats, part in ((EARLY, ""), (LATER, "later")):
            post, pre = (fewest_steps(tuned[name], seed, nats) for name in ("post", "pre"))
            more = _more(post, pre, 1000 if setup.long else PRE.steps)
            where = f"steps to {nats:+.1f} nats: {post:g} against {pre:g}"
            cases.append(Case(seed=seed, where=where, value=more, holds=post < pre, part=part))
            if not part:
                extra[seed] = more
    return Evidence(
        cases=cases,
        figure=Figure("Post-LN's extra steps to 0.1 nats under the byte frequencies, in %", extra),
        plots=[_curves_plot(tuned, setup)],
        of="seeds",
    )


def _more(steps: float, than: float, budget: int) -> float:
    """Extra steps in percent; one that never gets there counts as the whole budget."""
    return 100 * (min(steps, budget) / min(than, budget) - 1)
