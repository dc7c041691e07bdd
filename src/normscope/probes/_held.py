"""One held graph of the stream, for one sequence: what every Jacobian of the probe is a sub-map of.

Only the stream needs a graph, so parameters inside blocks do not require grad and those outside (embeddings)
do: the first block's entry then has a graph, and no activation is saved for a weight's gradient.

    B sequences, T tokens, d features
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from normscope.anatomy import Anatomy, Block, Site, Stack, capture
from normscope.anatomy.calls import strip_wrappers
from normscope.linalg import NO_PATH, JacobianOperator, TangentError
from normscope.subjects import Batch, Subject, call_model

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
        op = JacobianOperator(y, x)
        if not op.connected() and (edge := _before_in_place(x)) is not None:
            op = JacobianOperator(y, x, edge=edge)
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
                f"its derivative is not that of its forward: it is off by {off:.0%} "
                "against finite differences (a part without gradient, or a backward of its own)"
            )
        return True

    def _finite(self, site: Site) -> Tensor:
        if site not in self.tensors:
            raise TangentError(f"{site.op} number {site.nth} of {site.module or 'the model'} did not come by")
        tensor = self.tensors[site]
        if not bool(torch.isfinite(tensor.detach()).all()):
            raise TangentError("the values there are not finite")
        return tensor


def hold(subject: Subject, anatomy: Anatomy, *, tokens: int | None = None) -> HeldGraph:
    """Run one sequence and hold its graph. Call it inside `measuring` and `untouched`.

    Args:
        subject: model and batch.
        anatomy: where to look.
        tokens: feed only so many tokens of the sequence; then no finite differences are taken.
    """
    _stream_only(subject.model, anatomy.blocks)
    sites = set(_sites(anatomy))
    tensors, fed, note = _one_sequence(subject, anatomy, sites, tokens)
    shifted: dict[Site, tuple[Tensor, Tensor]] = {}
    if not tokens:
        subject.model.requires_grad_(False)
        for stack in anatomy.stacks:
            shifted |= _shifted(subject.model, fed, stack, tensors)
    return HeldGraph(tensors, shifted, note)


def _sites(part: Anatomy | Stack) -> Iterator[Site]:
    for block in part.blocks:
        yield from (block.entry, block.exit)
        for branch in block.branches:
            yield from (branch.entry, branch.output)
            yield from (attention.query for attention in branch.attention)


def _stream_only(model: nn.Module, blocks: Iterable[Block]) -> None:
    """Only floating parameters outside blocks require grad."""
    inside = tuple(f"{block.path}." for block in blocks)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            parameter.is_floating_point() and not strip_wrappers(name).startswith(inside)
        )


def _one_sequence(
    subject: Subject, anatomy: Anatomy, sites: set[Site], tokens: int | None
) -> tuple[dict[Site, Tensor], Batch, str]:
    """(tensors, what was fed, note) of one sequence; of the whole batch where the model does not take one."""
    axis = 0
    fed = _first(subject.batch, 0, 1)
    try:
        tensors = _run(subject.model, fed, sites)
        if _one_token_left(anatomy, tensors) and _first_shape(subject.batch)[1:2] > (1,):
            axis = 1  # token-major: the first axis held tokens
            fed = _first(subject.batch, 1, 1)
            tensors = _run(subject.model, fed, sites)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if tokens:
            raise
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        note = f"the whole batch at once, since one sequence alone fails ({first_line})"
        return _run(subject.model, subject.batch, sites), subject.batch, note
    if tokens:
        fed = _first(fed, 1 - axis, tokens)
        tensors = _run(subject.model, fed, sites)
    return tensors, fed, "B = 1"


def _run(model: nn.Module, batch: Batch, sites: set[Site]) -> dict[Site, Tensor]:
    """Tensors at sites; floating inputs are roots of the graph too."""
    rooted = _map(batch, lambda t: t.detach().requires_grad_().clone() if t.is_floating_point() else t)
    return capture(model, lambda: call_model(model, rooted), sites)[1]


def _shifted(
    model: nn.Module, fed: Batch, stack: Stack, tensors: Mapping[Site, Tensor]
) -> dict[Site, tuple[Tensor, Tensor]]:
    """Tensors of `stack` with its entry shifted by ±hδ, from two more forwards without a graph."""
    if not stack.blocks or stack.blocks[0].entry not in tensors:
        return {}
    first = stack.blocks[0]
    entry = tensors[first.entry].detach()
    shift = STEP * float(entry.double().square().mean().sqrt()) * torch.randn_like(entry)
    plus, minus = (_entering(model, fed, stack, entry, signed) for signed in (shift, -shift))
    return {site: (plus[site], minus[site]) for site in plus.keys() & minus.keys()}


def _entering(model: nn.Module, fed: Batch, stack: Stack, entry: Tensor, shift: Tensor) -> dict[Site, Tensor]:
    """Tensors of `stack` with `shift` added where the stream enters it, as an argument of its first block.

    Empty where the first block is no module, or does not take the stream as an argument.
    """
    first = stack.blocks[0]
    modules = {strip_wrappers(name): module for name, module in model.named_modules()}
    if first.path not in modules or first.call > 0:
        return {}
    moved = entry + shift  # made here: an add in the hook would count as one of the block's ops
    done = False

    def shifted(value: Any) -> Any:
        nonlocal done
        if done or not isinstance(value, Tensor) or not torch.equal(value, entry):
            return value
        done = True
        return moved

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        args = tuple(shifted(value) for value in args)
        return args, {name: shifted(value) for name, value in kwargs.items()}

    handle = modules[first.path].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        _, found = capture(model, lambda: call_model(model, fed), set(_sites(stack)))
    finally:
        handle.remove()
    return {**found, first.entry: moved} if done else {}


def _before_in_place(tensor: Tensor) -> GradientEdge | None:
    """Where in the graph a tensor is that `capture` copied before an in-place op; None for any other."""
    node = tensor.grad_fn
    if node is None or node.name() != "CloneBackward0":
        return None
    source, number = node.next_functions[0]
    return None if source is None else GradientEdge(source, number)


def _one_token_left(anatomy: Anatomy, tensors: Mapping[Site, Tensor]) -> bool:
    """Whether attention now runs over a single token."""
    queries = [a.query for branch in anatomy.branches for a in branch.attention if a.query in tensors]
    return bool(queries) and tensors[queries[0]].shape[-2] == 1


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """`batch` with its floating tensors in `dtype`."""
    return _map(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _first(batch: Batch, axis: int, count: int) -> Batch:
    """The first `count` along `axis` of every tensor that is as long there as the batch's first tensor."""
    size = _first_shape(batch)[axis : axis + 1]
    if not size:
        return batch

    def cut(tensor: Tensor) -> Tensor:
        return (
            tensor.narrow(axis, 0, min(count, size[0])) if tensor.shape[axis : axis + 1] == size else tensor
        )

    return _map(batch, cut)


def _first_shape(batch: Any) -> torch.Size:
    """Shape of the first tensor of a batch, () where it has none."""
    if isinstance(batch, Tensor):
        return batch.shape
    if not isinstance(batch, Mapping | tuple | list):
        return torch.Size()
    values = batch.values() if isinstance(batch, Mapping) else batch
    return next((shape for shape in map(_first_shape, values) if shape), torch.Size())


def _map(batch: Any, change: Any) -> Any:
    """`batch` with every tensor changed; mappings come back as dicts."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: _map(value, change) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        changed = [_map(value, change) for value in batch]
        return tuple(changed) if isinstance(batch, tuple) else changed
    return batch
