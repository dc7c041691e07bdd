"""Taken: the figures of one step, of which numbers may still lie on a device."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from normscope.monitor.alarms import NOT_MEASURED
from normscope.monitor.forwards import Forwards
from normscope.monitor.reductions import local, squares
from normscope.monitor.streams import Part

Floats = NDArray[np.float64]


class Gradients(NamedTuple):
    """‖g‖² of the parameters that have a gradient, on the device, and the mask [parameters] of these."""

    squares: Tensor
    is_there: NDArray[np.bool_]

    def by_parameter(self) -> Floats:
        """‖g‖² of each parameter, 0 without a gradient. Waits for the device."""
        found = np.zeros(len(self.is_there))
        found[self.is_there] = self.squares.cpu().double().numpy()
        return found


def gradients_of(parameters: Sequence[Tensor], scale: Tensor | None = None) -> Gradients:
    """The gradients as they are now, without the loss scale that a fused optimizer takes out itself."""
    gradients = [parameter.grad for parameter in parameters]
    there = squares([local(gradient) for gradient in gradients if gradient is not None])
    if scale is not None:
        there = there / torch.as_tensor(scale, device=there.device).square()
    return Gradients(there, np.array([gradient is not None for gradient in gradients], dtype=np.bool_))


@dataclass(eq=False)
class Taken:
    """Figures of one step, and what it takes to run it again, until its row is written.

    Attributes:
        step, time, seconds, tokens, rate, is_skipped: of the step; the rate is the largest of all groups.
        parts: sums of the streams, one for each forward; num_checked: how many were searched for wrong values
            before the update; None if none was, and the gradients were not either.
        gradients: of the parameters, before they are clipped if the loop says when; None if none was taken.
        names, sizes: the weights and states whose turn it was, and their ‖x‖².
        loss: None if the loop gave none.
        scale: loss scale of half precision; None without one.
        found_inf: above 0 where a fused optimizer changes nothing, because its scaler found a wrong gradient.
        forwards: those of the step, to be run again.
        weights: the weights before the update, where the numbers are read after it.
        measured: values of the layout `SITES`, at the steps where they are due.
        is_due: whether all figures were due.
        rescued: what a rescue did; None without one.
        is_wrong: whether a value of the step was found to be not finite.
    """

    step: int = 0
    time: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    rate: float = NOT_MEASURED
    is_skipped: bool = False
    parts: list[Part] = field(default_factory=list)
    num_checked: int | None = None
    gradients: Gradients | None = None
    names: list[str] = field(default_factory=list)
    sizes: Tensor | None = None
    loss: Tensor | float | None = None
    scale: Tensor | None = None
    found_inf: Tensor | None = None
    forwards: Forwards = field(default_factory=Forwards)
    weights: "Weights | None" = None
    measured: Floats | None = None
    is_due: bool = False
    rescued: float | None = None
    is_wrong: bool = False
    _transfer: "_Transfer | None" = None

    def forget(self) -> None:
        """Free the batches and the gradients of the outputs."""
        self.forwards.clear()

    def send(self) -> None:
        """Begin to copy all numbers to the host, in one piece, without waiting."""
        if isinstance(self.loss, Tensor):
            self.loss = self.loss.detach().clone()  # a loop may change it in place for its log
        self._transfer = _Transfer(self._numbers())

    def receive(self) -> None:
        """Wait for the copy, and put the numbers in their places."""
        if self._transfer is None:
            return
        numbers = iter(self._transfer.received())
        self._transfer = None
        self.parts = [Part(part.columns, next(numbers), part.sizes) for part in self.parts]
        if self.gradients is not None:
            self.gradients = Gradients(next(numbers), self.gradients.is_there)
        if self.sizes is not None:
            self.sizes = next(numbers)
        if isinstance(self.loss, Tensor):
            self.loss = next(numbers)
        if self.scale is not None:
            self.scale = next(numbers)
        if self.found_inf is not None and bool(next(numbers)):
            self.is_skipped, self.gradients = True, None

    def _numbers(self) -> list[Tensor]:
        gradients = None if self.gradients is None else self.gradients.squares
        rest = (gradients, self.sizes, self.loss, self.scale, self.found_inf)
        return [*(part.squares for part in self.parts), *(each for each in rest if isinstance(each, Tensor))]


class _Transfer:
    """Tensors on their way to the host, as one; pinned memory and an event where the device is CUDA's."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._lengths = [tensor.numel() for tensor in tensors]
        self._arrived: torch.cuda.Event | None = None
        self._host = torch.zeros(0)
        if not tensors:
            return
        device = tensors[0].device
        joined = torch.cat([tensor.detach().reshape(-1).to(device, non_blocking=True) for tensor in tensors])
        if device.type != "cuda":
            self._host = joined.cpu()
            return
        self._host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
        self._host.copy_(joined, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(device))

    def received(self) -> tuple[Tensor, ...]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.split(self._lengths)


def scale_of(scaler: GradScaler | None) -> Tensor | None:
    """The present loss scale, a scalar on the device; None without one. It does not wait for the device."""
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler._get_scale_async()  # get_scale() would wait


def rate_of(group: Mapping[str, Any]) -> float | None:
    """Learning rate of a parameter group; None where its optimizer sets its own, as Adafactor may."""
    rate = group.get("lr")
    return None if rate is None else float(rate)


def is_on_device(model: nn.Module) -> bool:
    """Whether some parameter lies on a device whose numbers the host would have to wait for."""
    return any(parameter.device.type != "cpu" for parameter in model.parameters())


class Weights:
    """A copy of the weights, taken before each update, in the memory of the first one."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._kept = [torch.empty_like(local(parameter)) for parameter in parameters]

    @torch.no_grad()
    def take(self) -> None:
        """Copy the weights as they are now."""
        torch._foreach_copy_(self._kept, [local(parameter) for parameter in self._parameters])

    @contextmanager
    def put(self) -> Iterator[None]:
        """Context in which the model has the weights of the last copy."""
        present = [local(parameter).clone() for parameter in self._parameters]
        self._write(self._kept)
        try:
            yield
        finally:
            self._write(present)

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            local(parameter).data.copy_(value)  # .data: the version that autograd checks does not change
