"""Hook: a monitor's hook on a module, which copies of the module do not get."""

from collections.abc import Callable
from typing import Any


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
