"""Measuring: one file a probe."""

from normscope.probes.measurement import Measurement, Measurements, not_measured

__all__ = ["Measurement", "Measurements", "not_measured"]
