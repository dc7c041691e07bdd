"""The recorded forward as a graph: values (tensors at one moment) and the ops between them.

Values are numbered in the order of computation, so inputs have smaller numbers than outputs. Finding the
values between x and y is cheap: walk back from y, and stop below x. An in-place op gives its tensor a new
value. Each step of the reading writes its results onto the values: axes, norms, sums.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.utils._pytree import tree_leaves

from normscope.anatomy.calls import Call
from normscope.anatomy.types import Site

if TYPE_CHECKING:
    from normscope.anatomy.norms import FoundNorm
    from normscope.anatomy.residual import Sum

Axis = tuple[tuple[str, int], ...]
"""The factors of one axis of a tensor, outermost first: what each counts, and its size; see `axes`."""
Origin = Literal["op", "parameter", "buffer", "input", "constant"]


@dataclass(eq=False, slots=True, repr=False)
class Op:
    """One ATen op; `args` and `kwargs` hold `Value`s instead of tensors. `virtual` ops were written by the
    recorder (aliases, the product inside addcmul) and have no site.
    """

    name: str
    base: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple["Value", ...]
    call: Call
    nth: int
    virtual: bool = False
    outputs: list["Value"] = field(default_factory=list)

    @property
    def source(self) -> "Value":
        """First input."""
        return self.inputs[0]

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """An argument by position or by name."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    def site(self, output: int) -> Site:
        """Site of an output; -1 - i is the i-th tensor input."""
        return Site(self.call.path, self.call.nth, self.name, self.nth, output)

    def operand(self, index: int) -> Site:
        """Site of an input; inputs of the product inside addcmul come after its sum's."""
        return self.site(-1 - index - self.virtual)


@dataclass(eq=False, slots=True, repr=False)
class Value:
    """One tensor at one moment.

    Attributes:
        live: depends on the model's input.
        learnt: depends on a parameter.
        number: the value of a one-valued tensor that depends on neither.
        looks_normed: kind of norm that an opaque op's output equals, by comparison on real tensors.
        causal: whether everything above the diagonal of a square softmax is zero.
        reach: the most positions back and ahead of the diagonal at which a square softmax is not zero.
        data: the tensor of a leaf that has real elements, and the content of one that was written in parts
            and does not depend on parameters, for `Replay`.
        axes: what each axis counts.
        norm, norms_behind: the norm that ends here; the norms that start here.
        sum: the residual sum that ends here.
        goes_on: the latest term of a sum of points of one stream; see `long_skips`.
    """

    index: int
    op: Op | None
    output: int
    shape: tuple[int, ...]
    floating: bool
    origin: Origin = "op"
    name: str | None = None
    live: bool = False
    learnt: bool = False
    number: float | None = None
    looks_normed: str | None = None
    causal: bool | None = None
    reach: tuple[int, int] | None = None
    data: Tensor | None = None
    users: list[Op] = field(default_factory=list)
    axes: tuple[Axis, ...] = ()
    norm: "FoundNorm | None" = None
    norms_behind: list["FoundNorm"] = field(default_factory=list)
    sum: "Sum | None" = None
    goes_on: "Value | None" = None

    @property
    def base(self) -> str:
        """Name of the op that made it, "" for a leaf."""
        return self.op.base if self.op is not None else ""

    @property
    def inputs(self) -> tuple["Value", ...]:
        """Inputs of the op that made it, empty for a leaf."""
        return self.op.inputs if self.op is not None else ()

    @property
    def source(self) -> "Value":
        """First input of the op that made it."""
        return self.inputs[0]

    @property
    def successors(self) -> Iterator["Value"]:
        """Outputs of the ops that read it."""
        return (value for op in self.users for value in op.outputs)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_weight(self) -> bool:
        """A parameter, or made of parameters alone."""
        return self.learnt and not self.live

    @property
    def site(self) -> Site:
        """The site at which a later forward finds it again: an op's output, else another op's input."""
        if self.op is not None and not self.op.virtual:
            return self.op.site(self.output)
        for op in self.users:
            if not op.virtual:
                tensors = [v for v in tree_leaves((op.args, op.kwargs)) if isinstance(v, Value)]
                return op.site(-1 - tensors.index(self))
        assert self.op is not None, "a leaf that nothing reads has no site"
        return self.op.inputs[-1].site

    def through(self, bases: Set[str]) -> Iterator["Value"]:
        """Itself, and what it was before each op of these names, nearest first."""
        value = self
        yield value
        while value.base in bases:
            value = value.source
            yield value

    def behind(self, bases: Set[str]) -> "Value":
        """The value before all ops of these names."""
        *_, value = self.through(bases)
        return value


@dataclass(frozen=True)
class Gap:
    """Description of a part that could not be read, and a value in it."""

    words: str
    at: Value


@dataclass(eq=False)
class Graph:
    """Ops in the order they ran.

    Attributes:
        outputs: the floating-point tensors that the model returned.
        dropouts: inputs, rates and modules of the calls of `torch.nn.functional.dropout`, which does nothing
            in eval mode and leaves no op.
    """

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    written_bytes: int = 0
    opaque: list[Op] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    dropouts: list[tuple[Value, float, str]] = field(default_factory=list)


def search(start: Iterable[Value], step: Callable[[Value], Iterable[Value]]) -> Iterator[Value]:
    """`start` and all that `step` leads to from there, breadth first, each once."""
    queue, seen = deque(start), set()
    while queue:
        value = queue.popleft()
        if value not in seen:
            seen.add(value)
            yield value
            queue.extend(step(value))


def ancestors(values: Iterable[Value], above: int) -> set[Value]:
    """`values` and everything they come from that is numbered higher than `above`."""
    start = (v for v in values if v.index > above)
    return set(search(start, lambda value: (v for v in value.inputs if v.index > above)))


def comes_from(value: Value, start: Value) -> bool:
    """True where `value` is `start` or computed from it."""
    return start in ancestors([value], start.index - 1)


def between(start: Value, end: Value) -> list[Value]:
    """Values on the paths from `start` to `end`, in order, with `end` and without `start`; may be empty."""
    reached = {start}
    for value in sorted(ancestors([end], start.index), key=lambda v: v.index):
        if not reached.isdisjoint(value.inputs):
            reached.add(value)
    if end not in reached:
        return []
    reached.discard(start)
    return sorted(reached, key=lambda v: v.index)


def narrows(ops: Iterable[Op]) -> dict[Value, Value]:
    """Value → the last value before it that everything in it comes through, for values that have one.

    What depends on the model's input but on no parameter, such as a mask, counts only beside its like.
    """
    found: dict[Value, Value] = {}

    def meet(a: Value | None, b: Value | None) -> Value | None:
        while a is not b and a is not None and b is not None:
            a, b = (found.get(a), b) if a.index > b.index else (a, found.get(b))
        return a if a is b else None

    for op in ops:
        live = [v for v in op.inputs if v.live]
        read = [v for v in live if v.learnt] or live
        last = reduce(meet, read) if read else None  # type: ignore[arg-type]
        if last is not None:
            found.update((value, last) for value in op.outputs)
    return found
