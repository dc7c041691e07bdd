"""How one token goes through each ATen op: what to run for its slice alone.

A rule writes the op for the token's slice on the tape and says where in the outputs the token is. An op
without a rule loses the token; only where what it makes is needed later does that matter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from normscope.probes._token_tape import Slot, Tape, Track, Unfollowed, after_view, joined

POINTWISE = frozenset(
    {"add", "sub", "rsub", "mul", "div", "neg", "pow", "rsqrt", "sqrt", "exp", "exp2"}
    | {"expm1", "log", "log1p", "log2", "sin", "cos", "tanh", "sigmoid", "erf", "abs", "sign"}
    | {"reciprocal", "square", "gelu", "silu", "relu", "elu", "celu", "leaky_relu"}
    | {"softplus", "hardtanh", "hardswish", "hardsigmoid", "mish", "threshold", "clamp"}
    | {"clamp_min", "clamp_max", "maximum", "minimum", "where", "masked_fill", "addcmul"}
    | {"addcdiv", "lerp", "nan_to_num", "atan", "asinh", "floor", "ceil", "round", "eq", "ne"}
    | {"lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and"}
    | {"bitwise_or", "bitwise_not", "isnan", "isinf", "_to_copy", "clone", "alias", "detach"}
    | {"lift_fresh"}
)
ZEROS_CUT = frozenset({"_softmax", "_safe_softmax", "exp", "sigmoid", "relu"})
"""Where one of these gives an exact zero its derivative is zero too."""

REDUCTIONS = frozenset(
    {"sum", "mean", "var", "std", "var_mean", "amax", "amin", "linalg_vector_norm", "norm"}
    | {"prod", "logsumexp", "max", "min", "any", "all"}
)
ALONG = frozenset({"_softmax", "_safe_softmax", "_log_softmax", "cumsum", "sort", "topk", "flip"})
"""Ops along axes that keep every axis."""

VIEWS = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias"})
SPLITS = frozenset({"split", "split_with_sizes", "chunk"})


@dataclass
class OpCall:
    """One op of the forward, and what its tensors have of the token.

    Attributes:
        func: the op, out of place.
        base: its name.
        args: its arguments, by name.
        results: the tensors it gave.
        tracks: `id` of an argument → what it has of the token.
    """

    func: Any
    base: str
    args: dict[str, Any]
    results: list[Tensor]
    tracks: Mapping[int, Track]
    tape: Tape

    def track(self, value: Any) -> Track | None:
        """What `value` has of the token."""
        return self.tracks.get(id(value))

    def only(self) -> tuple[Tensor, Track]:
        """The one argument that has the token."""
        found = [t for t in tree_leaves(self.args) if isinstance(t, Tensor) and self.track(t)]
        if len(found) != 1:
            raise Unfollowed(f"{self.base} reads the token {len(found)} times")
        track = self.track(found[0])
        assert track is not None
        return found[0], track

    def again(self, change: Callable[[Tensor], Any], **changed: Any) -> Slot:
        """Write the op with slots for the tensors that have the token, and `change` for the others."""

        def tensor(value: Tensor) -> Any:
            track = self.track(value)
            return change(value) if track is None else track.slot

        named = {name: tree_map_only(Tensor, tensor, x) for name, x in (self.args | changed).items()}
        return call(self.tape, self.func, named)

    def parts(self, slot: Slot) -> list[Slot]:
        """A slot for each output."""
        return [self.tape.append(_item(slot, i)) for i in range(len(self.results))]


def _item(slot: Slot, i: int) -> Callable[[list[Any]], Any]:
    return lambda values: values[slot.number][i]


def call(tape: Tape, func: Any, named: Mapping[str, Any]) -> Slot:
    """Write a call of an op by the names of its schema."""
    schema = func._schema.arguments
    args = [named[a.name] for a in schema if not a.kwarg_only and a.name in named]
    return tape.call(
        func, *args, **{a.name: named[a.name] for a in schema if a.kwarg_only and a.name in named}
    )


def at_token(const: Tensor, track: Track, ndim: int, token: int) -> Tensor:
    """What a tensor without the token holds for it, where it broadcasts to the `ndim` axes of `track`.

    Copied: it is small, and the model may write over the whole.
    """
    own = track.axis - (ndim - const.dim())
    if own < 0 or const.shape[own] == 1:
        return const
    return const.narrow(own, token * track.width, track.width).clone()


def pointwise(op: OpCall) -> list[Track]:
    """Broadcasting ops: tokens are on the same axis, counted from the end."""
    ndim = op.results[0].dim()
    tensors = [t for t in tree_leaves(op.args) if isinstance(t, Tensor)]
    tracks = [(t, track) for t in tensors if (track := op.track(t)) is not None]
    moved = [track.moved(lambda axis, t=t: axis + ndim - t.dim()) for t, track in tracks]  # type: ignore[misc]
    first = moved[0]
    if any((track.axis, track.width) != (first.axis, first.width) for track in moved):
        raise Unfollowed(f"{op.base} lets tokens meet one another")
    _require_whole(op, first)
    slot = op.again(lambda const: at_token(const, first, ndim, op.tape.token))
    with_keys = [track for track in moved if track.keys is not None]
    if len({track.keys for track in with_keys}) > 1:
        raise Unfollowed(f"{op.base} lets keys meet one another")
    out = replace((with_keys or moved)[0], slot=slot, reached=joined(track.reached for track in moved))
    if with_keys:
        reached = [track.keys_reached for track in with_keys if track.keys_reached is not None]
        out = replace(out, keys_reached=joined(reached))
    return [replace(out, zeros_cut=op.base in ZEROS_CUT or any(track.zeros_cut for track in moved))]


def reduction(op: OpCall) -> list[Track]:
    """Sums and the like over axes that are not tokens."""
    tensor, track = op.only()
    dims = _dims(op.args.get("dim"), tensor.dim())
    if not dims or track.axis in dims:
        raise Unfollowed(f"{op.base} runs over the tokens")
    if track.keys in dims:
        track = replace(track, keys=None, keys_reached=None, zeros_cut=False)
    if not op.args.get("keepdim", False):
        track = track.moved(lambda axis: axis - sum(dim < axis for dim in dims))
    return _same(op, track)


def along(op: OpCall) -> list[Track]:
    """Softmax and the like along axes that are not tokens."""
    tensor, track = op.only()
    dims = _dims(op.args.get("dim", op.args.get("dims", -1)), tensor.dim())
    if track.axis in dims or (track.keys in dims and op.base not in ZEROS_CUT):
        raise Unfollowed(f"{op.base} runs over the tokens")
    return _same(op, replace(track, zeros_cut=op.base in ZEROS_CUT or track.zeros_cut))


def layer_norm(op: OpCall) -> list[Track]:
    """LayerNorm and RMSNorm over trailing axes."""
    tensor, track = op.only()
    if track.axis >= tensor.dim() - len(op.args["normalized_shape"]):
        raise Unfollowed(f"{op.base} runs over the tokens")
    return _same(op, track)


def batch_norm(op: OpCall) -> list[Track]:
    """BatchNorm with running statistics: a factor for each channel."""
    _, track = op.only()
    if op.args.get("training", False) or track.axis == 1:
        raise Unfollowed(f"{op.base} runs over the tokens")
    return _same(op, track)


def view(op: OpCall) -> list[Track]:
    """Views by size: the token's slice takes the same with one token."""
    tensor, track = op.only()
    shape = op.results[0].shape
    if "size" not in op.args and "shape" not in op.args:
        raise Unfollowed("a view as another dtype")
    track = after_view(tensor.shape, track, shape)
    slot = op.tape.call(torch.reshape, track.slot, _of_one(shape, track))
    return [replace(track, slot=slot)]


def expand(op: OpCall) -> list[Track]:
    """Repeats along axes that are not tokens."""
    tensor, track = op.only()
    shape = op.results[0].shape
    track = track.moved(lambda axis: axis + len(shape) - tensor.dim())
    _require_whole(op, track)
    slot = op.tape.call(torch.Tensor.expand, track.slot, _of_one(shape, track))
    return [replace(track, slot=slot)]


def copy(op: OpCall) -> list[Track]:
    """A tensor written over another, whose values do not matter."""
    source, out = op.args["src"], op.results[0]
    track = op.track(source)
    if track is None:
        raise Unfollowed("copy writes other tensors over the token")
    track = track.moved(lambda axis: axis + out.dim() - source.dim())
    _require_whole(op, track)
    shape = _of_one(out.shape, track)
    return [replace(track, slot=op.tape.call(lambda x: x.expand(shape).to(out.dtype), track.slot))]


def repeat(op: OpCall) -> list[Track]:
    """Copies along axes that are not tokens."""
    tensor, track = op.only()
    repeats = op.args["repeats"]
    track = track.moved(lambda axis: axis + len(repeats) - tensor.dim())
    if repeats[track.axis] != 1 or (track.keys is not None and repeats[track.keys] != 1):
        raise Unfollowed("repeat repeats the token")
    return _same(op, track)


def permute(op: OpCall) -> list[Track]:
    """Axes in another order."""
    tensor, track = op.only()
    order = list(range(tensor.dim()))
    if op.base == "permute":
        order = [dim % tensor.dim() for dim in op.args["dims"]]
    elif tensor.dim() > 1:
        a, b = (op.args["dim0"], op.args["dim1"]) if op.base == "transpose" else (-2, -1)
        order[a], order[b] = order[b], order[a]
    return _same(op, track.moved(order.index))


def unsqueeze(op: OpCall) -> list[Track]:
    """A new axis of size 1."""
    _, track = op.only()
    dim = op.args["dim"] % op.results[0].dim()
    return _same(op, track.moved(lambda axis: axis + (axis >= dim)))


def squeeze(op: OpCall) -> list[Track]:
    """Without axes of size 1; the token's stays."""
    tensor, track = op.only()
    dims = _dims(op.args.get("dim"), tensor.dim()) or list(range(tensor.dim()))
    gone = [dim for dim in dims if tensor.shape[dim] == 1 and dim != track.axis]
    if track.axis in dims and tensor.shape[track.axis] == 1:
        raise Unfollowed("squeeze takes away the axis of tokens")
    slot = op.tape.call(torch.squeeze, track.slot, tuple(gone))
    track = track.moved(lambda axis: axis - sum(dim < axis for dim in gone))
    return [replace(track, slot=slot)]


def part(op: OpCall) -> list[Track]:
    """Slices along axes that are not tokens, and slices that leave the tensor as it is."""
    tensor, track = op.only()
    if op.base != "index_select" and op.results[0].shape == tensor.shape:
        return [track]
    if op.args.get("dim", 0) % tensor.dim() in (track.axis, track.keys):
        raise Unfollowed(f"{op.base} takes some tokens out")
    return _same(op, track)


def index(op: OpCall) -> list[Track]:
    """Entries of one axis that is not tokens, by a list of indices."""
    _, track = op.only()
    axes = [axis for axis, each in enumerate(op.args["indices"]) if each is not None]
    if len(axes) != 1 or axes[0] in (track.axis, track.keys) or op.args["indices"][axes[0]].dim() != 1:
        raise Unfollowed("index takes some tokens out")
    return _same(op, track)


def select(op: OpCall) -> list[Track]:
    """One entry, or each, of an axis that is not tokens."""
    tensor, track = op.only()
    dim = op.args.get("dim", 0) % tensor.dim()
    if dim in (track.axis, track.keys):
        raise Unfollowed(f"{op.base} takes single tokens out")
    return _same(op, track.moved(lambda axis: axis - (axis > dim)))


def cat(op: OpCall) -> list[Track]:
    """Side by side along an axis that is not tokens; `stack` makes a new one."""
    tensors = [t for t in op.args["tensors"] if t.shape != (0,)]  # an empty cache is put before keys
    tracks = [track for tensor in tensors if (track := op.track(tensor)) is not None]
    first, new = tracks[0], op.base == "stack"
    if len(tensors) == 1 and not new:
        return [first]
    dim = op.args.get("dim", 0) % op.results[0].dim()
    if len({(track.axis, track.keys, track.width) for track in tracks}) > 1:
        raise Unfollowed(f"{op.base} lets tokens meet one another")
    if not new and dim in (first.axis, first.keys):
        raise Unfollowed(f"{op.base} puts other tokens beside the token's")
    slot = op.again(lambda const: at_token(const, first, const.dim(), op.tape.token), tensors=tensors)
    moved = first.moved(lambda axis: axis + (new and axis >= dim))
    return [replace(moved, slot=slot, reached=joined(track.reached for track in tracks))]


def as_complex(op: OpCall) -> list[Track]:
    """Pairs of reals as complex numbers, and back: the last axis comes or goes."""
    _, track = op.only()
    return _same(op, track)


def _same(op: OpCall, track: Track) -> list[Track]:
    """The op itself on the token's slice."""
    slot = op.again(lambda const: const)
    slots = [slot] if len(op.results) == 1 and not _gives_tuple(op.func) else op.parts(slot)
    return [replace(track, slot=each) for each in slots]


def _gives_tuple(func: Any) -> bool:
    returns = func._schema.returns
    return len(returns) > 1 or "List" in str(returns[0].type)


def _dims(dim: Any, ndim: int) -> list[int]:
    if dim is None:
        return []
    return [d % ndim for d in ([dim] if isinstance(dim, int) else dim)]


def _of_one(shape: torch.Size, track: Track) -> list[int]:
    """`shape` with one token."""
    return [*shape[: track.axis], track.width, *shape[track.axis + 1 :]]


def _require_whole(op: OpCall, track: Track) -> None:
    if op.results[0].shape[track.axis] != track.tokens * track.width:
        raise Unfollowed(f"{op.base} repeats the token")


RULES: dict[str, Callable[[OpCall], list[Track]]] = {
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(ALONG, along),
    **dict.fromkeys(VIEWS, view),
    **dict.fromkeys(SPLITS | {"slice", "index_select"}, part),
    **dict.fromkeys(("permute", "transpose", "t", "mT"), permute),
    **dict.fromkeys(("select", "unbind"), select),
    **dict.fromkeys(("cat", "stack"), cat),
    **dict.fromkeys(("view_as_complex", "view_as_real"), as_complex),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm"), layer_norm),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit_no_training"), batch_norm),
    "copy": copy,
    "expand": expand,
    "index": index,
    "repeat": repeat,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
}
