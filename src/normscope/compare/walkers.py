"""Walkers: the two sides of the function part with one batch, and the names of their places."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from normscope.compare.feed import Fed, shortened, with_decoder_ids
from normscope.compare.keys import OUTSIDE
from normscope.compare.side import Side
from normscope.compare.twins import Opened, feed_twin, reopen_twin, walk_twin
from normscope.compare.types import Patch, Step


class CannotFeedError(Exception):
    """The two models take inputs of which none can be made for both; the text says why."""


@dataclass
class Walker:
    """One side with its batch and its weights."""

    side: Side
    opened: Opened
    parts: Mapping[str, Tensor]
    real: Tensor | None
    columns: int | None = None
    weights: Mapping[str, Tensor] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of a sequence, or pixels of an image; the least of several inputs."""
        sizes = (t.shape[1] if t.ndim == 3 else t[0].numel() for t in self.parts.values() if t.ndim > 1)
        return min(sizes, default=0)

    def walk(self, patches: tuple[Patch, ...] = (), *, own: bool = False, **options: Any) -> tuple[Step, ...]:
        """One forward; with `own` weights instead of those of `weights`."""
        weights = None if own else self.weights
        steps: tuple[Step, ...] = self.side.run(
            walk_twin, self.parts, weights, patches, {"real": self.real, "columns": self.columns, **options}
        )
        return steps

    def site(self, step: Step | None) -> str | None:
        """Name of the place of a step; None without one."""
        if step is None:
            return None
        is_norm = step.key[1] == OUTSIDE and step.key[0] != OUTSIDE
        return step.site if is_norm else self.site_at(step.key[:3])

    def site_at(self, at: tuple[int, int, int]) -> str:
        """Name of a branch, a block or a stack; "" is the model."""
        s, i, n = at
        if s == OUTSIDE:
            return ""
        stack = self.opened.holdings.anatomy.stacks[s]
        if i == OUTSIDE:
            return stack.name
        return stack.blocks[i].site if n == OUTSIDE else stack.blocks[i].branches[n].site


def fed(a: Side, b: Side, first: Opened, second: Opened) -> tuple[Walker, Walker, list[str]]:
    """Both sides with one batch, and notes on what was left out of it.

    Raises:
        CannotFeedError: their inputs are of different kinds or shapes.
    """
    notes: list[str] = []
    parts, others = first.parts, second.parts
    if ("floats" in first.parts) != ("floats" in second.parts):
        raise CannotFeedError("the inputs are of different kinds: one model reads ids, the other floats")
    rows = second.vocabulary or 0
    if (first.vocabulary or 0) > rows > 0 and _largest_id(parts) >= rows:
        parts, others = others, parts
    parts = shortened(with_decoder_ids(parts, others), others)
    both: list[Fed] = [side.run(feed_twin, parts) for side in (a, b)]
    for role in {role for each in both for role in each.left_out}:
        if role in ("mask", "decoder mask"):
            if not bool(parts[role].bool().all()):
                notes.append("One side takes no mask of padding: both were fed without padding.")
        else:
            notes.append(f'One side takes no "{role}".')
        parts = {name: tensor for name, tensor in parts.items() if name != role}
    if "floats" in parts and parts["floats"].shape != others.get("floats", parts["floats"]).shape:
        shapes = [" × ".join(map(str, each["floats"].shape)) for each in (first.parts, second.parts)]
        raise CannotFeedError(f"the inputs have different shapes: {shapes[0]} and {shapes[1]}")
    real = _real(parts)
    sizes = (first.vocabulary, second.vocabulary)
    columns = None if None in sizes or sizes[0] == sizes[1] else min(size or 0 for size in sizes)
    one, two = (_walker(side, opened, parts, real, columns) for side, opened in ((a, first), (b, second)))
    return one, two, notes


def _walker(
    side: Side, opened: Opened, parts: Mapping[str, Tensor], real: Tensor | None, columns: int | None
) -> Walker:
    """A walker, whose model is read again where its batch had tokens of another number."""
    own = {role: tensor.shape for role, tensor in opened.parts.items()}
    is_other = any(own.get(role, tensor.shape) != tensor.shape for role, tensor in parts.items())
    read = side.run(reopen_twin, opened, parts) if is_other else opened
    return Walker(side, read, parts, real, columns)


def _largest_id(parts: Mapping[str, Tensor]) -> int:
    ids = [parts[role] for role in ("ids", "decoder ids") if role in parts]
    return max((int(each.max()) for each in ids if each.numel()), default=-1)


def _real(parts: Mapping[str, Tensor]) -> Tensor | None:
    mask = parts.get("decoder mask") if "decoder ids" in parts else parts.get("mask")
    return None if mask is None or mask.ndim != 2 or bool(mask.bool().all()) else mask.bool()
