"""Facts of a stack's two ends: embeddings, positions and their norms; final norm and head."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normscope.anatomy.graph import Graph, Op, Value, ancestors, between, comes_from
from normscope.anatomy.ops import CONVOLUTIONS, PARTS, SAME, weight_of
from normscope.anatomy.projections import parameter_of
from normscope.anatomy.replay import CannotReplay, Replay
from normscope.compare.activation import biased, read_activation
from normscope.compare.norms import bias_of, norm_facts, one
from normscope.compare.patch_columns import patch_columns

Facts = dict[str, Any]
_TINY, _HUGE = 1e-3, 1e6
_THROUGH = SAME | PARTS


def entry_facts(entry: Value, parameters: Mapping[str, nn.Parameter], replay: Replay) -> Facts:
    """Facts of the way from the input to the stream's first point."""
    behind = ancestors([entry], -1)
    tables = [v for v in behind if v.base == "embedding" and v.op is not None and v.inputs[0].is_weight]
    tokens = [v for v in tables if _reads_ids(v)]
    if not tokens:
        patches = [v for v in behind if v.base in CONVOLUTIONS and v.live]
        patches = patches or [v for v in behind if v.op is not None and patch_columns(v.op) is not None]
        if not patches:
            return {}
        first = min(patches, key=lambda v: v.index)
        facts: Facts = {"patch": list(first.inputs[1].shape[2:])} if first.base in CONVOLUTIONS else {}
        return facts | _around(first, entry, parameters, replay)
    first = max(tokens, key=lambda v: v.inputs[0].numel)
    facts = {"vocabulary": first.inputs[0].shape[0]}
    return facts | _around(first, entry, parameters, replay)


def _reads_ids(value: Value) -> bool:
    """True where the indices are the model's input, and not positions counted along it."""
    index = value.inputs[1]
    while index.op is not None and index.base in SAME | {"slice", "select", "index", "clamp", "where", "add"}:
        live = [v for v in index.inputs if v.live]
        if not live:
            return False
        index = live[0]
    return index.origin == "input" and index.op is None and not index.floating


def _around(first: Value, entry: Value, parameters: Mapping[str, nn.Parameter], replay: Replay) -> Facts:
    """Facts of everything between the embeddings and the stream: factor, norm, positions."""
    part = between(first, entry)
    inside = {first, *part}
    norms = [v.norm for v in part if v.norm is not None and v.norm.input in inside]
    facts: Facts = norm_facts(norms, parameters, "embedding_norm")
    end = norms[0].input if norms else entry
    mapped = [v for v in part if weight_of(v.op) is not None]
    facts["embedding_maps"] = len(mapped)
    if first.base == "embedding" and first.shape[-1] != entry.shape[-1]:
        facts["embedding_width"] = first.shape[-1]
    if first.base == "embedding":
        facts |= _embedding_scale(first, mapped[0].source if mapped else end, replay)
    return facts | _positions(part, inside, parameters, replay)


def _embedding_scale(first: Value, end: Value, replay: Replay) -> Facts:
    """The factor on the token embeddings, up to the first norm or map."""
    target = end if comes_from(end, first) else None
    if target is None:
        return {}
    try:
        ones = torch.ones(first.shape, dtype=torch.float64)
        one, zero = (replay.run({first: x}, [target])[0] for x in (ones, torch.zeros_like(ones)))
    except CannotReplay:
        return {}
    changed = (one - zero).flatten()
    changed = changed[changed.abs() > 0]
    if not len(changed) or bool((changed - changed[0]).abs().max() > 1e-6 * changed[0].abs()):
        return {}
    return {"embedding_scale": float(changed[0])}


def _positions(
    part: list[Value], inside: set[Value], parameters: Mapping[str, nn.Parameter], replay: Replay
) -> Facts:
    """The embedding of positions that is added on the way, and tables without positions (token types)."""
    facts: Facts = {"positions": None, "token_types": None}
    for value in part:
        if value.base not in {"add", "cat"}:
            continue
        for added in value.inputs:
            if added not in inside and added.floating and len(added.shape) > 1:
                facts |= _added(added, inside, parameters, replay) if value.base == "add" else {}
            elif value.base == "add" and (table := _table_of_row(added)) is not None:
                facts["token_types"] = table.shape[0]
    return facts


def _table_of_row(added: Value) -> Value | None:
    """The table of which one row is added to all tokens; None where a vector is no row of a table."""
    is_row = added.base == "select" and len(added.shape) == 1
    table = added.inputs[0] if is_row else None
    return table if table is not None and table.is_weight and len(table.shape) == 2 else None


def _added(added: Value, inside: set[Value], parameters: Mapping[str, nn.Parameter], replay: Replay) -> Facts:
    core = added.behind(_THROUGH - {"embedding"})
    while core.base in {"add", "mul"} and core.op is not None and not core.is_weight:
        live = [v for v in core.inputs if v not in inside and v.floating]  # several tables added first
        if not live:
            return {}
        found: Facts = {}
        for each in live:
            found |= {k: v for k, v in _added(each, inside, parameters, replay).items() if v is not None}
        return found
    if core.base == "embedding" and core.inputs[0].is_weight:
        return _table(core, parameters, replay)
    if core.is_weight and core.op is None:
        sizes = [n for n in core.shape[:-1] if n > 1]
        if not sizes:
            return {}
        return {"positions": _learnt(core, parameters), "context": max(sizes)}
    if core.is_weight:
        return {"positions": "learnt"}
    try:
        rows = replay.fixed(added) if not added.learnt else None
    except CannotReplay:
        return {}
    return _fixed(rows) if rows is not None else {}


def _table(core: Value, parameters: Mapping[str, nn.Parameter], replay: Replay) -> Facts:
    """Facts of a table that is looked up: of positions where the indices count, else of token types."""
    weight, index = core.inputs[:2]
    try:
        numbers = replay.fixed(index)
    except CannotReplay:
        numbers = None
    if numbers is None:
        return {"positions": _learnt(weight, parameters), "context": weight.shape[0]}
    row = numbers.reshape(-1, numbers.shape[-1])[0] if numbers.dim() else numbers.reshape(1)
    if len(row) < 2 or not bool((row.diff() != 0).any()):
        return {"token_types": weight.shape[0]}
    kind = _learnt(weight, parameters)
    facts: Facts = {"positions": kind, "context": weight.shape[0], "position_offset": int(row[0])}
    if kind == "fixed" and weight.data is not None:
        facts |= {"positions": _fixed(weight.data.double())["positions"]}
    return facts


def _learnt(weight: Value, parameters: Mapping[str, nn.Parameter]) -> str:
    parameter = parameters.get(weight.name or "")
    return "fixed" if parameter is not None and not parameter.requires_grad else "learnt"


def _fixed(rows: Tensor) -> Facts:
    """Kind of a table of positions that is not learnt: sines and cosines, interleaved or in halves."""
    rows = rows.double().reshape(-1, rows.shape[-1]) if rows.dim() > 1 else rows.double()[None]
    if not bool((rows - rows[:1]).abs().max() > 0):
        return {}
    half = rows.shape[-1] // 2
    known = {
        "sines and cosines, interleaved": (rows[:, 0::2][:, :half], rows[:, 1::2][:, :half]),
        "sines and cosines, in halves": (rows[:, :half], rows[:, half : 2 * half]),
    }
    for name, (sine, cosine) in known.items():
        norm = (sine.square() + cosine.square()).mean().sqrt()
        is_pair = bool((sine.square() + cosine.square() - norm**2).abs().max() < 1e-3 * norm**2)
        if is_pair:
            return {"positions": name} | (
                {"position_scale": float(norm)} if abs(float(norm) - 1) > 1e-3 else {}
            )
    return {"positions": "fixed"}


def head_facts(graph: Graph, hidden: Value, tables: set[Value], replay: Replay) -> Facts:
    """Facts of the head, from the last stack's hidden state to the model's first output."""
    outputs = [v for v in graph.outputs if comes_from(v, hidden) and v is not hidden and len(v.shape) > 1]
    if not outputs:
        return {"outputs": None}
    end = outputs[0]
    part = between(hidden, end)
    maps = [v for v in part if weight_of(v.op) is not None and v.op is not None]
    if not maps:
        return {"outputs": None}
    last = max(maps, key=lambda v: v.index)
    op = last.op
    assert op is not None, "a map is an op"
    facts: Facts = {
        "outputs": last.shape[-1] if op.base not in CONVOLUTIONS else last.shape[1],
        "head_maps": len(maps),
        "head_bias": bias_of(op) is not None,
    }
    parameter = parameter_of(op)
    if parameter is not None and tables:
        facts["tied_head"] = parameter in tables
    norms = [v.norm for v in part if v.norm is not None]
    facts["head_norms"] = len(norms)
    if norms:
        facts["head_norm_eps"] = one([norm.eps for norm in norms])
    if len(maps) == 2 and maps[0].op is not None:
        start, end = biased(maps[0].op), next(v for v in op.inputs if v.live).behind(SAME)
        read = read_activation([start], norms[0].input if norms else end, replay)
        facts |= {"head_activation": read[0]} if read is not None else {}
    return facts | _head_numbers(op, hidden, end, bool(norms) or len(maps) > 1, replay)


def _head_numbers(op: Op, hidden: Value, end: Value, is_deep: bool, replay: Replay) -> Facts:
    made = op.outputs[0]
    try:
        slope, cap = _slope_and_cap(made, end, replay)
        before = 1.0
        read = next(v for v in op.inputs if v.live)
        if not is_deep and read is not hidden:
            ones = torch.ones(hidden.shape, dtype=torch.float64)
            one, zero = (replay.run({hidden: x}, [read])[0] for x in (ones, torch.zeros_like(ones)))
            before = float((one - zero).flatten()[-1])
    except (CannotReplay, StopIteration):
        return {}
    return {"head_scale": slope * before, "head_cap": cap}


def _slope_and_cap(start: Value, end: Value, replay: Replay) -> tuple[float, float | None]:
    """Factor and soft cap of an elementwise part, from its values near zero and far from it."""
    if start is end:
        return 1.0, None

    def value(number: float) -> float:
        given = torch.full(start.shape, number, dtype=torch.float64)
        (result,) = replay.run({start: given}, [end])
        return float(result.flatten()[-1])

    zero = value(0.0)
    slope = (value(_TINY) - value(-_TINY)) / (2 * _TINY)
    top = value(_HUGE) - zero
    return slope, top if 0 < top < 0.5 * _HUGE * slope else None
