"""Stepping: one trial, its configuration, its optimiser."""

from normscope.train.config import OPTIMIZERS, TrialConfig
from normscope.train.copying import working_copy
from normscope.train.optim import build_optimizers, hidden_matrices
from normscope.train.schedule import warmup_factor
from normscope.train.thread import Stopped, in_flushed_thread
from normscope.train.trial import Trial, UpdateRatio, endless

__all__ = [
    "OPTIMIZERS",
    "Stopped",
    "Trial",
    "TrialConfig",
    "UpdateRatio",
    "build_optimizers",
    "endless",
    "hidden_matrices",
    "in_flushed_thread",
    "warmup_factor",
    "working_copy",
]
