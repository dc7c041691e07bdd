"""Facts of an attention, from the dataflow and from what its parts compute."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from normscope.anatomy.attention import Attention
from normscope.anatomy.axes import counted
from normscope.anatomy.branches import FoundBranch
from normscope.anatomy.graph import Op, Value
from normscope.anatomy.replay import CannotReplay, Replay
from normscope.compare.indices import features
from normscope.compare.logits import logit_facts
from normscope.compare.rotary import rotary_facts
from normscope.compare.ways import Way, way_to

Facts = dict[str, Any]


def attention_facts(
    branch: FoundBranch,
    roles: dict[Op, tuple[str, ...]],
    modules: Mapping[str, nn.Module],
    replay: Replay,
) -> Facts:
    """Facts of the attentions of a branch; what cannot be read is left out."""
    if not branch.attentions:
        return {}
    first = branch.attentions[0]
    query, key, value = map(way_to, (first.query, first.key, first.value))
    facts: Facts = _heads(branch, roles) | _window(first, branch, modules)
    if branch.kind == "attention" and first.probabilities.causal is not None:
        facts["causal"] = first.probabilities.causal
    facts |= _qk_norm([way for way in (query, key) if way is not None], first)
    facts["value_norm"] = value is not None and bool(value.norms)
    logits = logit_facts(first, (query, key), replay)
    positions = _positions(query, logits, replay)
    if positions.get("rotary_before_norm") and not _keeps_rotation(facts):
        facts["qk_norm"] = f"{facts['qk_norm']}, behind the rotation"
    logits = {name: value for name, value in logits.items() if name != "attention_positions"}
    return facts | logits | positions


def _heads(branch: FoundBranch, roles: dict[Op, tuple[str, ...]]) -> Facts:
    first = branch.attentions[0]
    width, value_width = first.query.shape[-1], first.value.shape[-1]
    heads = sum(_features(a.query) for a in branch.attentions)
    made: dict[tuple[str, ...], int] = {}
    for op in branch.mixers:
        if roles.get(op):
            made[roles[op]] = made.get(roles[op], 0) + op.outputs[0].shape[-1]
    if ("q",) in made and made["q",] % width == 0:
        heads = made["q",] // width
    kv_heads = None
    if ("k",) in made and made["k",] % width == 0:
        kv_heads = made["k",] // width
    elif ("k", "v") in made and made["k", "v"] % (width + value_width) == 0:
        kv_heads = made["k", "v"] // (width + value_width)
    elif ("q", "k", "v") in made:
        rest = made["q", "k", "v"] - heads * width
        kv_heads = rest // (width + value_width) if rest > 0 and rest % (width + value_width) == 0 else None
        if kv_heads != heads:  # the map may make more than q, k and v
            kv_heads = _heads_of_value(branch, roles) or kv_heads
    facts: Facts = {"heads": heads, "head_width": width, "value_width": value_width}
    return facts | ({"kv_heads": kv_heads} if kv_heads else {})


def _heads_of_value(branch: FoundBranch, roles: Mapping[Op, tuple[str, ...]]) -> int | None:
    """The heads of v, by the features of one fused map that are moved to it; None where they are changed."""
    maps = [op for op in branch.mixers if roles.get(op) == ("q", "k", "v")]
    value = branch.attentions[0].value
    moved = features(maps[0].outputs[0]).get(value) if len(maps) == len(branch.attentions) == 1 else None
    return None if moved is None else len(moved.unique()) // value.shape[-1]


def _features(value: Value) -> int:
    """Entries of the axes before the last that count features: the heads."""
    axes = range(len(value.shape) - 1)
    sizes = [n for i in axes for what, n in value.axes[i] if what == "feature"]
    return math.prod(sizes)


def _window(a: Attention, branch: FoundBranch, modules: Mapping[str, nn.Module]) -> Facts:
    """The tokens that a query sees; a window longer than the batch is read from the module that runs it."""
    reach, size = a.probabilities.reach, a.probabilities.shape[-1]
    if reach is None or branch.kind != "attention":
        return {}
    back, ahead = reach
    own: Facts = {"own_key": ahead >= 0}
    causal = a.probabilities.causal
    if back >= size - 1 and (causal or ahead < 0 or ahead >= size - 1):
        op = a.probabilities.op
        module = modules.get(op.call.path) if op is not None else None
        given = vars(module).items() if module is not None else ()
        longer = [v for name, v in given if "window" in name and type(v) is int and v >= size]
        return own | {"window": longer[0] if longer else None}
    return own | {"window": back + 1 if causal else back + ahead + 1}


def _qk_norm(ways: Sequence[Way], a: Attention) -> Facts:
    if not ways:
        return {}
    if not all(way.norms for way in ways):
        return {"qk_norm": None}
    norms = [way.norms[-1] for way in ways]
    if any(norm.kind == "l2norm" for norm in norms):
        return {"qk_norm": "cosine"}
    is_full = [_is_wider(way.norms[-1].input, a.query.shape[-1]) for way in ways]
    return {
        "qk_norm": "full" if any(is_full) else "head",
        "qk_norm_kind": _one_of({norm.kind for norm in norms}),
        "qk_norm_eps": _one_of({norm.eps for norm in norms if norm.eps is not None}),
        "qk_norm_gain": all(norm.weight is not None for norm in norms),
        "qk_norm_offset": _one_of({norm.weight_offset for norm in norms}),
    }


def _keeps_rotation(norming: Facts) -> bool:
    """Whether a norm gives the same before a rotation: it divides by the size alone, or there is none."""
    if norming["qk_norm"] not in ("head", "full"):
        return True
    return norming["qk_norm_kind"] != "layernorm" and not norming["qk_norm_gain"]


def _is_wider(normed: Value, head: int) -> bool:
    """Whether the features of several heads are one axis."""
    return normed.shape[-1] > head and counted(normed, [-1]) == {"feature"}


def _one_of(values: set[Any]) -> Any:
    """The value, or a sorted list of several."""
    return next(iter(values)) if len(values) == 1 else sorted(values)


def _positions(way: Way | None, logits: Facts, replay: Replay) -> Facts:
    """Positions inside of the attention: rotary with layout and base, or a bias on the logits; empty where
    one of the two cannot be read.
    """
    try:
        turned = rotary_facts(way, replay) if way is not None else {}
    except CannotReplay:
        return {}
    if "attention_positions" not in logits:
        return {}
    kinds = ["rotary"] if turned else []
    if (bias := logits["attention_positions"]) is not None:
        kinds.append(bias)
    return turned | {"attention_positions": " and ".join(kinds) or None}
