"""Comparison with other implementations: copy weights by a table, then compare outputs and gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """Place in their module of the weight and the bias of one map of ours.

    Attributes:
        path: path in their module, "*" standing for weight or bias.
        third: 0, 1 or 2 where q, k and v lie in one tensor.
        transposed: whether a matrix is held as (in, out).
    """

    path: str
    third: int | None = None
    transposed: bool = False

    def view(self, theirs: Tensor) -> Tensor:
        """Their tensor as ours holds it: a weight or its gradient."""
        held = theirs.mT if self.transposed and theirs.dim() == 2 else theirs
        return held if self.third is None else held.chunk(3)[self.third]


Table = Mapping[str, str | Part]
"""Module of ours → "path.*" or a `Part` of theirs."""


def under(ours: str, theirs: str, table: Table) -> dict[str, Part]:
    """The same table for submodules: `ours.name` ↔ `theirs.path`."""
    parts = {name: part if isinstance(part, Part) else Part(part) for name, part in table.items()}
    return {
        f"{ours}.{name}": Part(f"{theirs}.{part.path}", part.third, part.transposed)
        for name, part in parts.items()
    }


def _pairs(ours: nn.Module, theirs: nn.Module, table: Table) -> Iterator[tuple[str, Tensor, Tensor, Part]]:
    """Pairs of parameters of both models; the table must have every parameter of both."""
    held, left = dict(theirs.named_parameters()), {name for name, _ in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        module, _, leaf = name.rpartition(".")
        entry = table[module]
        part = entry if isinstance(entry, Part) else Part(entry)
        path = part.path.replace("*", leaf)
        left.discard(path)
        yield name, parameter, held[path], part
    assert not left, f"weights of theirs that the table leaves out: {sorted(left)}"


@torch.no_grad()
def copy_weights(ours: nn.Module, theirs: nn.Module, table: Table) -> None:
    """Copy their weights into ours, after changing γ, β and biases, whose initial values hide mistakes."""
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.3 * torch.randn_like(parameter))
    for _, mine, other, part in _pairs(ours, theirs, table):
        mine.copy_(part.view(other))


def assert_parity(
    ours: nn.Module,
    theirs: nn.Module,
    table: Table,
    run_ours: Callable[..., Tensor],
    run_theirs: Callable[..., Tensor],
    inputs: Sequence[Tensor] = (),
    tolerance: float = 1e-5,
) -> None:
    """Require equal outputs, gradients of inputs and gradients of weights.

    Args:
        run_ours, run_theirs: from `inputs` to an output.
        tolerance: of a difference, in the largest entry of theirs or in 1 where all are smaller.
    """
    copy_weights(ours, theirs, table)
    grads, outputs = [], []
    for run in (run_ours, run_theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = run(*leaves)
        torch.manual_seed(1)
        (output * torch.randn_like(output)).sum().backward()
        outputs.append(output.detach())
        grads.append([leaf.grad for leaf in leaves])
    _assert_near("output", *outputs, tolerance)
    for index, (mine, other) in enumerate(zip(*grads, strict=True)):
        _assert_near(f"gradient of input {index}", mine, other, tolerance)
    for name, mine, other, part in _pairs(ours, theirs, table):
        assert mine.grad is not None, name
        assert other.grad is not None, name
        _assert_near(f"gradient of {name}", mine.grad, part.view(other.grad), tolerance)


def _assert_near(what: str, mine: Tensor, other: Tensor, tolerance: float) -> None:
    assert mine.shape == other.shape
    assert other.abs().max() > 0, f"{what}: nothing to compare"
    allowed = tolerance * max(1.0, float(other.abs().max()))
    torch.testing.assert_close(mine, other, rtol=0, atol=allowed, msg=lambda text: f"{what}: {text}")
