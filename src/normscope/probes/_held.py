"""One held graph of the stream, for one sequence: what every Jacobian of the probe is a sub-map of.

Only the stream needs a graph, so parameters inside blocks do not require grad and those outside (embeddings)
do: the first block's entry then has a graph, and no activation is saved for a weight's gradient.

    B sequences, T tokens, d features
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from normscope.anatomy import Anatomy, Block, Site, Stack, capture, named_modules, named_parameters
from normscope.linalg import NO_PATH, JacobianOperator, TangentError
from normscope.probes._backward import behind_copy
from normscope.probes._feeding import Feed, mapped, sites_of
from normscope.subjects import Batch, call_model

STEP = 1e-3
"""Size of the finite difference, relative to the stream's RMS."""

TANGENT_TOLERANCE = 0.2
"""Relative distance, at the median token, from which a tangent is not that of the forward."""


@dataclass
class HeldGraph:
    """Tensors at sites with one graph over them.

    Attributes:
        tensors: site → tensor, those that came by.
        shifted: site → (tensor at entry + hδ, tensor at entry − hδ), without graph: finite differences.
            Absent for stacks whose first block does not take the stream as an argument.
        note: what was fed, in words.
    """

    tensors: dict[Site, Tensor]
    shifted: dict[Site, tuple[Tensor, Tensor]]
    note: str

    def operator(self, source: Site, target: Site) -> JacobianOperator:
        """Jacobian of the tensor at `target` by the one at `source`.

        Raises:
            TangentError: where one did not come by, is not finite, or no path leads from one to the other.
        """
        x, y = (self._finite(site) for site in (source, target))
        op = JacobianOperator.on_graph(y, x)
        if not op.connected() and (edge := behind_copy(x)) is not None:
            op = JacobianOperator.on_graph(y, x, edge=edge)
        if not op.connected():
            raise TangentError(NO_PATH)
        return op

    def check_tangent(self, op: JacobianOperator, source: Site, target: Site) -> bool:
        """Hold one Jv against finite differences of the forward; False where there are none.

        Tokens are compared one by one and the median decides: a router that flips under the shift moves few
        tokens, a wrong derivative moves all.

        Raises:
            TangentError: where they differ.
        """
        if source not in self.shifted or target not in self.shifted:
            return False
        dx, dy = (
            self.shifted[site][0].double() - self.shifted[site][1].double() for site in (source, target)
        )
        jdx = op.matvec(dx.reshape(-1)).double().reshape(dy.shape)
        eps = torch.finfo(op.dtype).eps
        round_off = 8 * eps * (self.tensors[target].detach().double().norm(dim=-1) + jdx.norm(dim=-1) / STEP)
        gap, size = (jdx - dy).norm(dim=-1), dy.norm(dim=-1)
        if float((gap - round_off).median()) > TANGENT_TOLERANCE * float(size.median()):
            off = float(gap.median() / size.median())
            raise TangentError(
                f"its derivative is not that of its forward: off by {off:.0%} against finite differences "
                "(a part without gradient, a backward of its own, or a second way in)"
            )
        return True

    def _finite(self, site: Site) -> Tensor:
        if site not in self.tensors:
            raise TangentError(f"{site.op} number {site.nth} of {site.module or 'the model'} did not come by")
        tensor = self.tensors[site]
        if not bool(torch.isfinite(tensor.detach()).all()):
            raise TangentError("the values there are not finite")
        return tensor


def hold(model: nn.Module, anatomy: Anatomy, feed: Feed, *, differences: bool = True) -> HeldGraph:
    """Run one sequence and hold its graph. Call it inside `measuring` and `untouched`.

    Args:
        model: the model.
        anatomy: where to look.
        feed: what to run.
        differences: also run two forwards a stack with its entry shifted, for `check_tangent`.
    """
    _stream_only(model, anatomy.blocks)
    # Floating inputs are roots of the graph too: a model may have no parameter before its first block.
    roots = mapped(feed.batch, lambda t: t.detach().requires_grad_().clone() if t.is_floating_point() else t)
    tensors = _tensors(model, roots, feed, sites_of(anatomy))
    shifted: dict[Site, tuple[Tensor, Tensor]] = {}
    if differences:
        model.requires_grad_(False)
        for stack in anatomy.stacks:
            shifted |= _shifted(model, feed, stack, tensors)
    return HeldGraph(tensors, shifted, feed.note)


def _tensors(model: nn.Module, batch: Batch, feed: Feed, sites: Iterable[Site]) -> dict[Site, Tensor]:
    """Tensors at sites, under the anatomy's names for them."""
    sites = list(sites)
    _, found = capture(model, lambda: call_model(model, batch), {feed.names[site] for site in sites})
    return {site: found[feed.names[site]] for site in sites if feed.names[site] in found}


def _stream_only(model: nn.Module, blocks: Iterable[Block]) -> None:
    """Only floating parameters outside blocks require grad."""
    inside = tuple(f"{block.path}." for block in blocks)
    for name, parameter in named_parameters(model):
        parameter.requires_grad_(parameter.is_floating_point() and not name.startswith(inside))


def _shifted(
    model: nn.Module, feed: Feed, stack: Stack, tensors: Mapping[Site, Tensor]
) -> dict[Site, tuple[Tensor, Tensor]]:
    """Tensors of `stack` with its entry shifted by ±hδ, from two more forwards without a graph."""
    if not stack.blocks or stack.blocks[0].entry not in tensors:
        return {}
    entry = tensors[stack.blocks[0].entry].detach()
    shift = STEP * float(entry.double().square().mean().sqrt()) * torch.randn_like(entry)
    plus, minus = (_entering(model, feed, stack, entry, entry + signed) for signed in (shift, -shift))
    return {site: (plus[site], minus[site]) for site in plus.keys() & minus.keys()}


def _entering(model: nn.Module, feed: Feed, stack: Stack, entry: Tensor, moved: Tensor) -> dict[Site, Tensor]:
    """Tensors of `stack` with `moved` in place of `entry` wherever the first block takes that as an argument.

    Empty where the first block is no module, or does not take the stream as an argument.
    """
    first_block = stack.blocks[0]
    modules = dict(named_modules(model))
    if first_block.path not in modules or first_block.call > 0:
        return {}
    num_calls = num_moved = 0

    def replaced(value: Any) -> Any:
        nonlocal num_moved
        if not isinstance(value, Tensor) or value.numel() != entry.numel():
            return value
        if not torch.equal(value.reshape(entry.shape), entry):
            return value
        num_moved += 1
        return moved.reshape(value.shape)

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            return None
        with _disable_current_modes():  # or these ops would count as the block's
            return tuple(map(replaced, args)), {name: replaced(value) for name, value in kwargs.items()}

    handle = modules[first_block.path].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with warnings.catch_warnings():  # reentrant checkpoints warn where nothing requires grad, as here
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
            found = _tensors(model, feed.batch, feed, sites_of(stack))
    finally:
        handle.remove()
    return {**found, first_block.entry: moved} if num_moved else {}
