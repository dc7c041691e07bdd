"""Measure a subject: one file per probe."""

from collections.abc import Callable, Iterable

from normscope.anatomy import Anatomy
from normscope.probes.attention import measure_attention
from normscope.probes.fresh_batch_norms import settled_batch_norms
from normscope.probes.gradient import measure_gradient
from normscope.probes.jacobian import QUANTILES, Budget, Spending, measure_jacobian
from normscope.probes.measurement import Measurement, Measurements, not_measured
from normscope.probes.next_step import measure_next_step
from normscope.probes.precision import measure_precision
from normscope.probes.quantisation import measure_quantisation
from normscope.probes.signal import measure_signal
from normscope.probes.weights import measure_weights
from normscope.probes.wiring import measure_wiring
from normscope.subjects import Subject

PROBES: dict[str, Callable[[Subject, Anatomy], Iterable[Measurement]]] = {
    "weights": measure_weights,
    "signal": measure_signal,
    "attention": measure_attention,
    "gradient": measure_gradient,
    "jacobian": measure_jacobian,
    "precision": measure_precision,
    "wiring": measure_wiring,
    "step": measure_next_step,
}
"""The probes of every check, in this order; `measure_quantisation` is one that a check must ask for."""

__all__ = [
    "PROBES",
    "QUANTILES",
    "Budget",
    "Measurement",
    "Measurements",
    "Spending",
    "measure_attention",
    "measure_gradient",
    "measure_jacobian",
    "measure_next_step",
    "measure_precision",
    "measure_quantisation",
    "measure_signal",
    "measure_weights",
    "measure_wiring",
    "not_measured",
    "settled_batch_norms",
]
