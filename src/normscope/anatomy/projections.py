"""Name the parameterised matmuls of a branch by where their outputs go: q, k, v, o, up, gate, down.

A matmul makes queries when its output reaches the query operand of an attention with no other parameterised
matmul on the way; a fused one reaches several. Behind the attention it is the output projection. In a feed-
forward the last one is `down`; of those before it, the one whose output passes a nonlinearity and is then
multiplied is the `gate`.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from normscope.anatomy.attention import Attention
from normscope.anatomy.axes import source_axis
from normscope.anatomy.branches import Limb
from normscope.anatomy.graph import Graph, Op, Value, inputs_of, search
from normscope.anatomy.ops import CASTS, SAME, VIEWS, matmul_operands, weight_of
from normscope.anatomy.types import Projection

_SELECTS = frozenset({"select", "slice", "split", "unbind", "split_with_sizes", "chunk", "index", "narrow"})


def parameter_of(op: Op) -> Value | None:
    """The parameter behind the weight of a matmul, through views, slices and reparametrisations."""
    weight = weight_of(op)
    while weight is not None and weight.origin != "parameter":
        if weight.op is None or weight_of(weight.op) is not None or weight.op.base.endswith("mm"):
            return None
        learnt = [v for v in weight.op.inputs if v.learnt]
        weight = max(learnt, key=_numel) if learnt else None
    return weight


def owner(op: Op) -> str | None:
    """Path of the module that holds the weight of a mixing op."""
    parameter = parameter_of(op)
    if parameter is None:
        learnt = [v for v in op.inputs if v.origin == "parameter"]
        parameter = learnt[0] if learnt else None
    if parameter is None or parameter.name is None:
        return None
    name = (
        parameter.name.split(".parametrizations.")[0] + ".x"
        if ".parametrizations." in parameter.name
        else None
    )
    return (name or parameter.name).rpartition(".")[0]


def read_projections(graph: Graph, limb: Limb) -> tuple[Projection, ...]:
    """The projections of a branch, one for each parameter, in order."""
    found: dict[str, Projection] = {}
    roles = _roles(limb)
    for op in limb.mixers:
        parameter = parameter_of(op)
        if parameter is None or parameter.name is None:
            continue
        if parameter.name in found:  # an expert, or another slice of a packed weight
            found[parameter.name] = _with_roles(found[parameter.name], roles[op])
            continue
        output = _reshaped(op.outputs[0])
        axis = _feature_axis(op)
        if not op.outputs:
            continue
        found[parameter.name] = Projection(parameter.name, roles[op], graph.site(output), axis)
    return tuple(found.values())


def _with_roles(projection: Projection, more: tuple[str, ...]) -> Projection:
    roles = {*projection.roles, *more} - ({"other"} if {*projection.roles, *more} != {"other"} else set())
    order = ("q", "k", "v", "o", "gate", "up", "down", "other")
    return replace(projection, roles=tuple(role for role in order if role in roles))


def _roles(limb: Limb) -> dict[Op, tuple[str, ...]]:
    after = {op: _reached(op, limb) for op in limb.mixers}
    ends = {op for op in limb.mixers if not any(other in after[op][1] for other in limb.mixers)}
    return {op: _role(op, limb, after[op], ends) for op in limb.mixers}


def _role(op: Op, limb: Limb, after: tuple[set[Value], set[Op]], ends: set[Op]) -> tuple[str, ...]:
    reached = after[0]
    into = [
        role
        for role in ("query", "key", "value")
        if any(getattr(a, role) in reached and a.output not in _behind(op, a) for a in limb.attentions)
    ]
    if into:
        return tuple(role[0] for role in into)
    if limb.kind != "feed-forward":
        return ("o",) if op in ends else ("other",)
    if op in ends:
        return ("down",)
    kinds = _gating(op, reached)
    return kinds if any(other in ends for other in after[1]) else ("other",)


def _behind(op: Op, attention: Attention) -> set[Value]:
    """Outputs of the attention if the op already comes after it (then it cannot feed its operands)."""
    return {attention.output} if op.outputs[0].index > attention.output.index else set()


def _reached(op: Op, limb: Limb) -> tuple[set[Value], set[Op]]:
    """Values the op's output comes to before the next parameterised matmul, and those matmuls."""
    last = limb.output.index

    def step(value: Value) -> Iterable[Value]:
        users = (user for user in value.users if weight_of(user) is None)
        return (v for user in users for v in user.outputs if v.index <= last)

    reached = set(search(op.outputs[:1], step))
    return reached, {user for value in reached for user in value.users if weight_of(user) is not None}


def _gating(op: Op, reached: set[Value]) -> tuple[str, ...]:
    """("up",), ("gate",) or both for the half that is squashed, the half that is multiplied, or a fused
    matmul.
    """
    parts = _parts(op.outputs[0])
    roles: list[str] = []
    for value in reached:
        if value.op is None or value.base != "mul" or len(value.op.inputs) != 2:
            continue
        a, b = value.op.inputs
        plain = [v for v in (a, b) if _plain_source(v) in parts]
        squashed = [v for v in (a, b) if v.live and _plain_source(v) not in parts]
        if len(plain) == 2:  # a bilinear unit, or x·σ(x) by hand
            continue
        if a.live and b.live and plain and squashed:
            if _same_activation(plain[0], squashed[0], parts):
                continue
            roles.append("up")
            if squashed[0] in reached:
                roles.append("gate")
        elif (
            a.live and b.live and any(v in reached for v in (a, b)) and not all(v in reached for v in (a, b))
        ):
            roles.append("gate")
    if not roles:
        return ("up",)
    return tuple(role for role in ("gate", "up") if role in roles)


def _same_activation(plain: Value, squashed: Value, parts: set[Value]) -> bool:
    """Whether both come from the same part: x·σ(x), x·Φ(x) are activations, not gates."""
    root, lowest = _plain_source(plain), min(p.index for p in parts)
    met = search([squashed], lambda v: () if v in parts or v.index <= lowest else inputs_of(v))
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
    while value.op is not None and (
        value.base in CASTS | VIEWS or (value.base in {"mul", "div"} and len(value.op.inputs) == 1)
    ):
        value = value.source
    return value


def _reshaped(value: Value) -> Value:
    """A linear layer multiplies a flattened (B·T, d): its output is the view that follows."""
    while len(value.users) == 1 and value.users[0].base in {"view", "_unsafe_view", "add"}:
        user = value.users[0]
        if not user.outputs or user.outputs[0].shape[-1:] != value.shape[-1:]:
            break
        if user.base == "add" and any(v.live for v in user.inputs if v is not value):
            break
        value = user.outputs[0]
    return value


def _feature_axis(op: Op) -> int:
    """Which axis of the parameter counts the output features, followed through views."""
    weight = weight_of(op)
    assert weight is not None
    if "conv" in op.base or op.base == "linear":
        return 0
    operands = matmul_operands(op)
    second = operands is not None and operands[1] is weight
    axis = len(weight.shape) - 1 if second else max(len(weight.shape) - 2, 0)
    while weight.op is not None and weight.origin != "parameter":
        axis = source_axis(weight.op, axis)
        weight = max((v for v in weight.op.inputs if v.learnt), key=_numel)
    return min(axis, len(weight.shape) - 1)  # several axes at once (einsum): the last of them


def _numel(value: Value) -> int:
    return math.prod(value.shape)
