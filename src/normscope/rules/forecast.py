"""NS6xx: findings of the trial's training steps. The outcome "collapses" is raised as NS202."""

import dataclasses
import math
from collections.abc import Iterator

from normscope.forecast import Forecast
from normscope.forecast.record import EVEN
from normscope.forecast.thresholds import ENOUGH, HELD, LEARNT, PARTED
from normscope.rules.finding import Severity
from normscope.rules.rule import Case, Hit, rule
from normscope.rules.trial import trial_hit
from normscope.train import CRITERION_STEPS

WATCH = (
    "The loss fell until then: `normscope watch -- python train.py` says where in the model the first NaN or "
    "infinity comes from (docs/monitor.md)."
)
"""Sentence of a trial whose loss is not finite after a fall."""


@rule(
    "NS601",
    summary="After the trial's steps the model has learnt only the token frequencies.",
    why="""Every language model first learns the unigram distribution, whose entropy is the loss of a constant
        output. A model leaves that plateau only while different inputs give different outputs and gradients
        of different batches agree. Where neither holds, more steps do not help.""",
    threshold=f"""The forecast's outcome is plateau: a token diversity under {PARTED:g} and a pull (coherence
        + 3·alignment) under {ENOUGH:g}; or, after {CRITERION_STEPS} steps, a mean loss that has stopped
        falling, less than {LEARNT:g} nats above the unigram entropy and less than {HELD:g} under it. A
        warning where the probability of training is {EVEN:g} or more all the same. A healthy run that is
        only slow has the outcome "slow", which is no finding.""",
    source="""Our ladders of learning rates, 300 steps each, tuned on some and reported on others
        (docs/forecast.md).""",
    remedy="""Warm up over at least 100 steps, divide the learning rate by 3 to 10, or put the norms inside
        the branches.""",
    remedies=(
        "pre-ln",
        "deepnorm",
        "small-init",
        "output-bias",
        "warm-up",
        "lower-rate",
        "much-lower-rate",
        "far-lower-rate",
    ),
)
def plateau(case: Case) -> Iterator[Hit]:
    if forecast := _with_outcome(case, "plateau"):
        yield trial_hit(Severity.WARNING if forecast.is_near_limit else Severity.ERROR, forecast)


@rule(
    "NS602",
    summary="The model fails at the full learning rate from the first step; with a warm-up it does not.",
    why="""Adam's first steps have nearly the size η, whatever the gradient, and all weights move at once. The
        output of a deep Post-LN stack then moves by an amount that grows with depth. A warm-up keeps these
        steps small until the second moments are estimated and the norms' gains have adapted.""",
    threshold="The forecast's outcome is needs-warmup: the trial failed without warm-up and passed with it.",
    source="Xiong et al. 2020, arXiv:2002.04745; Liu et al. 2020 (Admin), arXiv:2004.08249.",
    remedy="Train with a linear warm-up (--warmup 500 or more), or lower the learning rate.",
    remedies=("warm-up", "lower-rate"),
)
def needs_warmup(case: Case) -> Iterator[Hit]:
    if forecast := _with_outcome(case, "needs-warmup"):
        yield trial_hit(Severity.WARNING, forecast)


@rule(
    "NS603",
    summary="The loss rises, or becomes NaN or infinite, within the trial's steps.",
    why="""A step is stable only while the largest curvature of the preconditioned loss stays under a limit
        that falls with the learning rate η (38/η for Adam). Beyond it every step overshoots further than the
        last.""",
    threshold="The forecast's outcome is diverges; its reason gives the figures.",
    source="Cohen et al. 2022 (adaptive edge of stability), arXiv:2207.14484; the trial itself.",
    remedy="""Divide the learning rate by 3 to 10, or warm up. Clipping the gradient bounds a step of SGD. A
        step of Adam hardly depends on the gradient's size: clipping rescued one of the 8 runs that it was
        tried on.""",
    remedies=(
        "lower-rate",
        "much-lower-rate",
        "far-lower-rate",
        "warm-up",
        "clip",
        "adam-eps",
        "small-init",
        "qk-norm",
    ),
)
def diverges(case: Case) -> Iterator[Hit]:
    forecast = _with_outcome(case, "diverges")
    if forecast and not case.table.of("precision/non-finite"):  # a model that is broken before the first step
        hit = trial_hit(Severity.ERROR, forecast, _remedy(case))
        more = f" {WATCH}" if _fell_before(forecast) else ""
        yield dataclasses.replace(hit, message=hit.message + more)


def _fell_before(forecast: Forecast) -> bool:
    """Whether the loss was falling when it became NaN or infinite: the rate alone does not explain that."""
    losses = [step.loss for step in forecast.curve]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return len(losses) > len(finite) > 1 and finite[-1] == min(finite)


def _remedy(case: Case) -> str:
    """The remedy for float16 weights, which reach NaN at any learning rate; empty for the rule's own."""
    if case.dtype != "float16":
        return ""
    return (
        "Keep the weights in float32 and run under autocast with loss scaling, or use bfloat16. In float16 "
        "Adam's ε = 1e-8 is zero, and a step divides by it."
    )


def _with_outcome(case: Case, outcome: str) -> Forecast | None:
    return case.forecast if case.forecast is not None and case.forecast.outcome == outcome else None
