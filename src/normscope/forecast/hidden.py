"""Reader of the last hidden states of a model: the first forward finds them, later ones read them by hooks.

A capture by ops costs up to five plain forwards, because it runs Python code at each op. The trials of a
forecast measure copies of one model many times.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor, nn

from normscope.anatomy import Anatomy, Site, Stack
from normscope.anatomy.taps import Tap, capture_with_taps, read_taps
from normscope.subjects import Batch
from normscope.subjects.feed import tensors_in

T = TypeVar("T")
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Hidden:
    """The last hidden state of a stack, and how many tokens attend to one another, None if unknown."""

    state: Tensor
    length: int | None


@dataclass
class HiddenStates:
    """The last hidden states of the stacks of a model and of its copies.

    Attributes:
        taps: places of the states in module calls, once they are known.
        lengths: numbers of tokens of the stacks, by the shapes of a batch.
        limited: whether positions are told from the input, by stack, from the first measurement on: see
            `evaluator.differences`.
        by_ops: whether a state is at no module's output, so that each forward has to be captured by ops.
    """

    anatomy: Anatomy
    taps: dict[Site, Tap] = field(default_factory=dict)
    lengths: dict[Shapes, dict[str, int | None]] = field(default_factory=dict)
    limited: dict[str, bool] = field(default_factory=dict)
    by_ops: bool = False

    def read(self, model: nn.Module, batch: Batch, run: Callable[[], T]) -> tuple[T, dict[str, Hidden]]:
        """`run()`, and the state of each stack that it reached, by the stack's name.

        With gradients enabled, the tensors are those of the graph of the result. Call it inside
        `measuring(model)`.

        Args:
            batch: what `run` feeds to `model`.
        """
        if not self.anatomy.stacks:
            return run(), {}
        shapes = tuple(tuple(tensor.shape) for tensor in tensors_in(batch))
        if self.by_ops or not self.taps or shapes not in self.lengths:
            return self._captured(model, shapes, run)
        result, found = read_taps(model, run, self.taps)
        lengths = self.lengths[shapes]
        stacks = [stack for stack in self.anatomy.stacks if stack.hidden in found]
        return result, {stack.name: Hidden(found[stack.hidden], lengths[stack.name]) for stack in stacks}

    def _captured(
        self, model: nn.Module, shapes: Shapes, run: Callable[[], T]
    ) -> tuple[T, dict[str, Hidden]]:
        stacks = self.anatomy.stacks
        sites = [site for stack in stacks for site in (stack.hidden, first_query(stack)) if site]
        result, seen = capture_with_taps(model, run, sites, views=False)
        found = {site: each.tensor for site, each in seen.items()}
        hidden = {
            stack.name: Hidden(found[stack.hidden], _length(stack, found))
            for stack in stacks
            if stack.hidden in found
        }
        taps = {stack.hidden: seen[stack.hidden].tap for stack in stacks if stack.name in hidden}
        self.taps = {site: tap for site, tap in taps.items() if tap is not None}
        self.by_ops = len(self.taps) < len(taps)
        self.lengths[shapes] = {name: each.length for name, each in hidden.items()}
        return result, hidden


def first_query(stack: Stack) -> Site | None:
    """Site from which a sequence's length is read: the query (…, T, d_h) of the first self-attention."""
    branches = (b for b in stack.branches if b.kind == "attention" and b.attention)
    return next((branch.attention[0].query for branch in branches), None)


def _length(stack: Stack, found: dict[Site, Tensor]) -> int | None:
    query = first_query(stack)
    return found[query].shape[-2] if query is not None and query in found else None
