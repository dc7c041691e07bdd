"""Monitor: stays with a training run, records it and raises alarms."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normscope.monitor.after import RunReport, check_run
    from normscope.monitor.look import Look
    from normscope.monitor.monitor import Monitor
    from normscope.monitor.rescue import Rescue
    from normscope.monitor.row import Event, Layout, Raised, Row
    from normscope.monitor.store import RunReader, RunStore

__all__ = [
    "Event",
    "Layout",
    "Look",
    "Monitor",
    "Raised",
    "Rescue",
    "Row",
    "RunReader",
    "RunReport",
    "RunStore",
    "check_run",
]

_HOME = {
    "Event": "row",
    "Layout": "row",
    "Look": "look",
    "Monitor": "monitor",
    "Raised": "row",
    "Rescue": "rescue",
    "Row": "row",
    "RunReader": "store",
    "RunReport": "after",
    "RunStore": "store",
    "check_run": "after",
}

if not TYPE_CHECKING:  # a type checker reads the imports above, so that a misspelt name is an error

    def __getattr__(name: str) -> Any:
        """Import on first use: a process of a watched script that trains nothing does not wait for it."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"normscope.monitor.{_HOME[name]}"), name)
