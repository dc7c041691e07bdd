"""Comparison of the gradient in float32 and in bfloat16, parameter by parameter."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from normscope.probes.backward import differentiated
from normscope.probes.objective import objective
from normscope.probes.sums import energy, inner
from normscope.subjects import Batch, Subject
from normscope.subjects.memory import is_out_of_memory


@dataclass(frozen=True)
class Overlap:
    """Inner product of two gradients and the energy of each; overlaps of several parameters add up."""

    inner: float = 0.0
    left: float = 0.0
    right: float = 0.0

    def __add__(self, other: "Overlap") -> "Overlap":
        return Overlap(self.inner + other.inner, self.left + other.left, self.right + other.right)

    @property
    def cosine(self) -> float | None:
        """⟨a, b⟩/(‖a‖‖b‖), None where one of them is zero."""
        length = self.left**0.5 * self.right**0.5
        return self.inner / length if length else None


Gradients = Mapping[int, Tensor]
"""id of a parameter → its gradient; absent where the loss does not depend on it."""


def gradients(loss: Tensor, weights: Mapping[int, Tensor]) -> Gradients | str:
    """∂loss/∂w of the weights that the loss depends on, or why the backward fails; frees the graph."""
    found = differentiated(loss, list(weights.values()))
    if isinstance(found, str):
        return found
    return {key: gradient for key, gradient in zip(weights, found, strict=True) if gradient is not None}


def overlaps(
    subject: Subject, parameters: Iterable[nn.Parameter], own: Gradients
) -> dict[int, Overlap] | str:
    """Overlap of the float32 and bfloat16 gradients, by parameter; the reason where one does not run.

    A float32 model runs again under bfloat16 autocast. A bfloat16 model is compared with its float32 copy.
    For another precision, the float32 copy runs both ways. Gradients must flow to every parameter; `own` are
    the gradients of `parameters` in the model's own precision.
    """
    weights = {id(parameter): parameter for parameter in parameters}
    dtypes = {parameter.dtype for parameter in weights.values()}
    try:
        if dtypes <= {torch.float32}:
            return _overlaps(own, _under_autocast(subject, weights, subject.model, subject.batch))
        model, batch, copies = _in_float32(subject, weights)
        exact = gradients(objective(subject, batch, model), copies)
        if torch.bfloat16 in dtypes:
            return _overlaps(exact, own)
        return _overlaps(exact, _under_autocast(subject, copies, model, batch))
    except (RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return f"the model does not run in both precisions: {' '.join(str(error).split())[:200]}"


def _under_autocast(
    subject: Subject, weights: Mapping[int, Tensor], model: Any, batch: Batch
) -> Gradients | str:
    device = next(iter(weights.values())).device.type
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = objective(subject, batch, model)
    return gradients(loss, weights)


def _in_float32(subject: Subject, weights: Mapping[int, Tensor]) -> tuple[Any, Batch, dict[int, Tensor]]:
    """A call of the model on float32 copies of parameters and buffers; the batch; the copies."""
    model = subject.model
    parameters = {
        name: _as_float32(p).requires_grad_(p.is_floating_point()) for name, p in model.named_parameters()
    }
    copies = {id(p): parameters[name] for name, p in model.named_parameters() if id(p) in weights}
    buffers = {name: _as_float32(buffer) for name, buffer in model.named_buffers()}

    def call(*args: Any, **kwargs: Any) -> Any:
        return functional_call(model, {**parameters, **buffers}, args, kwargs)

    return call, tree_map(_as_float32, subject.batch), copies


def _as_float32(value: Any) -> Any:
    """A detached float32 copy of a floating-point tensor; anything else as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(torch.float32, copy=True)


def _overlaps(left: Gradients | str, right: Gradients | str) -> dict[int, Overlap] | str:
    if isinstance(left, str):
        return left
    if isinstance(right, str):
        return right
    found = {}
    for key, a in left.items():
        if key in right:
            b = right[key].to(a.dtype)  # one at a time: casting all at once needs another copy of the weights
            found[key] = Overlap(inner(a, b), energy(a), energy(b))
    return found
