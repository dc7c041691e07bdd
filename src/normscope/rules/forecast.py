"""NS6xx: what a few real steps show. Collapse, the seventh outcome, is raised under NS202."""

from collections.abc import Iterator

from normscope.forecast import Forecast
from normscope.rules.finding import Severity
from normscope.rules.rule import Case, Hit, rule
from normscope.rules.trial import trial_hit


@rule(
    "NS601",
    summary="After the trial's steps the model has learnt the tokens' frequencies and shows no sign of more.",
    why="""Every language model first learns the unigram distribution, whose entropy is the loss of a constant
        output. A model gets off that plateau only while different inputs still give different outputs and
        while gradients of different batches agree; where neither holds, more steps repeat the last ones.""",
    threshold="""The forecast's outcome is plateau: under a diversity of 1e-3, a pull (coherence +
        3·alignment) of less than 0.05. A healthy run that is only slow is told as the outcome "slow" and is
        no finding.""",
    source="""Our ladders of learning rates, 300 steps each, tuned on some and reported on others
        (docs/forecast.md).""",
    remedy="""Warm up over at least 100 steps, lower the rate by 3 to 10 times, or lay the norms inside the
        branches.""",
    remedies=("pre-ln", "deepnorm", "small-init", "output-bias", "warm-up", "lower-rate", "much-lower-rate"),
)
def plateau(case: Case) -> Iterator[Hit]:
    if forecast := _with_outcome(case, "plateau"):
        yield trial_hit(Severity.ERROR, forecast)


@rule(
    "NS602",
    summary="At the full rate from the first step the model fails; with a warm-up it does not.",
    why="""Adam's first steps have nearly the size η whatever the gradient, and all weights move at once: the
        output of a deep Post-LN stack moves by an amount that grows with depth. A warm-up keeps these steps
        small until the second moments are estimated and the norms' gains have adapted.""",
    threshold="The forecast's outcome is needs-warmup: the trial failed without and passed with a warm-up.",
    source="Xiong et al. 2020, arXiv:2002.04745; Liu et al. 2020 (Admin), arXiv:2004.08249.",
    remedy="Train with a linear warm-up (--warmup 500 or more), or lower the rate.",
    remedies=("warm-up", "lower-rate"),
)
def needs_warmup(case: Case) -> Iterator[Hit]:
    if forecast := _with_outcome(case, "needs-warmup"):
        yield trial_hit(Severity.WARNING, forecast)


@rule(
    "NS603",
    summary="The loss rises, or leaves the finite numbers, within the trial's steps.",
    why="""A step is stable only while the rate times the largest curvature of the preconditioned loss stays
        under a constant (38/η for Adam). Beyond it every step overshoots further than the last.""",
    threshold="The forecast's outcome is diverges; its reason carries the figures.",
    source="Cohen et al. 2022 (adaptive edge of stability), arXiv:2207.14484; the trial itself.",
    remedy="""Lower the rate by 3 to 10 times, or warm up. Clipping the gradient bounds a step of SGD; a step
        of Adam hardly depends on the gradient's size, and clipping rescued one of the 8 runs that it was
        tried on.""",
    remedies=("lower-rate", "much-lower-rate", "warm-up", "clip", "adam-eps", "small-init", "qk-norm"),
)
def diverges(case: Case) -> Iterator[Hit]:
    forecast = _with_outcome(case, "diverges")
    if forecast and not case.table.of("precision/non-finite"):  # a model that is broken before the first step
        yield trial_hit(Severity.ERROR, forecast, _remedy(case))


def _remedy(case: Case) -> str:
    """The rule's own, but for a model of float16 weights, which no rate keeps from NaN."""
    if case.dtype != "float16":
        return ""
    return (
        "Keep the weights in float32 and run under autocast with loss scaling, or in bfloat16: Adam's ε = "
        "1e-8 is zero in float16, and a step divides by it."
    )


def _with_outcome(case: Case, outcome: str) -> Forecast | None:
    return case.forecast if case.forecast is not None and case.forecast.outcome == outcome else None
