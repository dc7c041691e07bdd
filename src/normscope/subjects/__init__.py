"""Loading: MODEL specs and bare modules → `Subject`; texts → batches."""

from normscope.subjects.bare import make_subject
from normscope.subjects.load import load
from normscope.subjects.subject import Batch, LossFn, Subject, call_model
from normscope.subjects.untouched import untouched

__all__ = ["Batch", "LossFn", "Subject", "call_model", "load", "make_subject", "untouched"]
