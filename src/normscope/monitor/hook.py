"""Hook: a monitor's hook on a module, which copies of the module do not get."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from normscope.monitor.in_place import CompiledCalls, is_compiled


class Hook:
    """Function that a module calls; copies and pickles of the module call `nothing` instead.

    A script may copy its model while it is watched (averages of the weights), or save it whole. A copy is not
    watched, and what the hook holds, such as the connection to a store, cannot be copied.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _nothing, ()


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of a hook."""


def _nothing() -> Callable[..., None]:
    return nothing


def hook_calls(
    module: nn.Module, before: Callable[..., object], after: Callable[..., object]
) -> list[RemovableHandle | CompiledCalls]:
    """Call `before` and `after` around each call of a module, until what is returned is removed."""
    if is_compiled(module):
        return [CompiledCalls(module, after, before)]
    return [
        module.register_forward_pre_hook(Hook(before), with_kwargs=True),
        module.register_forward_hook(Hook(after), with_kwargs=True),
    ]


def is_hooked(module: nn.Module) -> bool:
    """Whether a monitor has hooked the calls of a module."""
    return any(isinstance(each, Hook) for each in module._forward_hooks.values())
