"""A trial in words, for the rules: one sentence, and the rows it rests on."""

from normscope.forecast import Forecast
from normscope.forecast.one_rate import forecast_measurements
from normscope.probes import Measurement
from normscope.rules.rule import figure


def sentence(forecast: Forecast) -> str:
    """One sentence: the trial's settings, and the reason of its forecast."""
    warmup = f" with {forecast.warmup} steps of warm-up" if forecast.warmup else ""
    return f"{forecast.optimizer} at {figure(forecast.lr)}{warmup}: {forecast.reason}."


def evidence(forecast: Forecast) -> tuple[Measurement, ...]:
    """The forecast's rows of the table that a judgement rests on."""
    wanted = ("forecast/loss", "forecast/diversity", "forecast/unigram-entropy", "forecast/coherence")
    return tuple(m for m in forecast_measurements(forecast) if m.quantity in wanted and m.measured)
