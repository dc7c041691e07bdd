"""One held graph of the stream, for one sequence: every Jacobian of the probe is a sub-map of it.

Only the stream needs a graph. So parameters inside blocks do not require grad, and those outside (embeddings)
do: the first block's entry has a graph, and no activation is saved for a weight's gradient. Where the
embedding runs under no_grad, the first block receives a tensor that requires grad.

Every forward starts from the model's original state. The graph's forward is the last one, so that none of its
saved tensors is overwritten.

    B sequences, T tokens, d features
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from normscope.anatomy import Anatomy, Block, Site, Stack, capture, named_modules, named_parameters
from normscope.linalg import NO_PATH, JacobianOperator, TangentError
from normscope.probes.backward import behind_copy
from normscope.probes.jacobian.derivative import FINER, STEPS, Moves
from normscope.probes.jacobian.one_sequence import Feed, sites_of
from normscope.subjects import Batch, call_model, untouched
from normscope.subjects.feed import map_tensors

Tensors = dict[Site, Tensor]


@dataclass
class HeldGraph:
    """Tensors at sites with one graph over them.

    Attributes:
        tensors: site → tensor, where the forward computed it.
        entries: entry of a stack → the copy of it that the first block received.
        shifted: site → movement of the tensor when the stack's entry is shifted, without graph. Absent for
            stacks whose first block does not take the stream as an argument.
        shift: returns `shifted` at other steps; costs four forwards per stack.
        note: "B = 1", or why it is not.
    """

    tensors: Tensors
    entries: Tensors
    shifted: Mapping[Site, Moves]
    shift: Callable[[tuple[float, float]], Mapping[Site, Moves]]
    note: str

    @cached_property
    def finer(self) -> Mapping[Site, Moves]:
        """`shifted` at the steps `FINER`."""
        return self.shift(FINER)

    @cached_property
    def eps(self) -> float:
        """ε of the coarsest precision in the forward: under autocast, bfloat16's."""
        return max(torch.finfo(t.dtype).eps for t in self.tensors.values() if t.is_floating_point())

    def operator(self, source: Site, target: Site) -> JacobianOperator:
        """Jacobian of the tensor at `target` by the one at `source`.

        Raises:
            TangentError: a tensor was not computed or is not finite, or no path leads from one to the other.
        """
        x, y = (self._finite(site) for site in (source, target))
        op = JacobianOperator.on_graph(y, x)
        if not op.connected() and (edge := behind_copy(x)) is not None:
            op = JacobianOperator.on_graph(y, x, edge=edge)
        if not op.connected():
            raise TangentError(NO_PATH)
        return op

    def has_second_way(self, source: Site, target: Site) -> bool:
        """Whether the stream also reaches `target` around the first block, for example by a skip.

        Finite differences move only the argument of the first block. Costs two products.
        """
        if source not in self.entries or self.entries[source] is self.tensors[source]:
            return False
        y = self.tensors[target]
        (u,) = torch.randn(1, *y.shape, generator=torch.Generator().manual_seed(0)).to(y)
        whole, part = torch.autograd.grad(
            y, [self.tensors[source], self.entries[source]], u, retain_graph=True, allow_unused=True
        )
        return whole is not None and (part is None or not torch.allclose(whole, part, rtol=1e-3, atol=1e-6))

    def is_bypassed(self, start: Site, source: Site, target: Site) -> bool:
        """Whether a stack's entry at `start` also reaches `target` around `source`: a value residual does.

        Finite differences move the entry, and so both ways. Costs three products.
        """
        entry = self.entries.get(start)
        x, y = self.tensors[source], self.tensors[target]
        if entry is None or start == source:
            return False
        (u,) = torch.randn(1, *y.shape, generator=torch.Generator().manual_seed(0)).to(y)
        whole, part = torch.autograd.grad(y, [entry, x], u, retain_graph=True, allow_unused=True)
        if whole is None or part is None:
            return whole is not None
        (through,) = torch.autograd.grad(x, [entry], part, retain_graph=True, allow_unused=True)
        return through is None or float((whole - through).norm()) > 1e-3 * float(whole.norm())

    def _finite(self, site: Site) -> Tensor:
        if site not in self.tensors:
            where = site.module or "the model"
            raise TangentError(f"this forward did not run {site.op} number {site.nth} of {where}")
        tensor = self.tensors[site]
        if not bool(torch.isfinite(tensor.detach()).all()):
            raise TangentError("the values there are not finite")
        return tensor


def hold(model: nn.Module, anatomy: Anatomy, feed: Feed, steps: tuple[float, float] = STEPS) -> HeldGraph:
    """Run one sequence and hold its graph. Call it inside `measuring` and `untouched`.

    Costs one forward, and four for each stack with its entry shifted.
    """
    _stream_only(model, anatomy.blocks)

    def shift(steps: tuple[float, float]) -> dict[Site, Moves]:
        stacks = anatomy.stacks
        return {site: moves for s in stacks for site, moves in _shifted(model, feed, s, steps).items()}

    shifted = shift(steps)
    # Floating-point inputs are roots of the graph too: a model may have no parameter before its first block.
    roots = map_tensors(lambda t: _with_graph(t) if t.is_floating_point() else t, feed.batch)
    entries: Tensors = {}
    found: Tensors = {}
    with ExitStack() as hooks:
        for stack in anatomy.stacks:
            hooks.enter_context(_entering(model, feed, stack, _handed_on, entries, found))
        tensors = _tensors(model, roots, feed, sites_of(anatomy))
    for site, entry in found.items():
        tensors[site] = entry if entry.requires_grad else entries[site]
    return HeldGraph(tensors, entries, shifted, shift, feed.note)


def _handed_on(value: Tensor) -> Tensor:
    """A copy that follows the tensor in its graph; a root of a new graph where there is none."""
    return value.clone() if value.requires_grad else _with_graph(value)


def _with_graph(value: Tensor) -> Tensor:
    """The tensor itself where it is in a graph, else a copy that is."""
    return value if value.requires_grad else value.detach().requires_grad_().clone()


def _tensors(model: nn.Module, batch: Batch, feed: Feed, sites: Iterable[Site]) -> Tensors:
    """Tensors at sites, under the anatomy's names for them."""
    sites = list(sites)
    _, found = capture(model, lambda: call_model(model, batch), {feed.names[site] for site in sites})
    return {site: found[feed.names[site]] for site in sites if feed.names[site] in found}


def _stream_only(model: nn.Module, blocks: Iterable[Block]) -> None:
    """Only floating parameters outside blocks require grad."""
    inside = tuple(f"{block.path}." for block in blocks)
    for name, parameter in named_parameters(model):
        parameter.requires_grad_(parameter.is_floating_point() and not name.startswith(inside))


def _shifted(model: nn.Module, feed: Feed, stack: Stack, steps: tuple[float, float]) -> dict[Site, Moves]:
    """Movement of the tensors of `stack` with its entry, at two steps; empty where it cannot be moved."""
    first = stack.blocks[0].entry
    if first not in feed.values:
        return {}
    entry = feed.values[first]
    normal = torch.randn(entry.shape, generator=torch.Generator().manual_seed(7919)).to(entry)
    direction = normal * float(entry.double().square().mean().sqrt())
    moves: list[Tensors] = []
    for step in steps:
        plus, minus = (_moved(model, feed, stack, entry + sign * step * direction) for sign in (1, -1))
        if not (plus and minus):
            return {}
        both = plus.keys() & minus.keys()
        moves.append({site: (plus[site].double() - minus[site].double()) / (2 * step) for site in both})
    long, short = moves
    return {site: (long[site], short[site]) for site in long.keys() & short.keys()}


def _moved(model: nn.Module, feed: Feed, stack: Stack, moved: Tensor) -> Tensors:
    """Tensors of `stack`, without graph, with `moved` as its entry; empty where no block took it."""
    entries: Tensors = {}
    with untouched(model), _entering(model, feed, stack, lambda _: _with_graph(moved), entries, {}):
        found = _tensors(model, feed.batch, feed, sites_of(stack))
    first = stack.blocks[0].entry
    return {site: t.detach() for site, t in (found | {first: moved}).items()} if entries else {}


@contextmanager
def _entering(
    model: nn.Module,
    feed: Feed,
    stack: Stack,
    change: Callable[[Tensor], Tensor],
    entries: Tensors,
    found: Tensors,
) -> Iterator[None]:
    """Hand the first block of `stack` a changed entry wherever it takes the stream as an argument.

    `change` makes the entry, and `entries` records it; empty where the first block is not a module of its own
    or does not take the stream as an argument. `found` records the original entry.
    """
    block = stack.blocks[0]
    modules = dict(named_modules(model))
    entry = feed.values.get(block.entry)
    if entry is None or block.path not in modules or block.call > 0:
        yield
        return
    num_calls = 0

    def replaced(value: Tensor) -> Tensor:
        if value.numel() != entry.numel() or not torch.equal(value.detach().reshape(entry.shape), entry):
            return value
        if value.shape == entry.shape:
            found.setdefault(block.entry, value)
        entries[block.entry] = change(value.reshape(entry.shape))
        return entries[block.entry].reshape(value.shape)

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            return None
        with _disable_current_modes():  # or these ops would count as the block's
            return tree_map_only(Tensor, replaced, (args, kwargs))

    handle = modules[block.path].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
