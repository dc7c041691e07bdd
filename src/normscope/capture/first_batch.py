"""Examinations of a script's first step: how its model can be run, and what its losses are."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from normscope.capture.alone import CommunicationError, num_processes, require_no_sync
from normscope.forecast import mean_cross_entropy
from normscope.recording.calls import Forward
from normscope.subjects import Run, Subject, call_model, untouched
from normscope.subjects.feed import tensors_of

SHARE = 0.1
"""Largest relative difference of a loss times the number of batches from the mean of its batch."""


def why_not_alone(model: nn.Module, batch: Mapping[str, Any]) -> str:
    """The reason why the model cannot run alone, where several processes train; empty if it can.

    Call it within `alone`, under the autocast of the run: a model that communicates fails there.
    """
    if num_processes() == 1:
        return ""
    try:
        require_no_sync(model)
        with untouched(model):
            outputs = call_model(model, batch)
            parts = [output.float().sum() for output in tensors_of(outputs) if output.requires_grad]
            torch.stack(parts).sum().backward()
            with torch.no_grad():
                call_model(model.eval(), batch)
    except CommunicationError as error:
        return str(error)
    except Exception:  # the look fails in the same way, and says so
        pass
    return ""


def autocast_needed(run: Run, batch: Mapping[str, Any]) -> torch.dtype | None:
    """The run's autocast, if the model cannot run without it; None looks at its own dtype."""
    if run.precision == "float32":
        return None
    with untouched(run.model), torch.no_grad():
        try:
            call_model(run.model.eval(), batch)
        except RuntimeError:
            found: torch.dtype = getattr(torch, run.precision)
            return found
    return None


def is_share_of_step(subject: Subject, forwards: Sequence[Forward]) -> bool:
    """Whether each loss is its batch's mean divided by the number of batches of the step.

    A loop may divide the sum over the targets of a batch by the number of targets in all batches of its
    step. The batches of a `Run` have losses of which the mean is taken.
    """
    with untouched(subject.model):
        mean = mean_cross_entropy(subject, forwards[0].batch)
    whole = float(forwards[0].loss) * len(forwards)
    return mean is not None and abs(whole - mean) < SHARE * mean
