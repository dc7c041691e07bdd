"""Monitor: stays with a training run, records it and raises alarms."""

from normscope.monitor.monitor import Monitor
from normscope.monitor.row import Event, Layout, Raised, Row
from normscope.monitor.store import RunReader, RunStore

__all__ = ["Event", "Layout", "Monitor", "Raised", "Row", "RunReader", "RunStore"]
