"""Find the origin of the first NaN or infinity, in a subject known to have one.

Searched in this order: parameters, the batch, ops of the forward that turn finite inputs into one, and, where
loss and forward are finite, the backward.
"""

import torch
from torch import Tensor, nn

from normscope.anatomy.calls import ModuleCalls
from normscope.probes.births import Birth, Births
from normscope.probes.measurement import EXACT, Measurement
from normscope.probes.objective import objective
from normscope.probes.parameters import Parameters
from normscope.probes.sums import is_finite, widened
from normscope.subjects import Subject
from normscope.subjects.feed import tensors_in

QUANTITY = "precision/non-finite"


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
    births = Births(ModuleCalls(subject.model))
    with births.calls.watching(), births:
        loss = objective(subject)
    birth = births.origin(loss) or births.first
    if birth is not None:
        where = "" if birth.module else ", outside of every module (the loss)"
        inputs = "" if birth.is_given else "; its inputs were finite"
        return _row(birth.module, f"{_came(birth)}{where}{inputs}")
    return _in_backward(loss, parameters)


def _in_backward(loss: Tensor, parameters: Parameters) -> Measurement:
    """The last parameter with a non-finite gradient: the backward starts at the end, so it is nearest."""
    weights = parameters.all()
    births = Births(ModuleCalls(nn.Module()))
    with births:
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    bad = [p for p, g in zip(weights, gradients, strict=True) if g is not None and not is_finite(g)]
    birth = _came(births.first) if births.first else "not born in one op"
    name = parameters.names[id(bad[-1])] if bad else ""
    return _row(
        name, f"the loss is finite; the last parameter whose gradient is not; {birth} of the backward"
    )


def _came(birth: Birth) -> str:
    if birth.is_memory:
        return f"read from uninitialised memory of {birth.op}"
    return f"{birth.kind} {'met as an input of' if birth.is_given else 'born in'} {birth.op}"


def _row(site: str, how: str) -> Measurement:
    return Measurement(QUANTITY, site, 1.0, how=f"{EXACT}; {how}")


def _held(model: nn.Module, parameters: Parameters) -> dict[str, Tensor]:
    """Tensors that must be finite: parameters, and buffers unless they are masks."""
    buffers = {
        name: b for name, b in model.named_buffers() if b.is_floating_point() and widened(b).isnan().any()
    }
    return {**parameters.by_name, **buffers}
