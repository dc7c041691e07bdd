"""Following: the model of a script from its first step to the last that is looked at, and the report on it."""

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn

from normscope.anatomy import Anatomy
from normscope.capture.calls import Forward, Forwards
from normscope.capture.events import Events
from normscope.capture.folder import Folder, Settings
from normscope.errors import UsageError
from normscope.forecast import Forecast, ForecastStep, forecast_measurements
from normscope.forecast.evaluator import gradient_norms
from normscope.forecast.rule import EXTENSION
from normscope.forecast.watch import WatchedTrial, measured_steps
from normscope.pipeline import Check, look, try_others
from normscope.probes import Budget, Spending
from normscope.rules import parse_codes
from normscope.subjects import Run, Subject, untouched
from normscope.subjects.assemble import shapes
from normscope.subjects.rng import generators_kept
from normscope.subjects.subject import LOSS_INPUTS
from normscope.train import Recipe, UpdateRatio

POLL_SECONDS = 0.05
