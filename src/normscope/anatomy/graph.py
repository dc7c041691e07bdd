"""The recorded forward as a graph: values (tensors at one moment) and the ops between them.

Values are numbered in the order they came to be, so inputs always have smaller numbers than outputs. That
makes "what lies between x and y" a cheap question: walk back from y and never below x. An in-place op gives
its tensor a new value; nothing here ever changes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.utils._pytree import tree_leaves

from normscope.anatomy.calls import Call
from normscope.anatomy.types import Site

Axis = tuple[tuple[str, int], ...]
"""The factors of one axis of a tensor, outermost first: what each counts, and its size; see `axes`."""
Origin = Literal["op", "parameter", "buffer", "input", "constant"]


@dataclass(eq=False, slots=True)
class Op:
    """One ATen op; `args` and `kwargs` hold `Value`s in the tensors' places. `virtual` ops were written by
    the recorder (aliases, the product inside addcmul) and have no site.
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
        """An argument by place or by name."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)


@dataclass(eq=False, slots=True)
class Value:
    """One tensor at one moment.

    Attributes:
        live: depends on the model's input.
        learnt: depends on a parameter.
        number: the value of a one-valued tensor that depends on neither.
        norm: what an opaque op turned out to be when its output was compared with norms of its input.
        causal: of a square softmax: whether everything above the diagonal is zero.
        axes: what each axis counts.
        goes_on: of a sum of points of one stream, the latest of them: see `long_skips`.
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
    norm: str | None = None
    causal: bool | None = None
    users: list[Op] = field(default_factory=list)
    axes: tuple[Axis, ...] = ()
    goes_on: "Value | None" = None

    @property
    def base(self) -> str:
        """Name of the op that made it, "" for a leaf."""
        return self.op.base if self.op is not None else ""

    @property
    def source(self) -> "Value":
        """First input of the op that made it."""
        assert self.op is not None
        return self.op.inputs[0]

    def behind(self, bases: Set[str]) -> "Value":
        """What it was before ops of these names."""
        value = self
        while value.base in bases:
            value = value.source
        return value


@dataclass(frozen=True)
class Gap:
    """What could not be read, in words, and a value of the part in question."""

    words: str
    at: Value


@dataclass(eq=False)
class Graph:
    """Ops in the order they ran."""

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    written_bytes: int = 0
    opaque: list[Op] = field(default_factory=list)

    def site(self, value: Value) -> Site:
        """Where a later forward finds `value` again: an op's output, else another op's input."""
        if value.op is not None and not value.op.virtual:
            op = value.op
            return Site(op.call.path, op.call.nth, op.name, op.nth, value.output)
        for op in value.users:
            if not op.virtual:
                tensors = [v for v in tree_leaves((op.args, op.kwargs)) if isinstance(v, Value)]
                return Site(op.call.path, op.call.nth, op.name, op.nth, -1 - tensors.index(value))
        assert value.op is not None, "a leaf that nothing reads has no site"
        return self.site(value.op.inputs[-1])


def operand(op: Op, index: int) -> Site:
    """Where a later forward finds an op's input; those of the product inside addcmul come after its sum's."""
    return Site(op.call.path, op.call.nth, op.name, op.nth, -1 - index - op.virtual)


def search(start: Iterable[Value], step: Callable[[Value], Iterable[Value]]) -> Iterator[Value]:
    """`start` and all that `step` leads to from there, breadth first, each once."""
    queue, seen = deque(start), set()
    while queue:
        value = queue.popleft()
        if value not in seen:
            seen.add(value)
            yield value
            queue.extend(step(value))


def inputs_of(value: Value) -> tuple[Value, ...]:
    """What the op that made it read; nothing for a leaf."""
    return value.op.inputs if value.op is not None else ()


def ancestors(values: Iterable[Value], above: int) -> set[Value]:
    """`values` and everything they come from that is numbered higher than `above`."""
    start = (v for v in values if v.index > above)
    return set(search(start, lambda value: (v for v in inputs_of(value) if v.index > above)))


def comes_from(value: Value, start: Value) -> bool:
    """Whether `value` is `start` or computed from it."""
    return start in ancestors([value], start.index - 1)


def between(start: Value, end: Value) -> list[Value]:
    """Values on the ways from `start` to `end`, in order, `end` included and `start` not; empty without a
    way.
    """
    reached = {start}
    for value in sorted(ancestors([end], start.index), key=lambda v: v.index):
        if value.op is not None and not reached.isdisjoint(value.op.inputs):
            reached.add(value)
    if end not in reached:
        return []
    reached.discard(start)
    return sorted(reached, key=lambda v: v.index)
