"""Forwards of the subject in eval mode, with the tensor that its loss is taken of.

Shapes: B samples, T tokens, V vocabulary or classes.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.anatomy import measuring
from normscope.subjects import Batch, Subject, call_model, untouched
from normscope.subjects.feed import tensors_in
from normscope.subjects.loss import logits_of
from normscope.subjects.rng import seeded


@dataclass(frozen=True)
class Forward:
    """The result of one forward.

    Attributes:
        outputs: tensors that may be the logits, the likeliest first: the output's, then that of the last
            linear map.
        loss: the loss, None where none is known.
        width: number of features that the last linear map reads, None without one.
    """

    outputs: tuple[Tensor, ...]
    loss: Tensor | None
    width: int | None

    @property
    def main(self) -> Tensor | None:
        """The likeliest of `outputs`."""
        return self.outputs[0] if self.outputs else None


@contextmanager
def forwards(subject: Subject) -> Iterator[None]:
    """State for forwards that are compared: eval mode, restored afterwards."""
    with untouched(subject.model), measuring(subject.model):
        yield


def run(subject: Subject, batch: Batch | None = None) -> Forward:
    """One forward and its loss, with the same random numbers at every call, inside `forwards`."""
    batch = subject.batch if batch is None else batch
    last: list[tuple[Tensor, int]] = []

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            last[:] = [(output, getattr(module, "in_features", 0))]

    with contextlib.ExitStack() as hooks, seeded(subject.seed):
        for module in subject.model.modules():
            if isinstance(module, nn.Linear):
                hooks.callback(module.register_forward_hook(keep).remove)
        output = call_model(subject.model, batch)
        loss = None if subject.loss_fn is None else subject.loss_fn(output, batch)
    candidates = [*_logits_in(output), *(tensor for tensor, _ in last)]
    unique = tuple({id(tensor): tensor for tensor in candidates}.values())
    return Forward(unique, loss, last[0][1] if last else None)


def _logits_in(output: Any) -> list[Tensor]:
    """The tensor called `logits`, else one (·, ·, V), else the first with an axis of features."""
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor) and named.is_floating_point() and named.ndim >= 2:
        return [named]
    found = logits_of(output)
    if found is not None:
        return [found]
    return [t for t in tensors_in(output) if t.is_floating_point() and t.ndim >= 2][:1]


@torch.no_grad()
def run_without_graph(subject: Subject, batch: Batch) -> Tensor | None:
    """The main output of a forward on `batch`."""
    return run(subject, batch).main
