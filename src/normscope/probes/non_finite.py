"""Find the origin of the first NaN or infinity, in a subject known to have one.

Searched in this order: parameters, the batch, ops of the forward that turn finite inputs into one, and, where
loss and forward are finite, the backward.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from normscope.anatomy.calls import ModuleCalls
from normscope.anatomy.types import at_call
from normscope.probes.measurement import EXACT, Measurement
from normscope.probes.objective import objective
from normscope.probes.parameters import Parameters
from normscope.probes.sums import is_finite, widened
from normscope.subjects import Subject
from normscope.subjects.feed import tensors_in

QUANTITY = "precision/non-finite"

FILLS = {
    "full",
    "full_like",
    "fill",
    "masked_fill",
    "where",
    "scalar_tensor",
    "lift_fresh",
    "lift_fresh_copy",
}
"""Ops that write the -inf of an attention mask on purpose."""

ROUNDINGS = {"add", "_to_copy", "copy"}
"""Ops that turn a mask's lowest number into -inf by rounding; this is not a fault either."""


@dataclass(frozen=True)
class Birth:
    """An op that made a non-finite value out of finite ones.

    Attributes:
        module: path of the innermost running module, with its call; "" outside of any.
        op: the ATen overload.
        kind: "NaN" or "infinity".
        is_mask: whether it is the -inf of a mask, which is not a fault.
    """

    module: str
    op: str
    kind: str
    is_mask: bool


def first_non_finite(subject: Subject, parameters: Parameters) -> Measurement:
    """The row `precision/non-finite` of a subject whose forward or backward is known to be not finite.

    Call it where gradients flow to every parameter, inside `measuring`.
    """
    for name, tensor in _held(subject.model, parameters).items():
        if not is_finite(tensor):
            count = int((~torch.isfinite(widened(tensor))).sum())
            return _row(name, f"{count} of its {tensor.numel()} values are NaN or infinite as given")
    if not all(is_finite(t) for t in tensors_in(subject.batch) if t.is_floating_point()):
        return _row("batch", "the batch holds NaN or infinity as given")
    scan = _Scan(subject.model)
    with scan.calls.watching(), scan:
        loss = objective(subject)
    birth = scan.origin.get(loss) or scan.first
    if birth is not None:
        where = "" if birth.module else ", outside of every module (the loss)"
        return _row(birth.module, f"{birth.kind} born in {birth.op}{where}; its inputs were finite")
    return _in_backward(loss, parameters)


def _in_backward(loss: Tensor, parameters: Parameters) -> Measurement:
    """The last parameter with a non-finite gradient: the backward starts at the end, so it is nearest."""
    weights = parameters.all()
    scan = _Scan(None)
    with scan:
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    bad = [p for p, g in zip(weights, gradients, strict=True) if g is not None and not is_finite(g)]
    birth = f"{scan.first.kind} born in {scan.first.op}" if scan.first else "not born in one op"
    name = parameters.names[id(bad[-1])] if bad else ""
    return _row(
        name, f"the loss is finite; the last parameter whose gradient is not; {birth} of the backward"
    )


def _row(site: str, how: str) -> Measurement:
    return Measurement(QUANTITY, site, 1.0, how=f"{EXACT}; {how}")


def _held(model: nn.Module, parameters: Parameters) -> dict[str, Tensor]:
    """Tensors that must be finite: parameters, and buffers unless they are masks."""
    buffers = {
        name: b for name, b in model.named_buffers() if b.is_floating_point() and widened(b).isnan().any()
    }
    return {**parameters.by_name, **buffers}


class _Scan(TorchDispatchMode):
    """Examines the output of every op, and traces non-finite values to the op that made them first.

    Attributes:
        origin: the birth behind every non-finite tensor that is alive.
        first: the first birth that is not a mask's.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__()
        self.calls = ModuleCalls(model if model is not None else nn.Module())
        self.origin = WeakTensorKeyDictionary()
        self.first: Birth | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        origins = [self.origin[t] for t in inputs if t in self.origin]
        result = func(*args, **kwargs)
        for output in tree_leaves(result):
            if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
                self._look_at(output, func, inputs, origins)
        return result

    def _look_at(self, output: Tensor, func: Any, inputs: list[Tensor], origins: list[Birth]) -> None:
        if is_finite(output):
            self.origin.pop(output, None)
            return
        kind = "NaN" if bool(output.detach().isnan().any()) else "infinity"
        faults = [birth for birth in origins if not birth.is_mask]
        if faults:
            self.origin[output] = faults[0]
        elif origins and kind == "infinity":
            self.origin[output] = origins[0]
        else:  # out of finite inputs, or NaN out of a mask's -inf
            is_mask = kind == "infinity" and _is_mask(output, func, inputs)
            self.origin[output] = self._birth(func, kind, is_mask)

    def _birth(self, func: Any, kind: str, is_mask: bool) -> Birth:
        call = self.calls.current
        birth = Birth(at_call(call.path, max(call.nth, 0)), str(func), kind, is_mask)
        if not is_mask and self.first is None:
            self.first = birth
        return birth


def _is_mask(output: Tensor, func: Any, inputs: list[Tensor]) -> bool:
    """Whether the infinities of `output` are an attention mask's: all are -inf and written on purpose."""
    if bool((output == torch.inf).any()):
        return False
    name = func.overloadpacket.__name__.rstrip("_") if hasattr(func, "overloadpacket") else str(func)
    floats = [t for t in inputs if t.is_floating_point() and t.numel()]
    lowest = any(float(t.detach().min()) <= 0.99 * torch.finfo(t.dtype).min for t in floats)
    return name in FILLS or (name in ROUNDINGS and lowest)
