"""Norms whose result the residual add before them computes, in one operation with the add."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Ahead(NamedTuple):
    """The norm of x, computed before it was asked for."""

    x: Tensor
    state: tuple[Any, ...]
    normed: Tensor


class ReadsAhead:
    """Mixin of a norm that returns its result for a tensor if it was computed before.

    The result is used only for that very tensor, unchanged since, and in the modes in which it was computed:
    a result from under `no_grad` has no gradient. A call with other arguments computes its own.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The norm of the first argument."""
        known: _Ahead | None = self.__dict__.pop("_ahead", None)
        alone = args and all(each is None for each in (*args[1:], *kwargs.values()))
        if known is not None and alone and args[0] is known.x and known.state == _state(known.x):
            return known.normed
        return self.without_reading(*args, **kwargs)

    def without_reading(self, *args: Any, **kwargs: Any) -> Any:
        """The norm as its own class computes it."""
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def expect(self, x: Tensor, normed: Tensor) -> None:
        """Keep the norm of x for the next call."""
        self.__dict__["_ahead"] = _Ahead(x, _state(x), normed)

    def forget(self) -> None:
        """Drop what is kept."""
        self.__dict__.pop("_ahead", None)


def saved_tensor_hooks() -> Any:
    """The innermost hooks of saved tensors, None without: activation checkpointing sets them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of x; None where it is off."""
    kind = x.device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def _state(x: Tensor) -> tuple[Any, ...]:
    """State that may change between the sum and its norm: the modes of PyTorch, and x itself.

    In inference mode PyTorch does not count changes in place, and under `torch.compile` it needs no count.
    """
    if torch.compiler.is_compiling():
        return ()
    version = None if x.is_inference() else x._version
    own = (version, x.requires_grad, x.retains_grad, bool(x._backward_hooks))
    return *own, torch.is_grad_enabled(), autocast_dtype(x), saved_tensor_hooks()
