"""A fused model's forward: each planned add also computes the norm behind it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from normscope.fusing.adds import Add, AddMode, Adds
from normscope.fusing.checking import run
from normscope.fusing.pairs import Pair
from normscope.kernels.ahead import ReadsAhead
from normscope.kernels.dispatch import Backend


@dataclass
class Running:
    """Hooks and classes that fuse the pairs of a model. A copy of the model has its own.

    Attributes:
        norms: the norm of each pair, by holder and number of the add.
        mode: that of the running forward.
    """

    pairs: dict[tuple[str, int], Pair]
    norms: dict[tuple[str, int], nn.Module]
    backend: Backend | None
    mode: AddMode | None = None
    handles: list[Any] = field(default_factory=list)
    adds: Adds = field(init=False)

    def __post_init__(self) -> None:
        self.adds = Adds(self._computed)

    def install(self, model: nn.Module) -> None:
        """Hook the model and its modules that add, and make its norms read ahead."""
        for norm in dict.fromkeys(self.norms.values()):
            norm.__class__ = type(f"Fused{type(norm).__name__}", (ReadsAhead, type(norm)), {})
        self.handles = self.adds.watch(
            model, {holder for holder, _ in self.pairs}, {pair.norm for pair in self.pairs.values()}
        )
        self.handles.append(model.register_forward_pre_hook(self._start, prepend=True))
        self.handles.append(model.register_forward_hook(self._end, always_call=True))

    def remove(self) -> None:
        """Take everything back that `install` did."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for norm in dict.fromkeys(self.norms.values()):
            _forget(norm)
            norm.__class__ = type(norm).__mro__[2]

    def _computed(self, path: str, nth: int, add: Add) -> Tensor | None:
        pair = self.pairs.get((path, nth))
        if pair is None:
            return None
        norm = self.norms[path, nth]
        normed, stream = run(pair, norm, add, self.backend)
        assert isinstance(norm, ReadsAhead)
        norm.expect(stream, normed)
        return stream

    def _start(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # the compiler fuses by itself
            return
        self._leave()  # a forward that Ctrl-C ended calls no hook
        self.mode = AddMode(self.adds)
        self.mode.__enter__()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        if self.mode is not None and _get_current_function_mode() is self.mode:
            self.mode.__exit__(None, None, None)
        self.mode = None
        self.adds.calls.clear()
        for norm in self.norms.values():
            _forget(norm)


def _forget(norm: nn.Module) -> None:
    assert isinstance(norm, ReadsAhead)
    norm.forget()
