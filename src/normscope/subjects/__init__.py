"""Loading: MODEL specs and bare modules → `Subject`; texts → batches."""

from normscope.subjects.assemble import fake_mode_of
from normscope.subjects.bare import make_subject
from normscope.subjects.load import load
from normscope.subjects.memory import memory_refusals
from normscope.subjects.subject import Batch, LossFn, Subject, call_model
from normscope.subjects.untouched import untouched

__all__ = [
    "Batch",
    "LossFn",
    "Subject",
    "call_model",
    "fake_mode_of",
    "load",
    "make_subject",
    "memory_refusals",
    "untouched",
]
