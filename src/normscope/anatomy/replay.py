"""Run a part of a recorded forward again, on other tensors and in float64.

What a part computes is found by its results: an activation by its values, a factor by its slope, rotary
positions by the turn of a vector. That holds for every way of writing it. Nothing outside of the part runs,
except what depends on the model's inputs and parameters by few ops, such as masks and tables of positions.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from normscope.anatomy.alike import Contents
from normscope.anatomy.graph import Op, Value, between
from normscope.anatomy.views import written_over

T = TypeVar("T")
_DTYPES = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}


_UNFUSED = ("aten.addcmul", "aten.addcdiv", "aten.addmm", "aten.baddbmm")
"""Ops that the recorder writes as a product and an add."""
_INNER: dict[str, Callable[..., Tensor]] = {
    "mul": torch.mul,
    "div": torch.div,
    "mm": torch.mm,
    "bmm": torch.bmm,
}


_VIEWS = ("view", "_unsafe_view")


class CannotReplay(Exception):
    """An op of the part cannot run again: it has no real tensors, or writes into a part of one."""


class Replay:
    """Parts of one recorded forward, run again.

    Floating-point tensors are float64. A tensor that comes from outside of the part is computed from the
    leaves where it does not depend both on the model's input and on its parameters; else it is zero.
    """

    def __init__(self) -> None:
        self._fixed: dict[Value, Tensor] = {}
        self._contents = Contents(is_end)
        self._known: dict[Hashable, Any] = {}

    def once(
        self, read: Callable[..., T], starts: Sequence[Value], ends: Sequence[Value], *arguments: Hashable
    ) -> T:
        """`read(starts, ends, *arguments, self)`, once for all parts of the graph that compute the same.

        Like layers differ in their weights alone, so that one of them is replayed for all. `read` may look at
        the values between `starts` and `ends`, at their shapes, axes and inputs, and replay them.

        Raises:
            CannotReplay: `read` raised it here or for a part like this one.
        """
        key = (read, arguments, self._contents.of_part(starts, ends))
        if key not in self._known:
            try:
                self._known[key] = read(starts, ends, *arguments, self)
            except CannotReplay as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, CannotReplay):
            raise found
        return found

    def run(self, given: Mapping[Value, Tensor], ends: Sequence[Value]) -> list[Tensor]:
        """The values `ends`, with the tensors `given` for others.

        Raises:
            CannotReplay: an op in between has no real tensors or cannot be repeated.
        """
        known = {value: tensor.reshape(value.shape) for value, tensor in given.items()}
        region = {v for start in given for end in ends for v in between(start, end)}
        with torch.no_grad() if not any(t.requires_grad for t in given.values()) else torch.enable_grad():
            for value in sorted(region - known.keys(), key=lambda v: v.index):
                if value not in known:
                    self._step(value, known)
            return [known[end] if end in known else self.fixed(end) for end in ends]

    def fixed(self, value: Value) -> Tensor:
        """A value that does not depend on a part: from its leaves, or zero, see the class."""
        stack = [value]
        while stack:
            here = stack[-1]
            if here in self._fixed:
                stack.pop()
                continue
            missing = [] if is_end(here) else [v for v in here.inputs if v not in self._fixed]
            if missing:
                stack += missing
                continue
            self._fixed[here] = self._leaf(here) if is_end(here) else self._again(here, self._fixed)
            stack.pop()
        return self._fixed[value]

    def _leaf(self, value: Value) -> Tensor:
        if value.op is not None and value.data is None:
            return _blank(value)
        if value.data is None:
            raise CannotReplay("a tensor without elements")
        return _double(value.data)

    def _step(self, value: Value, known: dict[Value, Tensor]) -> None:
        for each in value.inputs:
            if each not in known:
                known[each] = self.fixed(each)
        assert value.op is not None, "a value of a region has an op"
        known[value] = self._again(value, known)

    def _again(self, value: Value, known: Mapping[Value, Tensor]) -> Tensor:
        op = value.op
        assert op is not None, "a leaf is not computed"
        try:
            result = tree_leaves(_call(op, value, known))[value.output]
        except CannotReplay:
            raise
        except Exception as error:
            raise CannotReplay(f"{op.name}: {type(error).__name__}") from error
        if tuple(result.shape) != value.shape:
            raise CannotReplay(f"{op.name} gives another shape")
        return result.to(_DTYPES.get(result.dtype, result.dtype))  # a quotient of integers is float32


def is_end(value: Value) -> bool:
    """True for leaves, for values whose content is known, and for those of the input and of parameters."""
    return value.op is None or value.data is not None or (value.live and value.learnt)


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", _DTYPES.get(tensor.dtype, tensor.dtype))


def _call(op: Op, value: Value, known: Mapping[Value, Tensor]) -> Any:
    read = [known[v] for v in op.inputs]
    if op.base in {"expand", "clone"} and len(read) == 1 and (op.virtual or "copy_" in op.name):
        return read[0].expand(value.shape)
    if op.base in {"alias", "overwrite"} and op.virtual:
        shown, *held = op.kwargs["places"]
        return read[0] if [shown] == held else written_over(shown, held, read)
    if op.base == "add" and op.name.startswith(_UNFUSED) and len(read) == 2:
        product, beta = op.kwargs.get("alpha", 1) * read[1], op.kwargs.get("beta", 1)
        return beta * read[0] + product if beta else product  # 0 ignores what may be memory of any content
    if op.virtual:
        return _INNER[op.base](*read)
    func = _function(op)
    given = tree_map_only(Value, lambda v: known[v] if v in known else _blank(v), (op.args, op.kwargs))
    args, kwargs = tree_map(lambda x: _DTYPES.get(x, x) if isinstance(x, torch.dtype) else x, given)
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    if value.floating and not op.inputs and any(a.name == "dtype" for a in func._schema.arguments):
        kwargs.setdefault("dtype", torch.float64)  # torch.full makes float32 by itself
    return func(*args, **kwargs)


def _blank(value: Value) -> Tensor:
    """A tensor in place of one of which only the shape is read (full_like)."""
    return torch.zeros(value.shape, dtype=torch.float64 if value.floating else torch.int64)


def _function(op: Op) -> Any:
    """The op, without writing into its arguments."""
    namespace, name, overload = op.name.split(".")
    packet = getattr(torch.ops, namespace)
    if name in _VIEWS and overload == "default":
        return torch.reshape  # the strides of a replayed tensor are its own
    plain = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    if not hasattr(packet, plain):
        raise CannotReplay(f"{op.name} writes into its argument")
    return getattr(getattr(packet, plain), overload)


def leaves_of(values: Iterable[Value]) -> set[Value]:
    """The leaves that values are computed from."""
    seen, stack = set[Value](), list(values)
    while stack:
        value = stack.pop()
        if value not in seen:
            seen.add(value)
            stack.extend(value.inputs)
    return {value for value in seen if value.op is None}
