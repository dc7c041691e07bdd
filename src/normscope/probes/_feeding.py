"""What the jacobian probe feeds: one sequence of the batch, cut along the axis that counts sequences."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, Site, Stack, capture, read_anatomy
from normscope.subjects import Batch, call_model
from normscope.subjects.memory import is_out_of_memory


@dataclass(frozen=True)
class Feed:
    """One sequence, and how the sites are called when it runs.

    Attributes:
        batch: the sequence.
        names: site of the anatomy → site in a forward of this batch. A batch of one takes other views than a
            batch of four, and sites count ops, so the model is read again.
        axis: which axis counted sequences; tokens are on the other of the first two.
        note: "B = 1", or why it is not.
    """

    batch: Batch
    names: Mapping[Site, Site]
    axis: int
    note: str

    def shortened(self, tokens: int) -> "Feed":
        """The same with so many tokens."""
        return Feed(first(self.batch, 1 - self.axis, tokens), self.names, self.axis, self.note)


def one_sequence(model: nn.Module, batch: Batch, anatomy: Anatomy) -> Feed:
    """The first sequence of `batch`; the whole batch where the model does not run or read the same on one."""
    try:
        for axis in (0, 1):
            fed = first(batch, axis, 1)
            again = read_anatomy(model, fed)
            cut_tokens = axis == 0 and shape_of(batch)[1:2] > (1,) and _runs_on_one_token(model, fed, again)
            if not cut_tokens:
                break
        reason = "it reads otherwise there"
        if _shape(again) == _shape(anatomy):
            return Feed(fed, dict(zip(sites_of(anatomy), sites_of(again), strict=True)), axis, "B = 1")
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    names = {site: site for site in sites_of(anatomy)}
    return Feed(batch, names, 0, f"the whole batch at once, not one sequence: {reason}")


def sites_of(part: Anatomy | Stack) -> Iterator[Site]:
    """Where Jacobians begin and end, and what the norms between them look at."""
    for block in part.blocks:
        yield from (block.entry, block.exit)
        for branch in block.branches:
            yield from (branch.entry, branch.output)
            yield from (norm.input for norm in branch.norms)


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """`batch` with its floating tensors in `dtype`."""
    return mapped(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)


def first(batch: Batch, axis: int, count: int) -> Batch:
    """The first `count` along `axis` of every tensor that is as long there as the batch's first tensor."""
    length = shape_of(batch)[axis : axis + 1]

    def cut(tensor: Tensor) -> Tensor:
        matches = tensor.shape[axis : axis + 1] == length
        return tensor.narrow(axis, 0, min(count, length[0])) if matches else tensor

    return mapped(batch, cut) if length else batch


def mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`batch` with every tensor changed; mappings come back as dicts."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: mapped(value, change) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        changed = [mapped(value, change) for value in batch]
        return tuple(changed) if isinstance(batch, tuple) else changed
    return batch


def shape_of(batch: Any) -> torch.Size:
    """Shape of the first tensor of a batch, () where it has none."""
    if isinstance(batch, Tensor):
        return batch.shape
    if not isinstance(batch, Mapping | tuple | list):
        return torch.Size()
    values = batch.values() if isinstance(batch, Mapping) else batch
    return next((shape for shape in map(shape_of, values) if shape), torch.Size())


def _shape(anatomy: Anatomy) -> list[list[tuple[str, str]]]:
    """What must agree between two readings for their sites to be the same places."""
    return [[(branch.site, branch.placement) for branch in block.branches] for block in anatomy.blocks]


def _runs_on_one_token(model: nn.Module, fed: Batch, anatomy: Anatomy) -> bool:
    """Whether attention has a single token to look at: then the axis that was cut counted tokens."""
    queries = [attention.query for branch in anatomy.branches for attention in branch.attention][:1]
    _, found = capture(model, lambda: call_model(model, fed), queries)
    return any(tensor.shape[-2] == 1 for tensor in found.values())
