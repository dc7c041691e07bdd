"""Findings of a trial: one sentence, and the rows it rests on."""

from normscope.forecast import Forecast
from normscope.forecast.one_rate import forecast_measurements
from normscope.rules.finding import Severity
from normscope.rules.rule import Hit

_EVIDENCE = ("forecast/loss", "forecast/diversity", "forecast/unigram-entropy", "forecast/coherence")


def trial_hit(severity: Severity, forecast: Forecast, remedy: str = "") -> Hit:
    """The trial's settings and the reason of its forecast, as a finding about the whole model."""
    warmup = f" with {forecast.warmup} steps of warm-up" if forecast.warmup else ""
    message = f"{forecast.optimizer} at {forecast.lr:g}{warmup}: {forecast.reason}."
    rows = tuple(m for m in forecast_measurements(forecast) if m.quantity in _EVIDENCE and m.measured)
    return Hit(severity, (), message, rows, remedy)
