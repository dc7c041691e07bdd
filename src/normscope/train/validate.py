"""The loss on what was kept from training."""

import itertools

import torch

from normscope.nn.generate import resting
from normscope.subjects import Subject
from normscope.subjects.rng import generators_kept
from normscope.train.processes import Processes
from normscope.train.trial import Trial

BATCHES = 8
"""Validation batches whose mean loss is taken, always the same ones."""


def validation_loss(subject: Subject, trial: Trial, processes: Processes) -> float | None:
    """Mean loss on the validation data, in eval mode and the trial's precision; None without such data.

    The state of the trial is left as it was.
    """
    if subject.validation is None:
        return None
    with torch.no_grad(), generators_kept(), resting(trial.model):
        losses = [float(trial.evaluated(batch)) for batch in itertools.islice(subject.validation(), BATCHES)]
    return processes.means([sum(losses) / len(losses)])[0]
