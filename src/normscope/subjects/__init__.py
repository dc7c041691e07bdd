"""Loading: MODEL specs and bare modules → `Subject`; texts → batches."""

from normscope.subjects.subject import Batch, LossFn, Subject, call_model

__all__ = ["Batch", "LossFn", "Subject", "call_model"]
