"""Axes and the way figures are written: domains, ticks, powers of ten, gradient classes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
GRADIENT_STEPS = (1e-3, 1e-2, 1e-1, 1 / 3, 3.0, 1e1, 1e2, 1e3)
"""Bounds of the nine classes of gradient / gradient at the top of its stack; class 4 is "about the same"."""
ERASED_STEPS = (0.1, 0.5, 0.9)
"""Bounds of the four classes of gradient energy that a norm erases."""


@dataclass(frozen=True)
class Scale:
    """A map from values to pixels, linear or logarithmic; `low` and `high` land on `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Pixel of `value`, held within the axis (a zero on a log axis lands on its low end)."""
        if self.log:
            share = (_log10(value) - _log10(self.low)) / (_log10(self.high) - _log10(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, most: int = 4) -> list[float]:
        """Round values within the axis, about `most` at most; a log axis includes its ends."""
        if not self.log:
            return _round_ticks(self.low, self.high, most)
        first, last = math.ceil(_log10(self.low) - 1e-9), math.floor(_log10(self.high) + 1e-9)
        if last - first < 1:
            return [self.low, self.high]
        step = max(1, math.ceil((last - first) / max(1, most - 1)))
        return [10.0**power for power in range(last, first - 1, -step)][::-1]

    def labelled(self, most: int = 4) -> list[tuple[float, str]]:
        """`ticks` with their labels, all in one style: 0.01, 0.1, 1 or 10⁻³, 10⁻², 10⁻¹."""
        ticks = self.ticks(most)
        sizes = [abs(tick) for tick in ticks if tick]
        if not sizes or (min(sizes) >= (1e-2 if self.log else 1e-3) and max(sizes) < 1e4):
            return [(tick, f"{tick:g}") for tick in ticks]
        shared = None if self.log else math.floor(_log10(max(sizes)) + 1e-9)
        return [(tick, power(tick, shared)) for tick in ticks]


def fit(values: Iterable[float | None], start: float, end: float, *, log: bool) -> Scale:
    """The axis that holds all finite `values`: whole decades, or a padded range."""
    finite = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not log)]
    if log:
        low, high = _below(min(finite, default=1.0)), _above(max(finite, default=10.0))
        if high / low > 50:  # whole decades; a narrower axis ends at 1, 2 or 5 times a power of ten
            low, high = 10.0 ** math.floor(_log10(low) + 1e-9), 10.0 ** math.ceil(_log10(high) - 1e-9)
        while high / low < 4:  # never blow a flat line up into noise
            low, high = _below(low / 1.5), _above(high * 1.5) if high / low < 2 else high
        return Scale(low, high, start, end, log=True)
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Scale(low - pad, high + pad, start, end)


def power(value: float, exponent: int | None = None) -> str:
    """A tick with a power of ten: 10⁻⁵, 2·10⁻³; 0.5·10⁻⁴ with the exponent −4."""
    if value == 0:
        return "0"
    scale = math.floor(_log10(value) + 1e-9) if exponent is None else exponent
    mantissa = f"{value / 10.0**scale:.3g}".replace("-", "−")
    alone = exponent is None and mantissa == "1"
    return ("" if alone else f"{mantissa}·") + "10" + str(scale).translate(SUPERSCRIPT)


def figure(value: float | None, digits: int = 4) -> str:
    """A figure for people: 0.123, 1.2×10⁻⁷, ∞, NaN; "not measured" for None."""
    if value is None:
        return "not measured"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits}g}".replace("-", "−")
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa.replace('-', '−')}×10{str(int(exponent)).translate(SUPERSCRIPT)}"


def gradient_class(value: float | None, reference: float | None) -> str:
    """CSS class of how much gradient passes: g0 (1/1000 of `reference`) … g4 (the same) … g8; gx unknown."""
    if value is None or reference is None or not math.isfinite(value) or not math.isfinite(reference):
        return "gx"
    if reference == 0:
        return "gx" if value == 0 else "g8"
    return f"g{sum(value / reference >= step for step in GRADIENT_STEPS)}"


def erased_class(share: float | None) -> str:
    """CSS class of a norm by the share it erases: g4 (under 10 %) … g1 (over 90 %); gx unknown."""
    if share is None or not math.isfinite(share):
        return "gx"
    return f"g{4 - sum(share >= step for step in ERASED_STEPS)}"


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else -math.inf


def _below(value: float) -> float:
    """The largest of 1, 2, 5 × 10ⁿ that is not above `value`."""
    unit = 10.0 ** math.floor(_log10(value) + 1e-9)
    return max(m * unit for m in (1, 2, 5) if m * unit <= value * (1 + 1e-9))


def _above(value: float) -> float:
    """The smallest of 1, 2, 5 × 10ⁿ that is not under `value`."""
    unit = 10.0 ** math.floor(_log10(value) + 1e-9)
    return min(m * unit for m in (1, 2, 5, 10) if m * unit >= value * (1 - 1e-9))


def _round_ticks(low: float, high: float, most: int) -> list[float]:
    raw = (high - low) / max(1, most)
    unit = 10.0 ** math.floor(_log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]
