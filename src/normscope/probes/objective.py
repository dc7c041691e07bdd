"""Objective of the gradients: the subject's loss, or a random linear functional of the output."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from normscope.probes.measurement import EXACT
from normscope.subjects import Batch, Subject, call_model
from normscope.subjects.feed import tensors_in

FUNCTIONAL = "exact, of a random linear functional of the output in place of a loss"


def objective_how(subject: Subject) -> str:
    """The `how` of a gradient of this objective."""
    return EXACT if subject.loss_fn is not None else FUNCTIONAL


def objective(subject: Subject, batch: Batch | None = None, model: Any = None) -> Tensor:
    """The loss; without one, Σ r·y/√n over the first floating-point tensor y (n,) of the output.

    r is standard normal; `batch` and `model` replace the subject's own.

    Raises:
        ValueError: without a loss, when the output holds no floating-point tensor.
    """
    model, batch = subject.model if model is None else model, subject.batch if batch is None else batch
    output = call_model(cast(nn.Module, model), batch)
    if subject.loss_fn is not None:
        return subject.loss_fn(output, batch)
    tensor = next((t for t in tensors_in(output) if t.is_floating_point()), None)
    if tensor is None:
        raise ValueError(
            f"the model's output, a {type(output).__name__}, holds no floating-point tensor "
            "and no loss is known: pass a loss_fn"
        )
    generator = torch.Generator().manual_seed(subject.seed)
    weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return (tensor * weights.to(tensor)).sum() / tensor.numel() ** 0.5


@contextmanager
def everything_requires_grad(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Let gradients flow to every parameter and floating-point input, also in a frozen model."""
    candidates = [*model.parameters(), *tensors_in(batch)]
    frozen = [t for t in candidates if t.is_leaf and not t.requires_grad and t.is_floating_point()]
    for tensor in frozen:
        tensor.requires_grad_(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)
