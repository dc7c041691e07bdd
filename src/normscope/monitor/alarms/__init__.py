"""Alarms: a streaming judge of a run's rows. One file a family, each alarm with its record in `ALARMS`."""

# The families enter their records in the order of their codes.
from normscope.monitor.alarms import wrong, spikes, growth, tokens, decline, precision, ranks, rise, rescued  # noqa: F401, I001
from normscope.monitor.alarms import forgets, attention  # noqa: F401
from normscope.monitor.alarms.columns import NOT_MEASURED, is_measured
from normscope.monitor.alarms.judges import Judges
from normscope.rules import ALARMS

__all__ = ["ALARMS", "NOT_MEASURED", "Judges", "is_measured"]
