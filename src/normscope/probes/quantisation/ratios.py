"""SQNR of every place, and what a norm's output gains over its input."""

import math
from collections.abc import Iterator

from normscope.anatomy import Norm
from normscope.probes.measurement import EXACT, Measurement, not_measured
from normscope.probes.norms import norms_of
from normscope.probes.quantisation.look import Look, Tensors, sqnr, unfit
from normscope.probes.quantisation.rounding import Rounding
from normscope.probes.rows import at

ZERO = "every value there is zero"


def sqnr_rows(
    look: Look, rounding: Rounding, parts: tuple[str, ...], prefix: str = ""
) -> Iterator[Measurement]:
    """The SQNR at every place of these parts."""
    for place in look.places:
        if place.part in parts:
            found = _sqnr(look.tensors(place), rounding)
            yield _row(f"quantisation/{prefix}{place.part}-{rounding.name}-sqnr", place.site, found)


def gain_rows(look: Look, rounding: Rounding) -> Iterator[Measurement]:
    """SQNR of each norm's output minus that of its input: Post-LN stores the one, Pre-LN the other."""
    for site, norm in norms_of(look.anatomy).items():
        yield _row(f"quantisation/norm-{rounding.name}-gain", site, _gain(look, norm, rounding))


def _gain(look: Look, norm: Norm, rounding: Rounding) -> float | str:
    figures = []
    for where in (norm.output, norm.input):
        tensor = at(look.captured, where)
        reason = tensor if isinstance(tensor, str) else unfit(tensor)
        found = _sqnr(reason or [(look.captured[where], -1)], rounding)
        if isinstance(found, str):
            return found
        figures.append(found)
    gain = figures[0] - figures[1]
    return gain if math.isfinite(gain) else "rounding changes nothing on one side of the norm"


def _sqnr(tensors: Tensors | str, rounding: Rounding) -> float | str:
    if isinstance(tensors, str):
        return tensors
    found = sqnr(tensors, rounding)
    return ZERO if found is None else found


def _row(quantity: str, site: str, found: float | str) -> Measurement:
    if isinstance(found, str):
        return not_measured(quantity, site, found, "dB")
    how = f"{EXACT}; rounding changes no value" if math.isinf(found) else EXACT
    return Measurement(quantity, site, found, "dB", how)
