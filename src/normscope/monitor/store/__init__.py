"""Run store: the record of one run in a SQLite file, which other processes read while it grows.

Each rank begins the run once in the file, and writes its rows, alarms and events in one transaction per
flush.
"""

from normscope.monitor.store.grid import Grid
from normscope.monitor.store.rank import RankState
from normscope.monitor.store.reader import RunReader, ends_since
from normscope.monitor.store.writer import RunStore

__all__ = ["Grid", "RankState", "RunReader", "RunStore", "ends_since"]
