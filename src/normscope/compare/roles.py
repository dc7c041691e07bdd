"""Roles of parameters, read from the graph: name → roles in its branch, stack or model.

The roles of a place are kept as its fact "parameters", which is not compared itself.
"""

from collections.abc import Iterable, Mapping

from normscope.anatomy.branches import FoundBranch
from normscope.anatomy.graph import Op, Value, ancestors, between, comes_from
from normscope.anatomy.norms import FoundNorm
from normscope.anatomy.ops import CONVOLUTIONS, weight_of
from normscope.anatomy.projections import parameter_of
from normscope.anatomy.replay import leaves_of
from normscope.compare.norms import bias_behind, bias_of, norm_bias
from normscope.compare.patch_columns import patch_columns

Roles = dict[str, list[str]]


def branch_parameters(branch: FoundBranch, roles: Mapping[Op, tuple[str, ...]]) -> Roles:
    """Roles of the parameters of a branch."""
    found: Roles = {}
    for op, each in roles.items():
        _put(found, _name_of(parameter_of(op)), each)
        _put(found, _leaf(bias_of(op)), [f"bias of {role}" for role in each])
    if roles:
        _put(found, _leaf(bias_behind(branch)), [f"bias of {role}" for role in last_map(roles)[1]])
    for number, norm in enumerate(branch.norms):
        _norm(found, norm, f"norm {number}")
    inner = (v.norm for v in branch.region if v.norm is not None and v.norm not in branch.norms)
    for norm in inner:
        if norm is not None:
            _norm(found, norm, "an inner norm")
    read = {v for value in (*branch.region, branch.sum.value) for v in value.inputs if v.is_weight}
    for leaf in sorted(leaves_of(read), key=lambda v: v.index):
        if leaf.origin == "parameter" and leaf.name not in found:
            _put(
                found,
                leaf.name,
                ["scale" if len(leaf.shape) < 2 or leaf.numel == max(leaf.shape) else "other"],
            )
    return found


def last_map(roles: Mapping[Op, tuple[str, ...]]) -> tuple[Op, tuple[str, ...]]:
    """The last map of a branch, and its roles."""
    return max(roles.items(), key=lambda pair: pair[0].outputs[0].index)


def entry_parameters(entry: Value, context: int | None) -> Roles:
    """Roles of the parameters from the input to the stream."""
    found: Roles = {}
    behind = sorted(ancestors([entry], -1), key=lambda v: v.index)
    tables = [v.inputs[0] for v in behind if v.base == "embedding" and v.inputs[0].is_weight]
    tokens = [
        v.inputs[0] for v in behind if v.base == "embedding" and v.inputs[0].is_weight and v.inputs[1].live
    ]
    if tokens:
        _put(found, _leaf(max(tokens, key=lambda v: v.numel)), ["token embeddings"])
    for value in behind:
        if value.op is not None and weight_of(value.op) is not None:
            is_of_patches = value.base in CONVOLUTIONS or patch_columns(value.op) is not None
            kind = "patches" if is_of_patches else "a map after the embeddings"
            _put(found, _name_of(parameter_of(value.op)), [kind])
            _put(found, _leaf(bias_of(value.op)), [f"bias of {kind}"])
        if value.norm is not None:
            _norm(found, value.norm, "the norm after the embeddings")
    others = [v for v in behind if v.op is None and v.origin == "parameter" and v.name not in found]
    for leaf in dict.fromkeys([*tables, *others]):
        if leaf.name is not None and leaf.name not in found:
            is_table = context is not None and context in leaf.shape[:-1]
            _put(found, leaf.name, ["position embeddings" if is_table else "other embeddings"])
    return found


def norm_parameters(norm: FoundNorm | None, name: str) -> Roles:
    """Roles of the parameters of one norm."""
    found: Roles = {}
    if norm is not None:
        _norm(found, norm, name)
    return found


def head_parameters(outputs: Iterable[Value], hidden: Value) -> Roles:
    """Roles of the parameters from the last stack to the output."""
    found: Roles = {}
    end = next((v for v in outputs if comes_from(v, hidden)), None)
    part = between(hidden, end) if end is not None else []
    maps = [v.op for v in part if v.op is not None and weight_of(v.op) is not None]
    for number, op in enumerate(maps):
        role = "head" if number == len(maps) - 1 else "a map before the head"
        _put(found, _name_of(parameter_of(op)), [role])
        _put(found, _leaf(bias_of(op)), [f"bias of {role}"])
    for value in part:
        if value.norm is not None:
            _norm(found, value.norm, "a norm in the head")
    return found


def _norm(found: Roles, norm: FoundNorm, name: str) -> None:
    _put(found, _leaf(norm.weight), [f"gain of {name}"])
    _put(found, _leaf(norm_bias(norm)), [f"bias of {name}"])


def _put(found: Roles, name: str | None, roles: Iterable[str]) -> None:
    if name is not None:
        known = found.setdefault(name, [])
        known += [role for role in roles if role not in known]


def _name_of(parameter: Value | None) -> str | None:
    return parameter.name if parameter is not None else None


def _leaf(value: Value | None) -> str | None:
    """The largest parameter that a value is made of."""
    if value is None:
        return None
    leaves = [v for v in leaves_of([value]) if v.origin == "parameter"]
    return max(leaves, key=lambda v: v.numel).name if leaves else None
