"""Guard of normscope's own work in one of several processes, where a collective would wait for the others."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_METHODS = re.compile("_?all|_?reduce|barrier|broadcast|gather|monitored_barrier|recv|scatter|send")
"""Beginnings of the names of a process group's methods that wait for other processes."""
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of the operators of functional collectives."""


class CommunicationError(RuntimeError):
    """A model communicates with other processes while normscope runs it in one process alone."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the model's forward communicates with other processes ({name}), "
            "and one process cannot run the model alone"
        )


def num_processes() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def require_no_sync(model: nn.Module) -> None:
    """Raise CommunicationError if a module of `model` is known to communicate."""
    for module in model.modules():
        if "SyncBatchNorm" in type(module).__name__:
            raise CommunicationError(type(module).__name__)


@contextmanager
def alone() -> Iterator[None]:
    """Context in which a collective of this thread, or of one that starts in it, raises CommunicationError.

    Other threads of the script may go on to communicate.
    """
    if num_processes() == 1:
        yield
        return
    own = threading.get_ident()
    # A thread of autograd is none of Python's: it shows as a dummy once it has run Python code.
    known = [each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)]
    others = {each.ident for each in known} - {own}

    def guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() not in others and _group(original, args, kwargs).size() > 1:
                raise CommunicationError(name)
            return original(*args, **kwargs)

        call.default = call  # type: ignore[attr-defined]  # an operator is called by its overload too
        return call

    with ExitStack() as held:
        for owner, name in list(_operations()):
            held.callback(setattr, owner, name, vars(owner)[name])  # getattr would unwrap a class's method
            setattr(owner, name, guarded(name, getattr(owner, name)))
        yield


def _group(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "dist.ProcessGroup":
    """The group of processes that a call of a group's method, or of an operator, communicates with."""
    if not isinstance(operation, torch._ops.OpOverloadPacket):
        return args[0]
    names = [each.name for each in operation.default._schema.arguments]
    group = (dict(zip(names, args, strict=False)) | dict(kwargs))["group_name"]
    c10d: Any = dist.distributed_c10d
    return group if isinstance(group, dist.ProcessGroup) else c10d._resolve_process_group(group)


def _operations() -> Iterator[tuple[Any, str]]:
    """Yield the owner and the name of each operation that waits for other processes."""
    yield from ((dist.ProcessGroup, name) for name in vars(dist.ProcessGroup) if _METHODS.match(name))
    for each in torch._C._dispatch_get_all_op_names():
        namespace, _, name = each.partition("::")
        if namespace in _NAMESPACES and name.isidentifier() and not name.startswith(("_", "wait")):
            owner = getattr(torch.ops, namespace)
            getattr(owner, name)  # the namespace keeps it from now on
            yield owner, name
