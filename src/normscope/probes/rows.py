"""Tensors of one forward, and table rows: a figure of a tensor, or the reason why there is none."""

import math
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from normscope.anatomy import Site, capture, measuring
from normscope.probes.measurement import EXACT, Measurement, not_measured
from normscope.subjects import Subject, untouched

Found = Tensor | str  # a tensor, or the reason why there is none

NOT_FINITE = "the values there are not finite (precision/non-finite names the origin)"
UNDEFINED = "the value that it is divided by is exactly zero"


def captured_without_graph(subject: Subject, sites: Iterable[Site]) -> dict[Site, Tensor]:
    """Tensors at `sites` in one measured forward of the fixed batch."""
    with untouched(subject.model), measuring(subject.model):
        _, captured = capture(subject.model, subject.forward, list(sites))
        return {site: tensor.detach() for site, tensor in captured.items()}


def at(captured: Mapping[Site, Tensor], site: Site) -> Found:
    """The tensor of `site`, or why there is none."""
    if site in captured:
        return captured[site]
    return f"this forward did not run {site.op} number {site.nth} of {site.module or 'the model'}"


def row(
    quantity: str,
    site: str,
    found: Found,
    figure: Callable[[Tensor], float],
    how: str = EXACT,
    unit: str = "1",
) -> Measurement:
    """`figure(found)` as a measurement; not measured where there is no tensor."""
    if isinstance(found, str):
        return not_measured(quantity, site, found, unit)
    return value_row(quantity, site, figure(found), how, unit)


def value_row(quantity: str, site: str, value: float, how: str = EXACT, unit: str = "1") -> Measurement:
    """`value` as a measurement; not measured where it is not finite."""
    if not math.isfinite(value):
        return not_measured(quantity, site, NOT_FINITE, unit)
    return Measurement(quantity, site, value, unit, how)


def ratio_row(quantity: str, site: str, part: float, whole: float, how: str = EXACT) -> Measurement:
    """part / whole; not measured where the whole is zero."""
    if whole == 0:
        return not_measured(quantity, site, UNDEFINED)
    return value_row(quantity, site, part / whole, how)
