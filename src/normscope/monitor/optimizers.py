"""Optimizers that a user gives: checks, wrappers and closures."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from normscope.errors import UsageError


def optimizers_of(model: object, given: object) -> list[Optimizer]:
    """The optimizers as a list; UsageError for anything else."""
    each = list(given) if isinstance(given, Sequence) else [given]
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model={type(model).__name__}", "a torch.nn.Module", "write Monitor(model, optimizer)"
        )
    if not each or not all(callable(getattr(one, "register_step_pre_hook", None)) for one in each):
        names = ", ".join(type(one).__name__ for one in each) or "none"
        raise UsageError(
            f"optimizer={names}", "a torch.optim.Optimizer, or several", "write optimizer=[a, b]"
        )
    return cast(list[Optimizer], each)


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside wrappers such as accelerate's, whose hooks do not run."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def after_closure(
    args: Any, kwargs: Any, act: Callable[[], object], *, before: Callable[[], object] = lambda: None
) -> tuple[Any, Any] | None:
    """Call `act` before an update: now, or with a closure after each call of it, and `before` before that.

    Returns:
        The arguments of a step pre-hook with the closure wrapped, None without one.
    """
    given = [*args[1:2], kwargs.get("closure")]
    closure = next((each for each in given if callable(each)), None)
    if closure is None:
        act()
        return None

    def called(*inputs: Any, **keywords: Any) -> Any:
        before()
        loss = closure(*inputs, **keywords)
        act()
        return loss

    return tuple(called if each is closure else each for each in args), {
        name: called if each is closure else each for name, each in kwargs.items()
    }
