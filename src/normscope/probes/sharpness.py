"""The largest eigenvalue of the loss's Hessian, plain and preconditioned by Adam.

Gradient descent is stable on a quadratic while η λ_max < 2 (Cohen et al. 2021, arXiv:2103.00065). For Adam
the bound is on P⁻¹H: λ_max(P⁻¹H) < (2 + 2β₁)/((1 − β₁) η), which is 38/η for β₁ = 0.9, with P = (1 −
β₁ᵗ)(√(v/(1 − β₂ᵗ)) + ε) (Cohen et al. 2022, arXiv:2207.14484). Here t = 1: P = (1 − β₁)(|g| + ε). Lanczos
iteration with full reorthogonalisation on P^-½ H P^-½, because `normscope.linalg` has singular values and the
bound is on the largest signed eigenvalue.

Read: the abstract and summaries of arXiv:2207.14484, and P, the bound and the weight decay in the source
and the code of arXiv:2601.16979, which uses them; not the text of arXiv:2207.14484 itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.train.optim import betas
from normscope.train.recipe import ADAM_EPS, Recipe

STEPS, TOLERANCE = 30, 1e-2


@dataclass(frozen=True)
class Largest:
    """The largest Ritz value, its residual ‖Av − θv‖, and the number of products."""

    value: float
    residual: float
    products: int


def largest_eigenvalue(
    product: Callable[[Tensor], Tensor], start: Tensor, steps: int = STEPS, tolerance: float = TOLERANCE
) -> Largest:
    """Largest eigenvalue of a symmetric map by Lanczos, until the residual is under `tolerance`·|θ|."""
    rows = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    value = residual = 0.0
    for done in range(1, min(steps, start.numel()) + 1):
        image = product(rows[-1])
        diagonal.append(float(image @ rows[-1]))
        basis = torch.stack(rows)
        for _ in range(2):
            image = image - basis.T @ (basis @ image)
        matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        for i, entry in enumerate(beside):
            matrix[i, i + 1] = matrix[i + 1, i] = entry
        values, vectors = torch.linalg.eigh(matrix)
        length = float(image.norm())
        value, residual = float(values[-1]), length * abs(float(vectors[-1, -1]))
        if residual <= tolerance * abs(value) or length <= 1e-12 * float(values.abs().max()):
            return Largest(value, residual, done)
        beside.append(length)
        rows.append(image / length)
    return Largest(value, residual, len(diagonal))


def loss_eigenvalue(
    flat: Tensor, weights: Sequence[Tensor], scale: Tensor | None = None, steps: int = STEPS
) -> Largest:
    """λ_max of P^-½ H P^-½, H the Hessian of a loss by `weights`.

    Args:
        flat: gradient of the loss by all `weights`, with its graph.
        scale: diagonal of P; None is the identity.
        steps: most products with H.
    """
    root = None if scale is None else scale.sqrt()

    def product(v: Tensor) -> Tensor:
        v = v if root is None else v / root
        found = torch.autograd.grad(
            flat @ v, weights, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        image = torch.cat([h.reshape(-1) for h in found]).detach()
        return image if root is None else image / root

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(flat.shape, generator=generator, dtype=flat.dtype).to(flat.device)
    with torch.enable_grad():
        return largest_eigenvalue(product, start, steps)


def preconditioner(gradient: Tensor, recipe: Recipe) -> Tensor:
    """P of Adam's first step, by parameter."""
    eps = ADAM_EPS if recipe.eps is None else recipe.eps
    return (1 - betas(recipe)[0]) * (gradient.abs() + eps)


def stable_below(recipe: Recipe) -> float:
    """Bound of η λ_max(P⁻¹H) for Adam: (2 + 2β₁)/(1 − β₁)."""
    own = betas(recipe)[0]
    return (2 + 2 * own) / (1 - own)
