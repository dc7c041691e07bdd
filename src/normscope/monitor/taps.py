"""The tensors of the residual stream to watch, and hooks that hold them in a forward."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from normscope.anatomy import Anatomy, Branch, Site, measuring
from normscope.anatomy.names import named_modules
from normscope.anatomy.taps import Tap, find_taps
from normscope.monitor.hook import Hook
from normscope.monitor.in_place import CompiledCalls, is_compiled
from normscope.monitor.reductions import square


@dataclass(frozen=True)
class Stream:
    """One tensor to watch.

    Attributes:
        kind: "stream", or "branch" for a term that is added.
        site: its name in rows: a block's site, "<stack>.input", "<stack>.hidden", or a branch's site.
        place: the site in the forward.
        beside: of a branch, the name of the stream that it is added to, as it was before.
    """

    kind: str
    site: str
    place: Site
    beside: Site | None = None


def streams_of(anatomy: Anatomy) -> Iterator[Stream]:
    """The stream at every block, and the term of every branch, in the order of the forward."""
    for stack in anatomy.stacks:
        yield Stream("stream", f"{stack.name}.input", stack.blocks[0].entry)
        for block in stack.blocks:
            before = block.entry
            for branch in block.branches:
                yield Stream("branch", branch.site, branch.output, _read(branch, before))
                before = branch.sum
            yield Stream("stream", block.site, block.exit)
        yield Stream("stream", f"{stack.name}.hidden", stack.hidden)


def _read(branch: Branch, before: Site) -> Site:
    """The stream that the branch is added to: what it reads, or with several streams their state before."""
    return branch.entry if branch.join != "streams" else before


@dataclass(frozen=True)
class Held:
    """A tensor of a forward, and its ‖x‖² (a scalar) if that was taken at once."""

    tensor: Tensor
    square: Tensor | None


class Taps:
    """Hooks that hold the tapped tensors of a forward, from `open` to `taken`.

    On a CPU ‖x‖² is taken in the hook, where the tensor is still in the cache.

    Args:
        model: the module whose modules are hooked.
        places: tap of each column.
    """

    def __init__(self, model: nn.Module, places: Mapping[int, Tap]) -> None:
        self._is_open = False
        self._held: dict[int, Held] = {}
        self._calls: dict[str, int] = {}
        self._handles: list[RemovableHandle | CompiledCalls] = []
        modules = dict(named_modules(model))
        by_path: dict[str, list[tuple[int, Tap]]] = defaultdict(list)
        for column, tap in places.items():
            by_path[tap.path].append((column, tap))
        self._hooks = [(modules[path], self._hook(path, taps)) for path, taps in by_path.items()]

    def attach(self) -> None:
        """Set the hooks."""
        if not self._handles:
            self._handles = [_hooked(module, hook) for module, hook in self._hooks]

    def remove(self) -> None:
        """Remove the hooks, and free what a forward that raised has left."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._held = [], {}

    def open(self) -> None:
        """A forward begins."""
        self._is_open, self._held, self._calls = True, {}, {}

    def taken(self) -> dict[int, Held]:
        """The tensors of the forward that has ended, by column; those that no hook saw are absent."""
        held, self._is_open, self._held = self._held, False, {}
        return held

    def _hook(self, path: str, taps: list[tuple[int, Tap]]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or not self._is_open:
                # A compiler only traces the call, and must not see `_is_open`, on which it would compile
                # the code again. A checkpointed block runs again in the backward.
                return
            call = self._calls.get(path, 0)
            self._calls[path] = call + 1
            for column, tap in taps:
                if tap.call == call and (tensor := tap.tensor(args, output)) is not None:
                    self._held[column] = _held(tensor)

        return hook


def _hooked(module: nn.Module, hook: Callable[..., None]) -> RemovableHandle | CompiledCalls:
    """The hook at the end of the module's forwards, outside of the module's own compiled code."""
    if is_compiled(module):
        return CompiledCalls(module, lambda module, args, kwargs, output: hook(module, args, output))
    return module.register_forward_hook(Hook(hook))


def _held(tensor: Tensor) -> Held:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):  # its norm would be a collective
        tensor = tensor.to_local()
    return Held(tensor, square(tensor) if tensor.is_cpu else None)


def places_of(model: nn.Module, run: Callable[[], Any], wanted: Iterable[Site]) -> dict[Site, Tap]:
    """Taps of the sites in the state of `measuring`, in which sites have their names."""
    with measuring(model), torch.enable_grad():
        return find_taps(model, run, wanted)
