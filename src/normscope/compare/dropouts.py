"""Dropout rates of a branch, by place: attention weights, inside, end.

Dropout does nothing in eval mode. Calls of PyTorch's function are recorded with their input. Fused attention
gets its rate only in train mode, so that it is read from the module that runs it.
"""

from collections.abc import Mapping, Set
from typing import Any

from torch import nn

from normscope.anatomy.branches import FoundBranch
from normscope.anatomy.graph import Graph, Value
from normscope.anatomy.ops import SAME
from normscope.anatomy.terms import scale_step


def dropout_facts(branch: FoundBranch, graph: Graph, modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """The rates at the places of a branch, 0 for none."""
    region = set(branch.region)
    weights = {v for a in branch.attentions for v in _same(a.probabilities)}
    ends = _behind(branch.output) | _same(branch.output)
    if branch.norm_out is not None:
        ends |= _behind(branch.norm_out.input)
    noted = {
        "attention_dropout": [rate for value, rate, _ in graph.dropouts if value in weights],
        "output_dropout": [rate for value, rate, _ in graph.dropouts if value in ends],
        "hidden_dropout": [
            rate for value, rate, _ in graph.dropouts if value in region and value not in weights | ends
        ],
    }
    facts: dict[str, Any] = {name: max(rates, default=0.0) for name, rates in noted.items()}
    if branch.attentions and not noted["attention_dropout"]:
        facts["attention_dropout"] = _own_rate(branch, modules, {path for *_, path in graph.dropouts})
    if not branch.attentions:
        del facts["attention_dropout"]
    return facts


def _behind(value: Value) -> set[Value]:
    """A value and what it was before views, casts and scales."""
    found = {value}
    while True:
        scaled = scale_step(value)
        if value.base in SAME:
            value = value.source
        elif scaled is not None and scaled[1] != "gate":
            value = scaled[0]
        else:
            return found
        found.add(value)


def _same(value: Value) -> set[Value]:
    """A value and its views and casts."""
    found, stack = set[Value](), [value]
    while stack:
        here = stack.pop()
        if here not in found:
            found.add(here)
            stack += [v for v in here.successors if v.base in SAME]
    return found


def _own_rate(branch: FoundBranch, modules: Mapping[str, nn.Module], called: Set[str]) -> float:
    """The rate that the module of the softmax keeps: an attribute, or a dropout that it never calls."""
    op = branch.attentions[0].probabilities.op
    module = modules.get(op.call.path) if op is not None else None
    if module is None:
        return 0.0
    rates: dict[str, float] = {}
    for name, value in vars(module).items():
        if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
            rates[name] = float(value)
    for name, child in module.named_children():
        path = f"{op.call.path}.{name}" if op is not None and op.call.path else name
        if isinstance(child, nn.Dropout) and path not in called:
            rates[name] = child.p
    named = [rate for name, rate in rates.items() if "att" in name]
    return (named or list(rates.values()) or [0.0])[0]
