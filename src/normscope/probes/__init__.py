"""Measuring: one file a probe."""

from normscope.probes.forecast_record import Forecast, ForecastStep
from normscope.probes.measurement import Measurement, Measurements, not_measured

__all__ = ["Forecast", "ForecastStep", "Measurement", "Measurements", "not_measured"]
