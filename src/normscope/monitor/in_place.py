"""Calls of modules that `module.compile()` compiled in place, whose hooks PyTorch traces and does not run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


class CompiledCalls:
    """Functions called around the calls of a module that is compiled in place, outside of compiled code.

    Args:
        module: the module.
        after: called with the module, its arguments, its keyword arguments and its output.
        before: called with the same without the output.
    """

    def __init__(
        self, module: nn.Module, after: Callable[..., object], before: Callable[..., object] | None = None
    ) -> None:
        self._module, self._after, self._before = module, after, before
        self._compiled: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]
        self._is_on = True
        module._compiled_call_impl = self._call

    def remove(self) -> None:
        """End."""
        self._is_on = False
        if self._module._compiled_call_impl == self._call:  # else another one has wrapped it since
            self._module._compiled_call_impl = self._compiled

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_on or torch.compiler.is_compiling():
            return self._compiled(*args, **kwargs)
        if self._before is not None:
            self._before(self._module, args, kwargs)
        output = self._compiled(*args, **kwargs)
        self._after(self._module, args, kwargs, output)
        return output
