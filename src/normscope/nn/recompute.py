"""Activation checkpointing of one module: it keeps its inputs, and runs again in the backward pass."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint


class Recomputed:
    """Base of the classes of recomputed modules."""


def run_again_later(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`call(*args, **kwargs)`, which runs `module`, with activation checkpointing.

    The call keeps only its inputs and is made again in the backward pass, with the same dropout draws and the
    same buffers (Chen et al. 2016, arXiv:1604.06174). Running statistics and power iterations thus advance
    once a step. Inside of another such call, its inputs are not kept either.
    """
    inputs, rebuilt = _by_position(args, kwargs)

    def flat(*inputs: Any) -> Any:
        args, kwargs = rebuilt(inputs)
        return call(*args, **kwargs)

    if not any(True for _ in module.buffers()):
        return checkpoint(flat, *inputs, use_reentrant=False)
    if torch.compiler.is_compiling():
        # A compiled region cannot restore buffers, and the compiler itself chooses what to recompute.
        return call(*args, **kwargs)
    before = _Before(module)
    return checkpoint(flat, *inputs, use_reentrant=False, context_fn=lambda: (before.only_changed(), before))


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _by_position(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], Callable[[Sequence[Any]], Arguments]]:
    """Each argument once, and the function that makes the arguments of them.

    PyTorch lets an outer call drop only what is given by position, and gives the second run another object
    for each position. Attention, which asks whether query and key are the same object, must get the same one.
    """
    given = [*args, *kwargs.values()]
    inputs = list({id(each): each for each in given}.values())
    index = {id(each): position for position, each in enumerate(inputs)}
    places, names, count = [index[id(each)] for each in given], tuple(kwargs), len(args)

    def rebuilt(inputs: Sequence[Any]) -> Arguments:
        given = [inputs[place] for place in places]
        return tuple(given[:count]), dict(zip(names, given[count:], strict=True))

    return inputs, rebuilt


class _Before:
    """Restore the module's current buffers in a context, so that its second run sees the same."""

    def __init__(self, module: nn.Module) -> None:
        self.values = [
            (each, name, buffer.clone())
            for each in module.modules()
            for name, buffer in each._buffers.items()
            if buffer is not None
        ]
        self.later: list[Tensor | None] = []

    @contextlib.contextmanager
    def only_changed(self) -> Iterator[None]:
        """Drop the copies of the buffers that the block leaves as they are: causal masks can be large."""
        buffers = self._buffers()
        yield
        changes = [
            now is not buffer or _differ(now, value)
            for buffer, now, (_, _, value) in zip(buffers, self._buffers(), self.values, strict=True)
        ]
        self.values = [value for value, is_new in zip(self.values, changes, strict=True) if is_new]

    def __enter__(self) -> None:
        self.later = self._buffers()
        for module, name, value in self.values:
            module._buffers[name] = value.clone()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for (module, name, _), buffer in zip(self.values, self.later, strict=True):
            module._buffers[name] = buffer

    def _buffers(self) -> list[Tensor | None]:
        return [module._buffers[name] for module, name, _ in self.values]


def _differ(now: Tensor | None, before: Tensor) -> bool:
    """Whether two tensors have other values; of fake ones, without values, whether `now` was written to."""
    if now is None:
        return True
    if isinstance(now, FakeTensor):
        return now._version > 0
    return not torch.equal(now, before)
