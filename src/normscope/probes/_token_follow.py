"""Follow one token through a forward of the whole sequence, from entries to exits, onto tapes."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normscope.anatomy import Site
from normscope.anatomy.calls import ModuleCalls
from normscope.anatomy.record import op_identity
from normscope.linalg.function import held_off
from normscope.probes._token_products import PRODUCTS
from normscope.probes._token_rules import RULES, OpCall
from normscope.probes._token_tape import Lost, Slot, Tape, Track, Tracks, Unfollowed
from normscope.subjects import Batch, call_model

Ends = tuple[Site, Site]
"""Entry and exit, as the forward names them."""

_RULES = {**RULES, **PRODUCTS}


@dataclass(frozen=True)
class TokenMap:
    """f_t of one part of the model.

    Attributes:
        tape: f_t itself.
        entry: the token's slice at the entry, with size 1 on the axis of tokens.
        exit: the same at the exit, as the forward of the whole sequence had it.
        axes: the axis of tokens at the entry and at the exit.
        tokens: T.
    """

    tape: Tape
    entry: Tensor
    exit: Tensor
    axes: tuple[int, int]
    tokens: int


def follow(
    model: nn.Module, batch: Batch, parts: list[Ends], *, token: int, tokens: int
) -> dict[Ends, TokenMap | str]:
    """The map of one token through each of `parts`, or why there is none. One forward.

    Args:
        model: the model; call it inside `measuring`.
        batch: one sequence.
        parts: entries and exits. They follow one another; where one begins before another ends, the other is
            not followed.
        token: its position in its stream, counted from the end where negative.
        tokens: how many tokens were fed: tells the axis of tokens where a stream has several.
    """
    follower = _Follower(model, parts, token, tokens)
    with held_off(list(model.parameters())), torch.enable_grad(), follower.calls.watching(), follower:
        call_model(model, batch)
    return {part: follower.found.get(part, "its entry or its exit did not come by") for part in parts}


@dataclass
class _Running:
    """The part that is being followed."""

    part: Ends
    tape: Tape
    entry: Tensor
    axis: int


class _Follower(TorchDispatchMode):
    """Counts ops as `capture` does, and writes those that the token reaches."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, parts: list[Ends], token: int, tokens: int) -> None:
        super().__init__()
        self.calls = ModuleCalls(model)
        self.found: dict[Ends, TokenMap | str] = {}
        self._token, self._tokens = token, tokens
        self._tracks = Tracks()
        self._running: _Running | None = None
        self._ends: dict[Any, list[tuple[Site, Ends]]] = defaultdict(list)
        for part in parts:
            for site in (part[1], part[0]):  # what ends here ends before what begins
                self._ends[site.module, site.call, site.op, site.nth].append((site, part))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, base, mutable = op_identity(func)
        call = self.calls.current
        ends = self._ends.get((call.path, call.nth, name, call.count(name)), ())
        inputs = _tensors((args, kwargs))
        for site, part in ends:
            if site.output < 0:
                self._at(site, part, inputs[-1 - site.output])
        result = func(*args, **kwargs)
        if base == "detach" and self._running is not None:
            result = result.clone()  # known by its memory, it would be the tensor that has a derivative
        if self._running is not None:
            self._write(func, base, mutable, args, kwargs, inputs, result)
        for site, part in ends:
            if site.output >= 0:
                self._at(site, part, tree_leaves(result)[site.output])
        return result

    def _at(self, site: Site, part: Ends, tensor: Tensor) -> None:
        if site is part[0]:
            self._begin(part, tensor)
        elif self._running is not None and self._running.part is part:
            self.found[part] = self._end(self._running, tensor)
            self._running = None

    def _begin(self, part: Ends, tensor: Tensor) -> None:
        if self._running is not None:
            self.found[self._running.part] = "another part begins before it ends"
        self._running, self._tracks = None, Tracks()
        axis = axis_of_tokens(tensor.shape, self._tokens)
        if isinstance(axis, str):
            self.found[part] = axis
            return
        length = tensor.shape[axis]
        if not -length <= self._token < length:
            self.found[part] = f"no token {self._token} among {length}"
            return
        t = self._token % length
        self._running = _Running(part, Tape(t), tensor.detach().narrow(axis, t, 1).clone(), axis)
        itself = torch.arange(length, device=tensor.device) == t
        self._tracks.bind(tensor, Track(Slot(0), axis, itself))

    def _end(self, running: _Running, tensor: Tensor) -> TokenMap | str:
        track = self._tracks.of(tensor)
        if not isinstance(track, Track):
            return track.reason if track else "no path leads from the entry to the exit"
        tape = running.tape
        tape.output = track.slot
        if track.width != 1:
            return "the axis of tokens is folded into another at the exit"
        seen = tensor.detach().narrow(track.axis, tape.token, 1).clone()
        return TokenMap(tape, running.entry, seen, (running.axis, track.axis), track.tokens)

    def _write(
        self, func: Any, base: str, mutable: bool, args: Any, kwargs: Any, inputs: list[Tensor], result: Any
    ) -> None:
        """What the op makes of the token."""
        tracks = {id(t): track for t in inputs if (track := self._tracks.of(t)) is not None}
        if base.endswith("_like") or base.startswith("new_"):
            return  # made after a tensor's shape, not from it
        results = _tensors(result)
        written = _written(func, args, kwargs) if mutable else []
        if not tracks:
            for tensor in written:
                self._tracks.overwrite(tensor, None)
            return
        found = self._followed(func, base, written, args, kwargs, results, tracks)
        bound = [] if written else results
        for tensor, new in zip(bound, found, strict=False):
            if tensor.is_floating_point() or tensor.is_complex():  # the derivative by way of others is zero
                self._tracks.bind(tensor, new)
        for tensor in written:
            self._tracks.overwrite(tensor, found[0])

    def _followed(
        self,
        func: Any,
        base: str,
        written: list[Tensor],
        args: Any,
        kwargs: Any,
        results: list[Tensor],
        tracks: Mapping[int, Track | Lost],
    ) -> list[Track | Lost]:
        """Tracks of the results, of what is written where it writes; all lost where it cannot be followed."""
        count = max(len(results), 1)
        lost = next((track for track in tracks.values() if isinstance(track, Lost)), None)
        if lost is not None:
            return [lost] * count
        assert self._running is not None
        try:
            if base not in _RULES:
                raise Unfollowed(f"no rule follows one token through {base}")
            known = {key: track for key, track in tracks.items() if isinstance(track, Track)}
            again = _out_of_place(func, written, base, known)
            op = OpCall(again, base, _named(func, args, kwargs), results, known, self._running.tape)
            found = _RULES[base](op)
        except Unfollowed as error:
            return [Lost(f"{self.calls.current.path or 'the model'}: {error}")] * count
        for tensor, track in zip(results, found, strict=True):
            assert tensor.shape[track.axis] == track.tokens * track.width, (base, tensor.shape, track)
        return [*found]


def _out_of_place(func: Any, written: list[Tensor], base: str, tracks: Mapping[int, Track]) -> Any:
    """The op that gives what an in-place op writes."""
    if not written:
        return func
    if len(written) > 1 or (id(written[0]) not in tracks and base != "copy"):
        raise Unfollowed(f"{base} writes into memory that the token had not reached")
    overload = getattr(getattr(torch.ops.aten, base, None), func._overloadname, None)
    if overload is None:
        raise Unfollowed(f"no rule follows one token through {base} in place")
    return overload


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that the op writes into."""
    named = _named(func, args, kwargs)
    writes = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return _tensors([named[name] for name in writes if name in named])


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by the names of the op's schema."""
    names = [a.name for a in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def axis_of_tokens(shape: torch.Size, tokens: int) -> int | str:
    """Which axis of a stream counts tokens, or why that is not known; features are on the last."""
    longer = [axis for axis, size in enumerate(shape[:-1]) if size > 1]
    if len(shape) < 2:
        return f"a stream of shape {tuple(shape)} has no axis of tokens"
    if len(longer) > 1:
        longer = [axis for axis in longer if shape[axis] == tokens]
        if len(longer) != 1:
            return f"which axis of a stream of shape {tuple(shape)} counts tokens is not known"
    return longer[0] if longer else len(shape) - 2
