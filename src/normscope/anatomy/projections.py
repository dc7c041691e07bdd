"""Name the parameterised matmuls of a branch by the use of their outputs: q, k, v, o, up, gate, down.

A matmul makes queries when its output reaches the query operand of an attention with no other parameterised
matmul between; a fused one reaches several operands. After the attention it is the output projection; one
whose sigmoid multiplies the attention's output is a `gate`. In a
feed-forward the last one is `down`. Among those before, the one whose output passes a nonlinearity and is
then multiplied is the `gate`.
"""

from collections.abc import Iterable
from dataclasses import replace

from normscope.anatomy.axes import source_axis
from normscope.anatomy.branches import FoundBranch
from normscope.anatomy.graph import Op, Value, search
from normscope.anatomy.ops import CASTS, SAME, VIEWS, matmul_operands, op_set, weight_of
from normscope.anatomy.types import Projection

_SELECTS = op_set("select slice split unbind split_with_sizes chunk index narrow")
_ROLES = ("q", "k", "v", "o", "gate", "up", "down", "other")


def parameter_of(op: Op) -> Value | None:
    """The parameter behind the weight of a matmul, through views, slices and reparametrisations."""
    weight = weight_of(op)
    while weight is not None and weight.origin != "parameter":
        if weight.op is None or weight_of(weight.op) is not None or weight.base.endswith("mm"):
            return None
        weight = _largest(weight.inputs)
    return weight


def _largest(values: Iterable[Value]) -> Value | None:
    """The learnt value with the most elements."""
    return max((v for v in values if v.learnt), key=lambda v: v.numel, default=None)


def owner(op: Op) -> str | None:
    """Path of the module that holds the weight of a mixing op."""
    parameter = parameter_of(op) or next((v for v in op.inputs if v.origin == "parameter"), None)
    if parameter is None or parameter.name is None:
        return None
    path, is_reparametrised, _ = parameter.name.partition(".parametrizations.")
    return path if is_reparametrised else path.rpartition(".")[0]


def owners(branch: FoundBranch) -> list[str]:
    """Paths of the modules whose weights a branch mixes with, in order."""
    return [path for op in branch.mixers if (path := owner(op)) is not None]


def read_projections(branch: FoundBranch) -> tuple[Projection, ...]:
    """The projections of a branch, one for each parameter, in order."""
    found: dict[str, Projection] = {}
    after = {op: _reached(op, branch) for op in branch.mixers}
    ends = {op for op in branch.mixers if after[op][1].isdisjoint(branch.mixers)}
    for op in branch.mixers:
        parameter = parameter_of(op)
        if parameter is None or parameter.name is None:
            continue
        roles, name = _role(op, branch, after[op], ends), parameter.name
        if name in found:  # an expert, or another slice of a packed weight
            known = {*found[name].roles, *roles}
            plain = known - {"other"} or known
            found[name] = replace(found[name], roles=tuple(role for role in _ROLES if role in plain))
        else:
            found[name] = Projection(name, roles, reshaped(op.outputs[0]).site, _feature_axis(op))
    return tuple(found.values())


def _role(op: Op, branch: FoundBranch, after: tuple[set[Value], set[Op]], ends: set[Op]) -> tuple[str, ...]:
    reached, next_maps = after
    before = [a for a in branch.attentions if op.outputs[0].index <= a.output.index]
    into = [role for role in ("query", "key", "value") if any(getattr(a, role) in reached for a in before)]
    if into:
        return tuple(role[0] for role in into)
    if branch.kind != "feed-forward":
        gates = branch.attentions and any(value.base == "sigmoid" for value in reached)
        return ("o",) if op in ends else ("gate",) if gates else ("other",)
    if op in ends:
        return ("down",)
    return ("other",) if ends.isdisjoint(next_maps) else _gating(op, reached)


def _reached(op: Op, branch: FoundBranch) -> tuple[set[Value], set[Op]]:
    """Values that the op's output reaches before the next parameterised matmul, and those matmuls."""
    last = branch.output.index

    def step(value: Value) -> Iterable[Value]:
        return (v for v in value.successors if v.index <= last and weight_of(v.op) is None)

    reached = set(search(op.outputs[:1], step))
    return reached, {user for value in reached for user in value.users if weight_of(user) is not None}


def _gating(op: Op, reached: set[Value]) -> tuple[str, ...]:
    """("gate",) for the half that is squashed, ("up",) for the half that is multiplied, both for a fused
    matmul.
    """
    parts = _parts(op.outputs[0])
    roles: set[str] = set()
    for value in reached:
        if value.base != "mul" or len(value.inputs) != 2 or not all(v.live for v in value.inputs):
            continue
        plain = [v for v in value.inputs if _plain_source(v) in parts]
        squashed = [v for v in value.inputs if _plain_source(v) not in parts]
        if len(plain) == len(squashed):
            if not _same_activation(plain[0], squashed[0], parts):
                roles |= {"up", "gate"} if squashed[0] in reached else {"up"}
        elif not plain and sum(v in reached for v in value.inputs) == 1:
            roles.add("gate")
    return tuple(role for role in ("gate", "up") if role in roles) or ("up",)


def _same_activation(plain: Value, squashed: Value, parts: set[Value]) -> bool:
    """True where both come from the same part: x·σ(x), x·Φ(x) are activations, not gates."""
    root, lowest = _plain_source(plain), min(p.index for p in parts)
    met = search([squashed], lambda v: () if v in parts or v.index <= lowest else v.inputs)
    return any(_plain_source(value) is root for value in met if value in parts)


def _parts(value: Value) -> set[Value]:
    """The output of a matmul and the pieces it is split into."""

    def step(here: Value) -> Iterable[Value]:
        for user in here.users:
            if user.base in SAME | _SELECTS or (user.base == "add" and not all(v.live for v in user.inputs)):
                yield from user.outputs

    found = set(search([value], step))
    # Once it is split, only the pieces count: the whole is not one operand of anything.
    return found - {v for v in found if any(u.base in _SELECTS for u in v.users)}


def _plain_source(value: Value) -> Value:
    """`value` before views, casts and scalar factors."""
    while value.base in CASTS | VIEWS or (value.base in {"mul", "div"} and len(value.inputs) == 1):
        value = value.source
    return value


def reshaped(value: Value) -> Value:
    """The view after a linear layer's flattened (B·T, d) output, where there is one."""
    while len(value.users) == 1 and value.users[0].base in {"view", "_unsafe_view", "add"}:
        user = value.users[0]
        if not user.outputs or user.outputs[0].shape[-1:] != value.shape[-1:]:
            break
        if user.base == "add" and any(v.live for v in user.inputs if v is not value):
            break
        value = user.outputs[0]
    return value


def _feature_axis(op: Op) -> int:
    """The axis of the parameter that counts the output features, followed through views."""
    weight = weight_of(op)
    assert weight is not None
    if "conv" in op.base or op.base == "linear":
        return 0
    operands = matmul_operands(op)
    second = operands is not None and operands[1] is weight
    axis = len(weight.shape) - 1 if second else max(len(weight.shape) - 2, 0)
    while weight.op is not None and (before := _largest(weight.inputs)) is not None:
        axis, weight = source_axis(weight.op, axis), before
    return min(axis, len(weight.shape) - 1)  # several axes at once (einsum): the last of them
