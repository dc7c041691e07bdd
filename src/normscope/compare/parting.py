"""The first place where two walks part, and by how much.

Two tensors agree where their relative difference is within the tolerance, 64 times the rounding that was
measured: how far the tensor moves where every parameter moves by its last bit. The stream decides. Inside of
a branch whose sum parts, the search goes back from the sum to the first tensor that parts although all that
it is made of agrees.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normscope.compare.holdings import Holdings
from normscope.compare.keys import OUTPUT, OUTSIDE, WEIGHT, Key
from normscope.compare.reasons.scene import real_rows
from normscope.compare.rows import Rows
from normscope.compare.types import Step

MASKED = -1e4
"""Largest logit of a key that is masked."""
ROUNDINGS = 64
"""Tolerance, in measured roundings."""
FLOOR = ROUNDINGS * 2.0**-52
_ENDS = ("sum", "exit")
RANDOM = 1e-6
"""Rounding from which on a model is taken for random."""

_MADE_OF: Mapping[str, tuple[str, ...]] = {
    "sum": ("output", "entry"),
    "output": ("norm out", "o", "down"),
    "norm out": ("norm out in",),
    "norm out in": ("o", "down"),
    "o": ("mixed",),
    "mixed": ("probabilities", "value"),
    "probabilities": ("logits",),
    "logits": ("query", "key"),
    "query": ("q",),
    "key": ("k",),
    "value": ("v",),
    "q": ("norm in",),
    "k": ("norm in",),
    "v": ("norm in",),
    "down": ("act",),
    "act": ("gate", "up"),
    "gate": ("norm in",),
    "up": ("norm in",),
    "norm in": ("norm in in",),
    "norm in in": ("entry",),
    "norm stream": ("norm stream in",),
    "norm stream in": ("sum",),
    "exit": ("norm stream", "sum"),
    OUTPUT: ("hidden",),
    "hidden": ("final norm",),
    "final norm": ("final norm in",),
}
"""Tensor → what it is made of, nearest first."""


@dataclass(frozen=True)
class Compared:
    """A tensor of both walks.

    Attributes:
        a, b: the steps; None where a side lacks it.
        relative, gradient: relative differences of value and gradient; None where they cannot be compared.
        tolerance, gradient_tolerance: the largest that count as rounding.
    """

    a: Step | None
    b: Step | None
    relative: float | None
    gradient: float | None
    tolerance: float
    gradient_tolerance: float

    @property
    def parts(self) -> bool:
        """Whether the values differ."""
        return self.relative is not None and self.relative > self.tolerance

    @property
    def gradient_parts(self) -> bool:
        """Whether the gradients differ."""
        return self.gradient is not None and self.gradient > self.gradient_tolerance

    @property
    def key(self) -> Key:
        """The key in A, else in B."""
        step = self.a or self.b
        assert step is not None
        return step.key


@dataclass(frozen=True)
class Walked:
    """Both walks, tensor by tensor, in the order of A's forward.

    Attributes:
        pairs: all tensors that at least one side has.
        slots_a, slots_b: see `Holdings.norms`.
    """

    pairs: tuple[Compared, ...]
    slots_a: Mapping[Key, str] = field(default_factory=dict)
    slots_b: Mapping[Key, str] = field(default_factory=dict)

    def stream(self) -> Iterator[Compared]:
        """The tensors of the stream, in order: entries, sums, exits, final norms and the output."""
        names = ("entry", "sum", "exit", "final norm", "hidden", OUTPUT)
        return (each for each in self.pairs if each.key[3] in names)

    @property
    def first(self) -> Compared | None:
        """The first place where the streams part: inside of a branch, the tensor where it begins."""
        found = next((each for each in self._deciding() if each.parts), None)
        return None if found is None else self.origin(found)

    def _deciding(self) -> list[Compared]:
        """The tensors of the stream that decide: no sum or exit that parts where what comes next agrees.

        One side may add a bias after the sum.
        """
        stream = [each for each in self.stream() if each.relative is not None]
        decide = []
        for n, each in enumerate(stream):
            after = (e for e in stream[n + 1 :] if e.key[0] == each.key[0] and e.key[3] not in _ENDS)
            reader = next(after, None) if each.key[3] in _ENDS and each.parts else None
            if reader is None or reader.parts:
                decide.append(each)
        return decide

    def origin(self, parted: Compared) -> Compared:
        """The tensor at which the difference of `parted` begins."""
        around = {self._name(each): each for each in self.pairs if each.key[:3] == parted.key[:3]}
        name = self._name(parted)
        if name == "exit":
            s, b, _ = parted.key[:3]
            block = [e for e in self.pairs if e.key[:2] == (s, b) and e.key[3] == "sum" and e.parts]
            return self.origin(block[0]) if block else parted
        here, current = parted, name
        seen: set[str] = set()
        while current not in seen:
            seen.add(current)
            below = self._parted_below(current, around)
            if below is None:
                return here
            current, here = below, around[below]
        return here

    def _parted_below(self, name: str, around: Mapping[str, Compared]) -> str | None:
        """Tensors that `name` is made of and that part as well; through what cannot be compared."""
        queue, seen = list(_MADE_OF.get(name, ())), set()
        while queue:
            each = queue.pop(0)
            if each in seen:
                continue
            seen.add(each)
            found = around.get(each)
            if found is not None and found.parts and each != "entry":
                return each
            if found is None or found.relative is None:
                queue += _MADE_OF.get(each, ())
        return None

    def _name(self, each: Compared) -> str:
        """The name by which `_MADE_OF` knows a tensor: norms by their slot."""
        name = each.key[3]
        if not name.startswith("norm "):
            return name
        base = name.removesuffix(" in")
        step, slots = (each.a, self.slots_a) if each.a is not None else (each.b, self.slots_b)
        assert step is not None
        slot = slots.get((*step.key[:3], base), "in")
        return f"norm {slot} in" if name.endswith(" in") else f"norm {slot}"

    @property
    def first_gradient(self) -> Compared | None:
        """The first place, on the way back, where the gradients of the stream part."""
        return next((each for each in reversed(list(self.stream())) if each.gradient_parts), None)

    @property
    def largest(self) -> float:
        """The largest relative difference on the stream."""
        return max((each.relative or 0.0 for each in self._deciding()), default=0.0)

    @property
    def largest_gradient(self) -> float:
        """The largest relative difference of the stream's gradients."""
        return max((each.gradient for each in self.stream() if each.gradient is not None), default=0.0)

    @property
    def tolerance(self) -> float:
        """The tolerance at the end of the stream."""
        return max((each.tolerance for each in self.pairs), default=FLOOR)


def walked(
    a: Sequence[Step],
    b: Sequence[Step],
    holdings_a: Holdings,
    holdings_b: Holdings,
    rows: Rows,
    noise: Mapping[Key, tuple[float, float]],
    rtol: float | None = None,
    real: Tensor | None = None,
) -> Walked:
    """Compare two walks.

    Args:
        noise: key in A → rounding of value and gradient, see `noise_of`.
        rtol: tolerance instead of the measured one.
        real: (B, T), true at the tokens that count.
    """
    to_b, by_b = rows.to_b, {step.key: step for step in b}
    slots_a, slots_b = holdings_a.norms, holdings_b.norms
    by_slot = {(*key[:3], f"norm {slot}"): key for key, slot in slots_b.items()}
    pairs: list[Compared] = []
    matched: set[Key] = set()
    # A gradient that is zero but for rounding, as of a key's bias, says nothing on the others.
    worst, worst_gradient = 0.0, max((g for _, g in noise.values() if g < RANDOM), default=0.0)
    for step in a:
        worst = max(worst, noise.get(step.key, (0.0, 0.0))[0])
        at = to_b.get(step.key[:3])
        key: Key | None = None if at is None else (*at, step.key[3])
        if key is not None and step.key[3].startswith("norm "):
            base = step.key[3].removesuffix(" in")
            slot = slots_a.get((*step.key[:3], base))
            found = by_slot.get((*key[:3], f"norm {slot}"))
            key = None if found is None else found
            if key is not None and step.key[3].endswith(" in"):
                key = (*key[:3], f"{key[3]} in")
        other = None if key is None else by_b.get(key)
        if step.key[3].startswith(WEIGHT):
            continue
        if other is not None:
            matched.add(other.key)
        tolerance = max(FLOOR, ROUNDINGS * worst) if rtol is None else rtol
        gradient_tolerance = max(FLOOR, ROUNDINGS * worst_gradient) if rtol is None else rtol
        if noise.get(step.key, (0.0, 0.0))[1] >= RANDOM:
            gradient_tolerance = math.inf
        pairs.append(
            Compared(
                step,
                other,
                None if other is None else relative(step.value, other.value, step.key[3], real),
                None if other is None else relative(step.gradient, other.gradient, "", real),
                tolerance,
                gradient_tolerance,
            )
        )
    for step in b:
        if step.key not in matched and not step.key[3].startswith(WEIGHT):
            pairs.append(Compared(None, step, None, None, FLOOR, FLOOR))
    return Walked(tuple(pairs), slots_a, slots_b)


def noise_of(
    steps: Sequence[Step], shaken: Sequence[Step], real: Tensor | None
) -> dict[Key, tuple[float, float]]:
    """Rounding of value and gradient of each step: how far a walk with shaken weights is off."""
    others = {step.key: step for step in shaken}
    found = {}
    for step in steps:
        other = others.get(step.key)
        if other is not None:
            value = relative(step.value, other.value, step.key[3], real)
            gradient = relative(step.gradient, other.gradient, "", real)
            found[step.key] = (value or 0.0, gradient or 0.0)
    return found


def relative(a: Tensor | None, b: Tensor | None, name: str, real: Tensor | None = None) -> float | None:
    """max|a − b| / max(|a|, |b|); None where the two cannot be compared.

    Of queries and keys a common factor does not count, of logits what the mask hides and a number for each
    row. Of outputs the shared columns count.
    """
    if a is None or b is None:
        return None
    if name == OUTPUT and a.ndim == b.ndim and a.shape[:-1] == b.shape[:-1] and a.shape != b.shape:
        columns = min(a.shape[-1], b.shape[-1])
        a, b = a[..., :columns], b[..., :columns]
    if a.shape != b.shape:
        if a.numel() != b.numel():
            return None
        b = b.reshape(a.shape)
    a, b = real_rows(a, real), real_rows(b, real)
    if a.numel() == 0:
        return None
    if name == "logits":
        hidden = (a < MASKED) | (b < MASKED) | a.isnan() | b.isnan()
        if bool(((a < MASKED) != (b < MASKED)).any()):
            return None  # the probabilities decide
        low = torch.finfo(a.dtype).min
        a, b = (each.masked_fill(hidden, low) for each in (a, b))
        a, b = ((each - each.amax(-1, keepdim=True)).masked_fill(hidden, 0.0) for each in (a, b))
    if name in ("query", "key"):
        square = float((b * b).sum())
        b = b * (float((a * b).sum()) / square) if square > 0 else b
    both = a.isfinite() & b.isfinite()
    if not bool(both.all()):
        same = (a == b) | (a.isnan() & b.isnan()) | both
        if not bool(same.all()):
            return 1.0
        a, b = a[both], b[both]
        if a.numel() == 0:
            return 0.0
    largest = max(float(a.abs().max()), float(b.abs().max()))
    return float((a - b).abs().max()) / largest if largest > 0 else 0.0


def outside(key: Key) -> bool:
    """Whether a step lies outside of the blocks."""
    return key[1] == OUTSIDE
