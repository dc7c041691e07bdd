"""Taps: the places in a model's module calls where tensors of the forward can be read cheaply.

The anatomy names tensors by ops, which only a dispatch mode can count; that is too slow for every step. Most
of these tensors are inputs or outputs of a module, where a hook can read them.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from normscope.anatomy.capture import capture
from normscope.anatomy.names import named_modules
from normscope.anatomy.types import Site
from normscope.subjects.feed import tensors_of

T = TypeVar("T")


@dataclass(frozen=True)
class Tap:
    """Place of a tensor in a call of a module.

    Attributes:
        path: path of the module, wrappers stripped.
        call: which call of it in a forward, 0 first.
        is_input: whether the tensor is an argument, else it is in the output.
        index: which of the tensors there.
    """

    path: str
    call: int
    is_input: bool
    index: int

    def tensor(self, args: Any, output: Any) -> Tensor | None:
        """The tensor among the arguments and the output of the call; None if there are fewer."""
        value = args if self.is_input else output
        return next(itertools.islice(tensors_of(value), self.index, None), None)


@dataclass(frozen=True)
class Tapped:
    """A captured tensor and its tap; None where no module receives or returns it."""

    tensor: Tensor
    tap: Tap | None


def find_taps(model: nn.Module, run: Callable[[], Any], sites: Iterable[Site]) -> dict[Site, Tap]:
    """The tap of each site that a module's call receives or returns; the others are absent.

    `run` is one forward. Call it where the model may run: in eval mode a Dropout returns the tensor that it
    was given, so that of several places the last one is taken, which in training is behind the Dropout. A
    view of the tensor with as many elements counts as the tensor.
    """
    found = capture_with_taps(model, run, sites)[1]
    return {site: each.tap for site, each in found.items() if each.tap is not None}


def capture_with_taps(
    model: nn.Module, run: Callable[[], T], sites: Iterable[Site], *, views: bool = True
) -> tuple[T, dict[Site, Tapped]]:
    """As `capture`, with the tap of each tensor, see `find_taps`.

    Args:
        views: whether a view of the tensor counts as the tensor. Only the tensor itself is the one that
            `torch.autograd.grad` finds in the graph of the loss.
    """
    seen: list[tuple[Tap, Tensor]] = []
    calls: Counter[str] = Counter()
    key = _values if views else id
    with ExitStack() as held:
        for path, module in named_modules(model):
            if path:  # what the whole model returns depends on its arguments: with labels, a loss comes first
                held.callback(_hooked(module, _recorder(path, calls, seen)).remove)
        result, found = capture(model, run, sites)
    by_tensor: dict[Any, Tap] = {}
    for tap, tensor in sorted(seen, key=lambda each: not each[0].is_input):  # outputs replace inputs
        by_tensor[key(tensor)] = tap
    return result, {site: Tapped(tensor, by_tensor.get(key(tensor))) for site, tensor in found.items()}


def read_taps(
    model: nn.Module, run: Callable[[], T], taps: Mapping[Site, Tap]
) -> tuple[T, dict[Site, Tensor]]:
    """As `capture` of the sites of `taps`, by hooks on their modules; sites that did not run are absent."""
    found: dict[Site, Tensor] = {}
    by_path: dict[str, list[tuple[Site, Tap]]] = defaultdict(list)
    for site, tap in taps.items():
        by_path[tap.path].append((site, tap))
    with ExitStack() as held:
        for path, module in named_modules(model):
            if path in by_path:
                held.callback(_hooked(module, _reader(by_path.pop(path), found)).remove)
        result = run()
    return result, found


def _hooked(module: nn.Module, hook: Callable[..., None]) -> Any:
    # Registered through the base class: a traced module refuses its own method, but runs hooks.
    return nn.Module.register_forward_hook(module, hook)


def _recorder(path: str, calls: Counter[str], seen: list[tuple[Tap, Tensor]]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        call = calls[path]
        calls[path] += 1
        for is_input, value in ((True, args), (False, output)):
            # Held until the end, so that no address is given to another tensor.
            seen.extend((Tap(path, call, is_input, i), each) for i, each in enumerate(tensors_of(value)))

    return hook


def _reader(wanted: Iterable[tuple[Site, Tap]], found: dict[Site, Tensor]) -> Callable[..., None]:
    calls = itertools.count()

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        call = next(calls)
        for site, tap in wanted:
            if tap.call == call and (tensor := tap.tensor(args, output)) is not None:
                found[site] = tensor

    return hook


def _values(tensor: Tensor) -> tuple[Any, ...]:
    """Identity of a tensor's values: views of the same memory with as many elements are the same."""
    storage = tensor.untyped_storage()
    address = storage._cdata if isinstance(tensor, FakeTensor) else storage.data_ptr()
    return address, tensor.storage_offset(), tensor.numel(), tensor.shape[-1:]
