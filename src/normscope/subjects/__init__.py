"""Subjects: models loaded from MODEL specs or bare modules, with batches and a loss."""

from normscope.subjects.bare import make_subject
from normscope.subjects.fake import fake_mode_of
from normscope.subjects.given import require_module
from normscope.subjects.load import load, load_to_read
from normscope.subjects.memory import memory_refusals
from normscope.subjects.own_run import Run
from normscope.subjects.subject import Batch, LossFn, Subject, call_model
from normscope.subjects.untouched import untouched

__all__ = [
    "Batch",
    "LossFn",
    "Run",
    "Subject",
    "call_model",
    "fake_mode_of",
    "load",
    "load_to_read",
    "make_subject",
    "memory_refusals",
    "require_module",
    "untouched",
]
