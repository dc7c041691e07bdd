"""Types of the first wrong value: the step to replay, the ranges of tensors, and the answer."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.anatomy.types import at_call
from normscope.monitor.row import GARBAGE
from normscope.probes.births import wrong_kind
from normscope.probes.sums import stored, widened


@dataclass(frozen=True)
class Replay:
    """One forward of a step and its gradient, to be run again.

    Attributes:
        model: the module that the script called; wrappers of `torch.compile` and DDP are looked through.
        args, kwargs: arguments of its forward.
        put_random_state: restores the generators to their states before the forward, see
            `subjects.rng.keep_random_state`; None: any.
        autocast: dtype of `torch.autocast` around the forward; None: off.
        cotangents: gradient of the loss by each floating-point tensor of the output, in their order; None
            where a tensor has none. None altogether: unknown.
        loss: value of the loss, if known.
        optimizers: the optimizers, whose states and learning rates are examined.
        is_updated: whether the optimizer has stepped since the backward.
        loss_fn: the loss as a function of the output, if it can be run again: a wrong loss is then traced
            to its op.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    put_random_state: Callable[[], None] | None = None
    autocast: torch.dtype | None = None
    cotangents: Sequence[Tensor | None] | None = None
    loss: Tensor | float | None = None
    optimizers: Sequence[torch.optim.Optimizer] = ()
    is_updated: bool = False
    loss_fn: Callable[[Any], Tensor] | None = None


@dataclass(frozen=True)
class Range:
    """Summary of the values of a tensor.

    Attributes:
        name: parameter, buffer or argument that it is; "" for any other.
        shape: its shape.
        dtype: its dtype, such as "float16".
        low, high: smallest and largest of its finite values; nan if there is none.
        num_nan, num_infinite: number of those values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float
    num_nan: int
    num_infinite: int

    def to_dict(self) -> dict[str, Any]:
        """The range as plain data for JSON: numbers that are not finite are None."""
        data = dataclasses.asdict(self) | {"shape": list(self.shape)}
        return data | {key: data[key] if math.isfinite(data[key]) else None for key in ("low", "high")}


@dataclass(frozen=True)
class WrongValue:
    """The first wrong value of a step.

    Attributes:
        module: path of the module, without wrappers; "" outside of any.
        call: which call of the module in the forward, from 0.
        op: function of the user's code, such as "torch.nn.functional.linear"; "" where no op made the value.
        kernel: the ATen op that made it, such as "aten.addmm.default".
        source: "file.py:123: code" of the user's line; "" if unknown.
        phase: "data", "parameter", "optimizer state", "forward", "loss" or "backward".
        kind: "NaN", "infinity", or "garbage" for finite values above 1e18.
        tensor: name of the parameter, buffer, optimizer state or argument that holds it; "" for others.
        cause: the cause in a few words, such as "fully masked row"; "" if unknown.
        inputs: ranges of the op's inputs, or of the tensor that holds it.
        sentence: one or two sentences that say all of this.
    """

    module: str
    call: int
    op: str
    kernel: str
    source: str
    phase: str
    kind: str
    tensor: str
    cause: str
    inputs: tuple[Range, ...]
    sentence: str

    @property
    def site(self) -> str:
        """The module, with its call from the second on."""
        return at_call(self.module, self.call)

    @property
    def is_of_scale(self) -> bool:
        """True for an overflow of half precision in the backward, which a smaller loss scale avoids."""
        is_gradient = self.phase == "loss" and not self.op
        return self.kind == "infinity" and (
            is_gradient or (self.phase == "backward" and self.cause == "overflow of float16")
        )

    def to_dict(self) -> dict[str, Any]:
        """The answer as plain data for JSON."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return data | {"inputs": [each.to_dict() for each in self.inputs]}


def kind_of(tensor: Tensor) -> str | None:
    """The kind of wrong value that a tensor holds, if any."""
    return wrong_kind(tensor, GARBAGE)


def entries(tensor: Tensor) -> Tensor:
    """The stored entries of a tensor: [number, …] of a sparse one, […, 2] real numbers of a complex one."""
    values = stored(tensor.detach())
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else widened(values)


def range_of(tensor: Tensor, name: str = "") -> Range:
    """The range of a tensor's values."""
    values = entries(tensor)
    finite = values[torch.isfinite(values)]
    low, high = (float(edge) for edge in finite.aminmax()) if finite.numel() else (math.nan, math.nan)
    return Range(
        name,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        low,
        high,
        int(values.isnan().sum()),
        int(values.isinf().sum()),
    )
