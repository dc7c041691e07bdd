"""Residual adds of a running forward, found by what they add.

A residual add is `skip + branch`, `skip.add(branch)` or `torch.add`, where the skip is a tensor that the
running module was given, the result of its residual add before, or a norm's output (Post-LN).
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from normscope.anatomy.names import named_modules

_ADDS = frozenset({Tensor.add, torch.add})


class Add(NamedTuple):
    """α·skip + branch."""

    skip: Tensor
    branch: Tensor
    alpha: float

    def total(self) -> Tensor:
        """The sum, by PyTorch."""
        return torch.add(self.branch, self.skip, alpha=self.alpha)


OnAdd = Callable[[str, int, Add], Tensor | None]
"""Computes an add, from the holder's path, its number in the call, and the add; None leaves it to PyTorch."""


_RECENT = 8
"""Results of a call that may still be a skip; keeping all of them would hold the whole forward."""


@dataclass
class _Call:
    """A running call of a holder: its path, its adds so far, and the tensors that may be the skip."""

    path: str
    given: list[Tensor]
    recent: deque[Tensor] = field(default_factory=lambda: deque(maxlen=_RECENT))
    nth: int = 0


class AddMode(TorchFunctionMode):
    """Mode of one forward, under which residual adds go through `on_add`.

    Each forward has a mode of its own, so that threads do not see each other's.

    Attributes:
        calls: the calls of holders that are running, the innermost last.
    """

    def __init__(self, on_add: OnAdd) -> None:
        super().__init__()
        self.on_add = on_add
        self.calls: list[_Call] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, or the residual add that it is."""
        kwargs = kwargs or {}
        if func not in _ADDS or not self.calls or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        call = self.calls[-1]
        add = _residual((*call.given, *call.recent), args, kwargs)
        if add is None:
            return func(*args, **kwargs)
        total = self.on_add(call.path, call.nth, add)
        if total is None:
            total = func(*args, **kwargs)
        call.nth += 1
        call.recent.append(total)
        return total


@dataclass
class Adds:
    """Hooks on the modules that add. They do nothing outside a mode of `mode()`."""

    on_add: OnAdd
    handles: list[Any] = field(default_factory=list)

    def mode(self) -> AddMode:
        """A mode for one forward."""
        return AddMode(self.on_add)

    def running(self) -> AddMode | None:
        """The mode of the innermost forward that runs in this thread; None under `torch.compile`."""
        if torch.compiler.is_compiling():
            return None
        modes = reversed(_get_current_function_mode_stack())
        return next((m for m in modes if isinstance(m, AddMode) and m.on_add == self.on_add), None)

    def watch(self, model: nn.Module, holders: set[str], norms: set[str]) -> None:
        """Hook the modules at `holders`, and the `norms` that read their adds."""
        seen: set[nn.Module] = set()
        for path, module in named_modules(model):
            if path in holders and module not in seen:
                seen.add(module)
                enter = partial(self._enter, path)
                self.handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                self.handles.append(module.register_forward_hook(self._leave, always_call=True))
            if path in norms:
                self.handles.append(module.register_forward_hook(self._normed))

    def unwatch(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if (mode := self.running()) is not None:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            mode.calls.append(_Call(path, given))

    def _normed(self, module: nn.Module, args: Any, output: Any) -> None:
        if (mode := self.running()) is not None and mode.calls and isinstance(output, Tensor):
            mode.calls[-1].recent.append(output)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if (mode := self.running()) is not None and mode.calls:
            mode.calls.pop()


def _residual(streams: tuple[Tensor, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Add | None:
    """The residual add of these arguments; None if it is none."""
    if len(args) != 2 or not all(isinstance(each, Tensor) for each in args) or kwargs.keys() - {"alpha"}:
        return None
    first, second = args
    alpha = kwargs.get("alpha", 1)
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        return None
    if first.shape != second.shape or not (first.is_floating_point() and second.is_floating_point()):
        return None
    if any(second is stream for stream in streams):
        return Add(second, first, alpha)
    if any(first is stream for stream in streams):
        return Add(first, second if alpha == 1 else second * alpha, 1)
    return None
