"""The way of one token through a forward, written on a tape that can be run again for that token alone.

A forward of the whole sequence runs once, and every ATen op that a token's entry reaches is written down with
what it reads of the other tokens: their keys and values, the token's row of a mask or of the rotary angles.
Running the tape then costs 1/T of a forward, and its derivative is ∂(token out)/∂(token in) with the other
tokens' entries fixed. Because the ops are those below Python, no module's arguments need to be understood.

    T tokens, t the token, S keys
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

Step = Callable[[list[Any]], Any]


class Unfollowed(Exception):
    """The token cannot be followed through an op; the message says why."""


@dataclass(frozen=True)
class Slot:
    """A value of the tape, in the place of a tensor."""

    number: int


@dataclass(frozen=True, eq=False)
class Track:
    """What a tensor of the forward has of the token.

    Attributes:
        slot: the token's slice of it on the tape, with size `width` along `axis`.
        axis: its axis of tokens.
        reached: (T,) bool, the tokens whose slices depend on the token's entry; itself is one.
        keys: of attention logits and weights, the axis of the tokens that are read; None elsewhere.
        keys_reached: (S,) bool, which of those depend on the token's entry.
        zeros_cut: whether an exact zero says that nothing passes: after a softmax, not before.
        width: how many entries of that axis a token has: n where n streams are folded into it.
    """

    slot: Slot
    axis: int
    reached: Tensor
    keys: int | None = None
    keys_reached: Tensor | None = None
    zeros_cut: bool = False
    width: int = 1

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.reached)

    def moved(self, where: Callable[[int], int]) -> "Track":
        """The same with its axes moved."""
        return replace(self, axis=where(self.axis), keys=None if self.keys is None else where(self.keys))


@dataclass(frozen=True)
class Lost:
    """A tensor that depends on the token in a way that cannot be followed."""

    reason: str


class Tape:
    """f_t: the slice of token t at an entry → its slice at an exit, the other tokens fixed.

    Args:
        token: t.
    """

    def __init__(self, token: int) -> None:
        self.token = token
        self.output = Slot(0)
        self._steps: list[Step] = []

    def append(self, step: Step) -> Slot:
        """Write one step, a function of all values up to now."""
        self._steps.append(step)
        return Slot(len(self._steps))

    def call(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Slot:
        """Write a call of `func`; slots in its arguments stand for values of the tape."""

        def step(values: list[Any]) -> Any:
            return func(*_filled(args, values), **_filled(kwargs, values))

        return self.append(step)

    def run(self, entry: Tensor) -> Tensor:
        """The token's slice at the exit."""
        values: list[Any] = [entry]
        for step in self._steps:
            values.append(step(values))
        return values[self.output.number]


def _filled(arguments: Any, values: list[Any]) -> Any:
    return tree_map_only(Slot, lambda slot: values[slot.number], arguments)


@dataclass
class _Storage:
    """Memory that the token has reached; the weak handle keeps its address from being given away."""

    keep: StorageWeakRef
    views: dict[Any, Track | Lost] = field(default_factory=dict)


class Tracks:
    """Which tensors of the forward the token has reached, by memory and geometry: that survives `.data` and
    the view wrapping of autograd."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}

    def of(self, tensor: Tensor) -> Track | Lost | None:
        """What `tensor` has of the token; None where nothing."""
        if not self._storages or tensor.layout is not torch.strided:
            return None
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is None or not storage.views:
            return None
        return storage.views.get(_geometry(tensor), Lost("memory that the token has reached is read anew"))

    def bind(self, tensor: Tensor, track: Track | Lost) -> None:
        """`tensor` has this of the token."""
        self._storage(tensor).views[_geometry(tensor)] = track

    def overwrite(self, tensor: Tensor, track: Track | Lost | None) -> None:
        """`tensor` was written in place; what else looks at its memory is stale."""
        if track is None and tensor.untyped_storage()._cdata not in self._storages:
            return
        storage = self._storage(tensor)
        stale = Lost("memory is written in place under another view of it")
        whole = tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
        if track is None and whole:
            storage.views.clear()
            return
        for geometry in storage.views:
            storage.views[geometry] = stale
        storage.views[_geometry(tensor)] = stale if track is None else track

    def _storage(self, tensor: Tensor) -> _Storage:
        memory = tensor.untyped_storage()
        if memory._cdata not in self._storages:
            self._storages[memory._cdata] = _Storage(StorageWeakRef(memory))
        return self._storages[memory._cdata]


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def joined(reached: Iterable[Tensor]) -> Tensor:
    """Tokens that are in any of the sets."""
    return torch.stack(list(reached)).any(0)


def after_view(shape: torch.Size, track: Track, viewed: torch.Size) -> Track:
    """Where a token is after a view: on the axis with as much before it, and in as many elements in a row.

    Raises:
        Unfollowed: where the view folds the tokens into what is before them.
    """
    before = math.prod(shape[: track.axis])
    elements = track.width * math.prod(shape[track.axis + 1 :])
    for axis, size in enumerate(viewed):
        width, rest = divmod(size, track.tokens)
        behind = math.prod(viewed[axis + 1 :])
        if not rest and math.prod(viewed[:axis]) == before and width * behind == elements:
            keys = None if track.keys is None else _kept_axis(shape, track.keys, viewed)
            return replace(track, axis=axis, keys=keys, width=width)
    raise Unfollowed(f"a view of {tuple(shape)} as {tuple(viewed)} folds the tokens into another axis")


def _kept_axis(shape: torch.Size, axis: int, viewed: torch.Size) -> int:
    """Where an axis is after a view that keeps it."""
    around = (math.prod(shape[:axis]), math.prod(shape[axis + 1 :]))
    for new, size in enumerate(viewed):
        if size == shape[axis] and (math.prod(viewed[:new]), math.prod(viewed[new + 1 :])) == around:
            return new
    raise Unfollowed(f"a view of {tuple(shape)} as {tuple(viewed)} folds the keys into another axis")
