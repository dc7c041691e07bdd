"""Residual adds of a running forward, found by what they add.

A residual add is `skip + branch`, `skip.add(branch)` or `torch.add`, where the skip is a tensor that the
running module was given, the result of its residual add before, or a norm's output (Post-LN).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normscope.anatomy.names import named_modules

_ADDS = frozenset({Tensor.add, torch.add})


class Add(NamedTuple):
    """α·skip + branch."""

    skip: Tensor
    branch: Tensor
    alpha: float


@dataclass
class _Call:
    """A running call of a holder: its path, the tensors that may be the skip, and its adds so far."""

    path: str
    streams: list[Tensor]
    nth: int = 0


@dataclass
class Adds:
    """Hooks on the modules that add, and the calls of them that are running.

    Attributes:
        on_add: computes an add, from the holder's path, its number in the call, and the add; None leaves it
            to PyTorch.
    """

    on_add: Callable[[str, int, Add], Tensor | None]
    calls: list[_Call] = field(default_factory=list)
    paths: dict[nn.Module, str] = field(default_factory=dict)

    def watch(self, model: nn.Module, holders: set[str], norms: set[str]) -> list[Any]:
        """Hook the modules at `holders`, and the `norms` that read their adds; returns the hooks' handles."""
        handles = []
        for path, module in named_modules(model):
            if path in holders and module not in self.paths:
                self.paths[module] = path
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            if path in norms:
                handles.append(module.register_forward_hook(self._normed))
        return handles

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The result of a call of `func` if it is a residual add that `on_add` computes, else None."""
        if not self.calls or func not in _ADDS:
            return None
        call = self.calls[-1]
        add = _residual(call.streams, args, kwargs)
        if add is None:
            return None
        number, call.nth = call.nth, call.nth + 1
        total = self.on_add(call.path, number, add)
        if total is None:
            total = torch.add(add.branch, add.skip, alpha=add.alpha)
        call.streams.append(total)
        return total

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self.calls.append(_Call(self.paths[module], given))

    def _normed(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.calls and isinstance(output, Tensor):
            self.calls[-1].streams.append(output)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.calls:
            self.calls.pop()


class AddMode(TorchFunctionMode):
    """Mode under which residual adds go through `adds`."""

    def __init__(self, adds: Adds) -> None:
        super().__init__()
        self.adds = adds

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, or the residual add that it is."""
        total = self.adds.result(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if total is None else total


def _residual(streams: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Add | None:
    """The residual add of these arguments; None if it is none."""
    if len(args) != 2 or not all(isinstance(each, Tensor) for each in args) or kwargs.keys() - {"alpha"}:
        return None
    first, second = args
    alpha = kwargs.get("alpha", 1)
    if first.shape != second.shape or not (first.is_floating_point() and second.is_floating_point()):
        return None
    if any(second is stream for stream in streams):
        return Add(second, first, alpha)
    if any(first is stream for stream in streams):
        return Add(first, second if alpha == 1 else second * alpha, 1)
    return None
