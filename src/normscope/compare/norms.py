"""Facts of norms, and the biases of projections."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from normscope.anatomy.branches import FoundBranch
from normscope.anatomy.graph import Op, Value
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import CONVOLUTIONS, SAME

_BIAS_AT = {"native_layer_norm": 3, "layer_norm": 3, "native_group_norm": 2, "group_norm": 3}
_BATCH_NORMS = {"native_batch_norm": 2, "batch_norm": 2, "_native_batch_norm_legit_no_training": 2}
_STEPS = 6
"""Views between a matmul and its bias at most: einsum makes four."""
_BIAS_FIRST = {"addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation"}


def norm_facts(
    norms: Sequence[FoundNorm], parameters: Mapping[str, nn.Parameter], name: str
) -> dict[str, Any]:
    """Facts of the norms of one place, named `name`_eps, …; one value where all norms agree, else a list."""
    if not norms:
        return {name: None}
    return {
        name: one([norm.kind for norm in norms]),
        f"{name}_eps": one([norm.eps for norm in norms]),
        f"{name}_gain": one([_gain(norm, parameters) for norm in norms]),
        f"{name}_bias": one([norm_bias(norm) is not None for norm in norms]),
        f"{name}_offset": one([norm.weight_offset for norm in norms]),
    }


def one(values: Sequence[Any]) -> Any:
    """The value that all agree on, else the list of them."""
    return values[0] if all(value == values[0] for value in values) else list(values)


def _gain(norm: FoundNorm, parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether the norm has a gain that is trained."""
    if norm.weight is None:
        return False
    parameter = parameters.get(norm.weight.name or "")
    return parameter is None or parameter.requires_grad


def norm_bias(norm: FoundNorm) -> Value | None:
    """β of a norm, None without one."""
    at = (_BIAS_AT | _BATCH_NORMS).get(norm.core.base)
    own = norm.core.arg(at, "bias") if at is not None else None
    if isinstance(own, Value) and own.learnt:
        return own
    if norm.bias is not None:
        return norm.bias
    value = norm.output
    while value is not norm.core.outputs[0] and value.op is not None:
        learnt = [v for v in value.inputs if v.is_weight]
        if value.base == "add" and learnt:
            return learnt[0]
        value = next((v for v in value.inputs if v.live), norm.core.outputs[0])
    return None


def bias_behind(branch: FoundBranch) -> Value | None:
    """The bias after a residual sum, as in `x = x + y @ w + b`; of branches of one sum, the last has it."""
    total = branch.sum.value
    if any(other.output.index > branch.output.index for other in branch.sum.branches):
        return None
    users = [op for op in total.users if op.outputs]
    if len(users) != 1 or users[0].base != "add":
        return None
    others = [v.behind(SAME) for v in users[0].inputs if v is not total]
    is_vector = len(others) == 1 and others[0].is_weight and others[0].numel == total.shape[-1]
    return others[0] if is_vector else None


def bias_of(op: Op) -> Value | None:
    """The bias that a map adds, in its op or after it; views may part its features into heads."""
    own = _own_bias(op)
    if own is not None:
        return own if own.is_weight else None
    added = bias_added(op)
    return None if added is None else next(v.behind(SAME) for v in added.inputs if v.is_weight)


def _own_bias(op: Op) -> Value | None:
    """The bias among the inputs of a map."""
    if op.base in _BIAS_FIRST and op.inputs[0].is_weight:
        return op.inputs[0]
    bias = op.arg(2, "bias") if op.base == "linear" or op.base in CONVOLUTIONS else None
    return bias if isinstance(bias, Value) else None


def bias_added(op: Op) -> Op | None:
    """The op that adds a bias to a map's output or to a view of it; None where the map adds it itself."""
    value = op.outputs[0]
    if _own_bias(op) is not None:
        return None
    for _ in range(_STEPS):
        if len(value.users) != 1 or not value.users[0].outputs:
            return None
        user = value.users[0]
        others = [v.behind(SAME) for v in user.inputs if v is not value]
        if user.base == "add" and len(others) == 1 and others[0].is_weight:
            is_bias = others[0].numel in {1, value.shape[-1], op.outputs[0].shape[-1]}
            return user if is_bias else None
        if user.base not in SAME:
            return None
        value = user.outputs[0]
    return None
