"""Values of the weights that no initialisation gives.

    wiring/odd-weights        number of the parameters below; 0 where all values are plausible
    wiring/non-finite-weight  share of a parameter's entries that are NaN or infinite
    wiring/huge-weight        largest magnitude of a trained parameter that has entries of 2/ε or more
    wiring/denormal-weight    share of a parameter's non-zero entries that are subnormal, if over half
    wiring/zero-gain          1 for a norm on the stream's path whose factor is zero everywhere
    wiring/copied-weight      1 for a trained matrix that equals another one of its block, or outside

ε is the machine epsilon of the parameter's dtype. From 2/ε on the spacing of its numbers is 2 or more, so an
update of less than 1 rounds to nothing.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from normscope.anatomy import Anatomy, Norm
from normscope.probes.measurement import EXACT, Measurement
from normscope.probes.norms import factor
from normscope.probes.parameters import Parameters
from normscope.probes.sums import extremes, is_byte, is_zero, widened

SUBNORMAL_SHARE = 0.5
_SAMPLE = 4096


def value_rows(anatomy: Anatomy, parameters: Parameters) -> list[Measurement]:
    """A row for every parameter with odd values, after their number; one pass over the weights."""
    rows = [row for p in parameters.all() for row in _odd(parameters.names[id(p)], p)]
    rows += list(_zero_gains(anatomy, parameters))
    rows += list(_copies(anatomy, parameters))
    return [Measurement("wiring/odd-weights", "", float(len({row.site for row in rows}))), *rows]


def _odd(name: str, parameter: Tensor) -> Iterator[Measurement]:
    values = parameter.detach()
    if not values.numel() or values.is_meta:
        return
    low, high = extremes(values)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        finite = widened(values).isfinite()
        share = 1 - float(finite.double().mean())
        kind = "NaN" if widened(values).isnan().any() else "infinite"
        yield Measurement("wiring/non-finite-weight", name, share, how=f"{EXACT}; {kind}")
        return
    if is_byte(values):
        return  # codes of quantised weights, whose scales lie elsewhere
    largest = float(torch.maximum(-low, high))
    info = torch.finfo(values.dtype)
    if parameter.requires_grad and largest >= 2 / info.eps:
        yield Measurement("wiring/huge-weight", name, largest)
    if values.dtype != torch.float16 and largest > 0:
        # A sample decides first: a second pass over every weight would double the cost.
        flat = values.reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)]
        if _subnormal_share(sample, info.tiny) > SUBNORMAL_SHARE:
            share = _subnormal_share(flat, info.tiny)
            if share > SUBNORMAL_SHARE:
                yield Measurement("wiring/denormal-weight", name, share)


def _subnormal_share(values: Tensor, smallest_normal: float) -> float:
    nonzero = values[values != 0].abs()
    return float((nonzero < smallest_normal).double().mean()) if nonzero.numel() else 0.0


def _zero_gains(anatomy: Anatomy, parameters: Parameters) -> Iterator[Measurement]:
    """Norms that everything behind them goes through; one behind a branch may start at zero."""
    norms: list[Norm] = [stack.final_norm for stack in anatomy.stacks if stack.final_norm is not None]
    for branch in anatomy.branches:
        if branch.placement in ("pre", "post"):
            norms += branch.norms
        elif branch.placement == "peri":
            norms += branch.norms[:1]
    for norm in dict.fromkeys(norms):
        if norm.weight is None or norm.weight not in parameters.by_name:
            continue
        gain = factor(norm, parameters.by_name)
        if gain is not None and is_zero(gain):
            yield Measurement("wiring/zero-gain", norm.weight, 1.0)


def _copies(anatomy: Anatomy, parameters: Parameters) -> Iterator[Measurement]:
    """Equal matrices within one block; blocks that are copies as a whole are `weights/identical`."""
    blocks = {block.path for block in anatomy.blocks if block.path}
    first: dict[tuple[object, ...], tuple[str, Tensor]] = {}
    for parameter in parameters.trained():
        if parameter.ndim != 2 or parameter.is_meta or min(parameter.shape) < 2:
            continue
        name = parameters.names[id(parameter)]
        block = max((path for path in blocks if name.startswith(f"{path}.")), key=len, default="")
        values = parameter.detach()
        probe = values.reshape(-1)[:8].tolist()
        if len(set(probe)) < 2:  # a constant is no draw
            continue
        key = (block, tuple(parameter.shape), *probe)
        before = first.setdefault(key, (name, values))
        if before[0] != name and torch.equal(before[1], values):
            yield Measurement("wiring/copied-weight", name, 1.0, how=f"{EXACT}; equal to {before[0]}")
