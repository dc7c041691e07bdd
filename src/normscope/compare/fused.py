"""Rows of a fused map's output by their role: q, k and v by autograd, gate and up by the graph."""

from collections.abc import Mapping

import torch
from torch import Tensor

from normscope.anatomy import Branch, Site
from normscope.anatomy.graph import Op, Value
from normscope.anatomy.ops import SAME, VIEWS
from normscope.compare.indices import features
from normscope.probes.roles import OPERANDS, reached

RowsOf = dict[str, Tensor]
"""Role → numbers of its features in the output of a map, in their order there."""
_ACTIVATIONS = ("mul", "add", "tanh", "sigmoid", "exp", "neg", "clamp", "pow")
_PLAIN = SAME | VIEWS | {"slice", "split", "chunk", "unbind", "select"}
_MOST = 64  # values between a product and the half of the map's output that is squashed


def attention_rows(branch: Branch, output: Tensor | None, captured: Mapping[Site, Tensor]) -> RowsOf:
    """Features of a map's output (…, features) on which the operands of the branch's attentions depend.

    `captured` holds these operands; all are tensors with their graph.
    """
    if output is None or output.grad_fn is None:
        return {}
    found: RowsOf = {}
    for role, name in OPERANDS.items():
        operands = [captured.get(getattr(each, name)) for each in branch.attention]
        masks = [reached(each, output) for each in operands if each is not None]
        if masks and len(rows := torch.stack(masks).any(0).nonzero().squeeze(1).cpu()):
            found[role] = rows
    return found


def gate_and_up(op: Op) -> RowsOf | None:
    """Features of the gate and the up half of a map, whose product has a squashed and a plain factor."""
    known = features(op.outputs[0])
    for value, numbers in known.items():
        for user in value.users:
            if user.base != "mul" or len(user.inputs) != 2 or not user.outputs:
                continue
            a, b = user.inputs
            source = _squashed_source(b if a is value else a, known)
            if source is None or source is value or not a.live or not b.live:
                continue
            up, gate = numbers.flatten().unique(), known[source].flatten().unique()
            if len(up) == len(gate) and not set(up.tolist()) & set(gate.tolist()):
                return {"gate": _in_order(known[source]), "up": _in_order(numbers)}
    return None


def _in_order(numbers: Tensor) -> Tensor:
    """The features in the order of the last axis."""
    return numbers.reshape(-1, numbers.shape[-1])[0]


def _squashed_source(value: Value, known: Mapping[Value, Tensor]) -> Value | None:
    """The part behind an activation function; None where the value is a plain part itself."""
    if value in known and value.base in _PLAIN:
        return None
    queue = [value]
    for _ in range(_MOST):
        if not queue:
            return None
        here = queue.pop(0)
        if here in known and here.base not in _ACTIVATIONS:
            return here
        queue += [v for v in here.inputs if v.live]
    return None
