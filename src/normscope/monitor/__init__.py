"""Monitor: stays with a training run, records it and raises alarms."""

from normscope.monitor.row import Event, Layout, Raised, Row
from normscope.monitor.store import RunReader, RunStore

__all__ = ["Event", "Layout", "Raised", "Row", "RunReader", "RunStore"]
