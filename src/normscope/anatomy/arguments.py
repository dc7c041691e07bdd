"""Arguments of ops: quick maps over what is nearly always a flat tuple."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils._pytree import tree_map_only

T = TypeVar("T")


def map_arguments(kind: type[T], function: Callable[[T], Any], arguments: Any) -> Any:
    """The arguments with the results of `function` in the place of leaves of a kind.

    As PyTorch's `tree_map_only`, which takes longer than most ops of a small model.
    """
    if isinstance(arguments, kind):
        return function(arguments)
    if type(arguments) in (tuple, list):
        return type(arguments)([map_arguments(kind, function, each) for each in arguments])
    if type(arguments) is dict:
        return {name: map_arguments(kind, function, each) for name, each in arguments.items()}
    if isinstance(arguments, tuple | list | dict):  # with names, a size, or in an order
        return tree_map_only(kind, function, arguments)
    return arguments
