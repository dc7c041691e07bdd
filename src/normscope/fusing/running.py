"""A fused model's forward: each planned add also computes the norm behind it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from normscope.errors import UsageError
from normscope.fusing.adds import Add, Adds
from normscope.fusing.checking import Situation, run, same_values, situation
from normscope.fusing.pairs import Pair
from normscope.kernels.ahead import ReadsAhead, saved_tensor_hooks
from normscope.kernels.checks import fit
from normscope.kernels.dispatch import Backend
from normscope.kernels.plain import is_plain

Place = tuple[str, int]
"""Path of a holder, and number of the add in its call."""


@dataclass
class Running:
    """Hooks and classes that fuse the pairs of a model. A copy of the model has its own.

    Attributes:
        norms: the norm of each pair.
        dtypes: the dtype of a norm in the situations that were checked; None where the pair is not fused.
    """

    pairs: dict[Place, Pair]
    norms: dict[Place, nn.Module]
    dtypes: dict[tuple[Place, Situation], torch.dtype | None]
    backend: Backend | None
    adds: Adds = field(init=False)

    def __post_init__(self) -> None:
        self.adds = Adds(self._computed)

    def install(self, model: nn.Module) -> None:
        """Hook the model and its modules that add, and make its norms read ahead."""
        for norm in dict.fromkeys(self.norms.values()):
            norm.__class__ = type(f"Fused{type(norm).__name__}", (ReadsAhead, type(norm)), _REFUSALS)
        holders = {holder for holder, _ in self.pairs}
        self.adds.watch(model, holders, {pair.norm for pair in self.pairs.values()})
        self.adds.handles += [
            model.register_forward_pre_hook(self._start, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        """Take everything back that `install` did."""
        self._leave()
        self.adds.unwatch()
        for norm in dict.fromkeys(self.norms.values()):
            first, *rest = type(norm).__bases__
            if first is ReadsAhead:  # else somebody derived a class from it, for example a parametrization
                norm.__class__ = rest[0]

    def _computed(self, path: str, nth: int, add: Add) -> Tensor | None:
        """The sum, after its norm is computed with it; None where the model's own code is to run."""
        place = (path, nth)
        if place not in self.pairs:
            return None
        pair, norm = self.pairs[place], self.norms[place]
        if not _can_run(add, *pair.gains(norm)):
            return None
        dtype = self._dtype(place, pair, norm, add)
        if dtype is None:
            return None
        normed, stream = run(pair, norm, add, dtype, self.backend)
        assert isinstance(norm, ReadsAhead)
        norm.expect(stream, normed)
        return stream

    def _dtype(self, place: Place, pair: Pair, norm: nn.Module, add: Add) -> torch.dtype | None:
        """The dtype of the norm; the first add in a new situation is checked."""
        key = (place, situation(pair, norm, add))
        if key not in self.dtypes:
            assert isinstance(norm, ReadsAhead)
            found = same_values(pair, norm, norm.without_reading, add, self.backend)
            self.dtypes[key] = None if isinstance(found, str) else found
        return self.dtypes[key]

    def _start(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # the compiler fuses by itself
            return
        self._leave()  # a forward that Ctrl-C ended calls no hook
        self.adds.mode().__enter__()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        """End the mode of the forward that runs in this thread, and drop what no norm asked for."""
        mode = self.adds.running()
        if mode is not None and _get_current_function_mode() is mode:
            mode.__exit__(None, None, None)
        for norm in self.norms.values():
            assert isinstance(norm, ReadsAhead)
            norm.forget()


def _refuse_to_script(norm: nn.Module) -> nn.Module:
    """Refuse `torch.jit.script`, which asks each module for this, before it fails inside the hooks."""
    raise UsageError(
        "torch.jit.script of a model that is fused",
        "a model without hooks in Python",
        "call undo() of the object that fuse returned before you script the model",
    )


_REFUSALS = {"__prepare_scriptable__": _refuse_to_script}


def _can_run(add: Add, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether an add can be fused here and now.

    Weights may be sharded or elsewhere until the norm is called (FSDP, a model on several devices). What
    activation checkpointing computes twice has to be the same both times. In inference mode PyTorch does not
    count changes in place, by which a norm knows that its sum is as it was.
    """
    arrays = (add.skip, add.branch, weight, bias)
    if torch.is_inference_mode_enabled() or saved_tensor_hooks() is not None or add.skip.is_meta:
        return False
    return is_plain(arrays) and fit(*arrays)
