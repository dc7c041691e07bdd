"""Training: trials, their configuration and optimisers, and whole runs."""

from normscope.train.copying import working_copy
from normscope.train.criterion import CRITERION_STEPS, LAST, MARGIN, last_loss, trains
from normscope.train.described import described, recipe_in_words
from normscope.train.live import CopyError, LiveOptimizers
from normscope.train.many import LoneTrials, Trials, lone_trial
from normscope.train.optim import build_optimizers, hidden_matrices
from normscope.train.prepare import prepared
from normscope.train.recipe import OPTIMIZERS, PRECISIONS, SCHEDULES, Every, Recipe
from normscope.train.run import Run
from normscope.train.run_config import RunConfig
from normscope.train.schedule import rate_factor, warmup_factor
from normscope.train.stack import TrialStack, many_trials
from normscope.train.stackable import unlike, why_not_stackable
from normscope.train.thread import Stopped, in_flushed_thread
from normscope.train.trial import Observer, Trial, UpdateRatio, endless

__all__ = [
    "CRITERION_STEPS",
    "LAST",
    "MARGIN",
    "OPTIMIZERS",
    "PRECISIONS",
    "SCHEDULES",
    "CopyError",
    "Every",
    "LiveOptimizers",
    "LoneTrials",
    "Observer",
    "Recipe",
    "Run",
    "RunConfig",
    "Stopped",
    "Trial",
    "TrialStack",
    "Trials",
    "UpdateRatio",
    "build_optimizers",
    "described",
    "endless",
    "hidden_matrices",
    "in_flushed_thread",
    "last_loss",
    "lone_trial",
    "many_trials",
    "prepared",
    "rate_factor",
    "recipe_in_words",
    "trains",
    "unlike",
    "warmup_factor",
    "why_not_stackable",
    "working_copy",
]
