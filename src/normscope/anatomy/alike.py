"""Parts of a recorded forward that compute the same, such as those of a model's like layers.

Two parts are alike where the same ops run in the same order on tensors of the same shapes, and where what
they read from outside has the same content: masks, tables of positions, learnt scales.
"""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from normscope.anatomy.graph import Value, between


class Contents:
    """Numbers for contents: equal contents have equal numbers.

    Args:
        is_end: whether a value is replaced by its elements, or by zeros where it has none, and not computed.
    """

    def __init__(self, is_end: Callable[[Value], bool]) -> None:
        self._is_end = is_end
        self._numbers: dict[Hashable, int] = {}
        self._of: dict[Value, int] = {}

    def of_part(self, starts: Sequence[Value], ends: Sequence[Value]) -> int:
        """Number of everything that is computed from `starts` to `ends`."""
        region = {v for start in starts for end in ends for v in between(start, end)}
        names = {start: -1 - i for i, start in enumerate(starts)}
        made = []
        for value in sorted(region - names.keys(), key=lambda v: v.index):
            for each in value.inputs:
                if each not in names:
                    names[each] = self._of_outside(each)
            names[value] = self._numbered((_op(value, names), _kind(value), value.norm is not None))
            made.append(names[value])
        ending = tuple(map(names.get, ends))
        return self._numbered((tuple(map(_kind, starts)), tuple(made), ending, tuple(map(_kind, ends))))

    def _numbered(self, content: Hashable) -> int:
        return self._numbers.setdefault(content, len(self._numbers))

    def _of_outside(self, value: Value) -> int:
        """Number of the content of a value, computed from its leaves."""
        stack = [value]
        while stack:
            here = stack[-1]
            is_end = self._is_end(here)
            missing = [] if is_end else [v for v in here.inputs if v not in self._of]
            if missing:
                stack += missing
                continue
            stack.pop()
            if here not in self._of:
                made = _digest(here) if is_end else _op(here, self._of)
                self._of[here] = self._numbered((made, _kind(here)))
        return self._of[value]


def _op(value: Value, names: Mapping[Value, int]) -> Hashable:
    """An op with the numbers of its inputs."""
    op = value.op
    assert op is not None, "a computed value has an op"
    given = _plain((op.args, op.kwargs), names)
    return op.name, op.base, op.virtual, value.output, tuple(map(names.get, op.inputs)), given


def _plain(given: Any, names: Mapping[Value, int]) -> Hashable:
    if isinstance(given, Value):
        return names.get(given, given.shape)
    if isinstance(given, tuple | list):
        return tuple(_plain(each, names) for each in given)
    if isinstance(given, dict):
        return tuple((name, _plain(each, names)) for name, each in given.items())
    return repr(given)


def _kind(value: Value) -> Hashable:
    return value.shape, value.floating, value.live, value.learnt, value.axes


def _digest(value: Value) -> Hashable:
    if value.data is None:
        return value.op is None
    data = value.data.detach()
    try:
        numbers = data.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError):  # a sparse or quantised tensor counts as unlike all others
        return value.index
    return str(data.dtype), hashlib.blake2b(numbers.tobytes()).digest()
