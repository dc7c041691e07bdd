"""Memory of a training step: what takes it, which modules to recompute so that it fits, and at what time."""

from normscope.planning.making import plan
from normscope.planning.recompute import Applied, recompute
from normscope.planning.result import Plan, Row
from normscope.planning.sizes import in_words, parse_bytes
from normscope.planning.step import Footprint
from normscope.planning.tracker import Held
from normscope.planning.work import Work

__all__ = [
    "Applied",
    "Footprint",
    "Held",
    "Plan",
    "Row",
    "Work",
    "in_words",
    "parse_bytes",
    "plan",
    "recompute",
]
