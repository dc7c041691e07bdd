"""The learning rate to expect at a larger width or depth.

The best rate of a constant schedule changes with size as a power: at k times the width or depth it is the
best rate times k^exponent. The exponents and their spread were measured on small decoders of bytes that train
with AdamW for 300 steps without a warm-up; for anything else, no rate is given. docs/forecast-rates.md has
the evidence.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from normscope.anatomy import Anatomy
from normscope.forecast.record import AtScale, BestRate, Forecast, ScaledRate

TIMES = (2, 4, 8)
"""Sizes that are answered, in multiples of the model's own."""


@dataclass(frozen=True)
class Law:
    """Change of the best rate with size.

    Attributes:
        exponent: of the multiple of the size.
        spread: factor to both sides of the rate that its range has at least.
        most: largest multiple that was measured.
    """

    exponent: float
    spread: float
    most: int


Laws = Mapping[str, Law]
"""Placement, or scheme where the anatomy names one → its law."""

WIDTH: Laws = {"pre": Law(-0.75, 3.0, 4), "post": Law(-0.75, 3.0, 4)}
"""In the standard parametrisation: the same rate for all weights, initial weights as the model draws them."""
MUP_WIDTH: Laws = {"pre": Law(0.0, 2.0, 4)}
"""Yang et al. 2022 (arXiv:2203.03466): under μP the rate that was tuned at the base width stays."""
DEPTH: Laws = {"pre": Law(-0.4, 2.0, 8), "deepnorm": Law(-0.4, 2.0, 8), "post": Law(-1.5, 2.0, 2)}
"""Peri-LN and res-post have no law: their loss hardly depends on the rate near the best."""
LAWS = (("width", "standard", WIDTH), ("width", "mup", MUP_WIDTH), ("depth", "standard", DEPTH))


def at_scale(best: BestRate, rungs: tuple[Forecast, ...], anatomy: Anatomy, own_rates: bool) -> AtScale:
    """The rates at larger sizes; none, with the reason, where nothing like it was measured.

    Args:
        best: the rate at the model's own size.
        rungs: the forecasts that `best` rests on.
        own_rates: whether the model sets the rates of its parameters by its size (μP).
    """
    if reason := _why_not(best, rungs, own_rates):
        return AtScale((), reason)
    kinds = {branch.scheme or branch.placement for branch in anatomy.branches}
    if len(anatomy.stacks) != 1 or len(kinds) != 1 or (kind := kinds.pop()) not in DEPTH:
        return AtScale((), "not measured for this placement of the norms")
    return AtScale(tuple(_rates(best, kind)), "")


def _why_not(best: BestRate, rungs: tuple[Forecast, ...], own_rates: bool) -> str:
    if best.rate is None or best.low is None:
        return "no learning rate with a range is known at this size"
    if best.warmup or rungs[0].warmup:
        return "not measured with a warm-up"
    if rungs[0].optimizer.lower() not in ("adam", "adamw"):
        return f"not measured with {rungs[0].optimizer}"
    if not rungs[0].tokens or rungs[0].hidden == "mask" or rungs[0].unigram_entropy is None:
        return "only measured on models that predict the next token"
    return "the model sets its rates by its size (μP)" if own_rates else ""


def _rates(best: BestRate, kind: str) -> Iterator[ScaledRate]:
    for axis, parametrisation, laws in LAWS:
        law = laws.get(kind)
        for times in TIMES:
            if law is not None and times <= law.most:
                yield ScaledRate(axis, times, parametrisation, *_scaled(best, law, times))


def _scaled(best: BestRate, law: Law, times: int) -> tuple[float, float, float]:
    """Rate and range by a law: the spread, or the range at the model's own size where that is wider."""
    assert best.rate is not None
    factor = times**law.exponent
    low = best.rate if best.low is None else best.low
    high = best.rate if best.high is None else best.high
    low, high = min(low, best.rate / law.spread), max(high, best.rate * law.spread)
    return best.rate * factor, low * factor, high * factor
