"""Track the running module call, which every `Site` refers to.

Recording and capturing must count in the same way, so both use this class. Module hooks keep a stack of
calls; every op is counted in the innermost call by its name. Wrappers (`torch.compile`, DDP, FSDP) and
modules that the model does not own are transparent: their ops count in the call around them.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from normscope.anatomy.names import named_modules
from normscope.collecting import collection_paused


@dataclass(eq=False, slots=True)
class Call:
    """One run of one module: the `nth` of `path` in this forward, inside `parent`."""

    path: str
    nth: int
    parent: "Call | None"
    ops: Counter[str] = field(default_factory=Counter)

    def around(self) -> Iterator["Call"]:
        """This call and those around it, innermost first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent

    def count(self, op: str) -> int:
        """Count an op; return its index among ops of that name in this call."""
        nth = self.ops.get(op, 0)  # a Counter makes its zeros in Python, which is slow
        self.ops[op] = nth + 1
        return nth


class ModuleCalls:
    """The stack of running module calls of `model` while inside `watching()`."""

    def __init__(self, model: nn.Module) -> None:
        self._paths: dict[int, str] = {}
        for path, module in named_modules(model):
            self._paths.setdefault(id(module), path)
        self._model = model
        self._seen: Counter[str] = Counter()
        # Ops outside any forward (a loss, a root wrapper) count in a call of their own.
        self.current = Call("", -1, None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow module calls inside the context; all hooks are removed afterwards."""
        handles = []
        with collection_paused():
            for module in self._model.modules():
                if id(module) in self._paths:
                    # Through the base class: a traced module refuses its own method, but runs hooks.
                    handles.append(nn.Module.register_forward_pre_hook(module, self._enter))
                    handles.append(nn.Module.register_forward_hook(module, self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        path = self._paths.get(id(module))
        if path is not None:
            nth = self._seen.get(path, 0)
            self.current = Call(path, nth, self.current)
            self._seen[path] = nth + 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in self._paths and self.current.parent is not None:
            self.current = self.current.parent
