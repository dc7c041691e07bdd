"""Placements tuned alike: where they end, and how fast they fall."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

from normscope.claims.evidence import effect
from normscope.claims.form import Evidence, Figure, Kind, Line, Plot, Setup, Source, claim
from normscope.claims.training import (
    ABOVE,
    LEVELS,
    STEP,
    WARMUP,
    Outcome,
    Outcomes,
    Recipe,
    curve,
    ladder,
    mean_by_seed,
    trained,
)

POST, PRE = Recipe(scheme="post", depth=4), Recipe(scheme="pre", depth=4)
POST_NORMAL, PRE_XAVIER = replace(POST, init="normal"), replace(PRE, init="xavier")
EARLY, LATER = -0.1, -0.3
"""Nats from the byte frequencies that a run has to get to."""
COUNTS = 0.05
"""Nats: the smallest difference that counts."""
FIRST = 100
"""Steps that are called early."""


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


def early(outcome: Outcome) -> float:
    """The mean loss of the first 100 steps, infinite where the run diverged."""
    losses = outcome.losses[:FIRST]
    return statistics.fmean(losses) if len(losses) == FIRST else math.inf


def compared(setup: Setup, score: Callable[[Outcome], float], where: str, what: str) -> Evidence:
    """Pre-LN's score less Post-LN's, seed by seed, each at the setting whose mean score is lowest."""
    tuned = _tuned(setup)
    chosen = {name: _best(outcomes, score) for name, outcomes in tuned.items()}
    score_of = {
        name: {seed: score(outcome) for seed, outcome in tuned[name][recipe].items()}
        for name, recipe in chosen.items()
    }
    cases = [
        effect(seed, where, score_of["pre"][seed] - score_of["post"][seed], COUNTS) for seed in setup.seeds
    ]
    return Evidence(
        cases,
        Figure(what, mean_by_seed(cases)),
        plots=[
            rates_plot(tuned),
            Plot(
                "The best setting of each",
                STEP,
                ABOVE,
                [curve(name, tuned[name][recipe]) for name, recipe in chosen.items()],
                levels=LEVELS,
            ),
        ],
        notes=[f"Best: {recipe}, mean {_mean(score_of[name]):.3f} nats." for name, recipe in chosen.items()],
        of="seeds",
    )


def _mean(by_seed: Mapping[int, float]) -> float:
    return statistics.fmean(by_seed.values())


def _best(outcomes: Outcomes, score: Callable[[Outcome], float]) -> Recipe:
    return min(outcomes, key=lambda recipe: _mean({s: score(o) for s, o in outcomes[recipe].items()}))


@claim(
    "B7",
    Source("001", "§3", "精度可能会略高于 Pre-LN"),
    Source("001", "Summary", "理论上限稍高 (若能收敛)"),
    Source("004", "§8.3", "微调性能略逊于Post-LN"),
    says="Where it trains, Post-LN ends a little better than Pre-LN.",
    asks="4 blocks, each placement at the best of its rates, weights and warm-ups over all seeds: the mean "
    "of the last 20 losses (of text not seen before) is at least 0.05 nats lower for Post-LN, paired by seed",
    smallest=COUNTS,
    kind=Kind.TENDENCY,
    has_long=True,
)
def post_ends_better(setup: Setup) -> Evidence:
    """Final losses, both tuned."""
    what = "nats by which Post-LN ends lower than Pre-LN, both tuned"
    return compared(setup, lambda outcome: outcome.final, "4 blocks, at the end", what)


@claim(
    "B8",
    Source("002", "Post-Norm, advantage 1", "在训练初期,这种结构能更快地降低损失函数"),
    Source("002", "Pre-Norm, drawback 1", "可能需要更多的训练步骤才能达到较好的收敛速度"),
    says="Early in training Post-LN's loss falls faster than Pre-LN's.",
    asks="4 blocks, both tuned for it over rates, weights and warm-ups: the mean loss of the first 100 steps "
    "is at least 0.05 nats lower for Post-LN, paired by seed",
    smallest=COUNTS,
    kind=Kind.TENDENCY,
    has_long=True,
)
def post_falls_faster(setup: Setup) -> Evidence:
    """Mean losses of the first steps, both tuned for them."""
    what = "nats by which Post-LN's mean loss of the first 100 steps is lower, both tuned"
    return compared(setup, early, "4 blocks, the first 100 steps", what)


def rates_plot(tuned: Mapping[str, Outcomes]) -> Plot:
    """Where runs without warm-up end, by rate."""
    lines = []
    for name, outcomes in tuned.items():
        points: dict[float, list[float]] = {}
        for recipe, by_seed in outcomes.items():
            if recipe.warmup == 0:
                points.setdefault(recipe.lr, []).extend(min(o.excess, 1.0) for o in by_seed.values())
        lines.append(Line.over_seeds(name, points))
    return Plot("The end of a run by its rate, over seeds and weights", "rate", ABOVE, lines, "x", LEVELS)
