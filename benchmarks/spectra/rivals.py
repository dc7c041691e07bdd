"""σ_max by normscope and by alternatives, each from f and x alone, including set-up.

normscope stops by its own estimate. The rivals have the advantage of hindsight: they are stopped by the true
error, which a user does not know. LOBPCG and the power iteration stop as soon as they are within the
tolerance. ARPACK runs with its defaults, and with the setting with the fewest products among those within the
tolerance from each of two starts (ncv of 3 to 20, tol of 0.3 and 0.1).
"""

import warnings
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse.linalg
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor, nn

from benchmarks.spectra.stack import Map
from normscope.linalg import Bidiagonalisation, JacobianOperator, sigma_max

TOLERANCE = 1e-2
"""True relative error of σ_max that all methods must reach."""


NCV, TOL = 10, 0.3
"""ARPACK's cheapest setting for GPT-2-small's stack."""


class Found(NamedTuple):
    """σ_max by one method, and the number of products with J and Jᵀ that it took."""

    value: float
    products: int


def ours(f: Map, x: Tensor, seed: int, confidence: float) -> Found:
    """`sigma_max` with its own estimate of 1 % error at this confidence."""
    found = sigma_max(JacobianOperator(f, x, seed=seed), tol=TOLERANCE, confidence=confidence)
    return Found(found.value, found.products)


def ours_with_hindsight(f: Map, x: Tensor, seed: int, reference: float) -> Found:
    """The same process, stopped like the rivals; the rest of the cost of `ours` is its error estimate."""
    process = Bidiagonalisation(JacobianOperator(f, x), seed=seed)
    value = 0.0
    while abs(value - reference) > TOLERANCE * reference and not process.exhausted:
        process.step()
        value = float(process.ritz_values()[0])
    return Found(value, process.products)


def svds(op: LinearOperator, seed: int, ncv: int | None, tol: float) -> Found:
    """scipy's `svds` of an operator: ARPACK on JᵀJ with `ncv` Lanczos vectors."""
    counted = Counted(op)
    (value,) = scipy.sparse.linalg.svds(
        counted, k=1, ncv=ncv, tol=tol, return_singular_vectors=False, rng=seed
    )
    return Found(float(value), counted.products)


def our_operator(f: Map, x: Tensor) -> LinearOperator:
    """∂f/∂x by normscope's products."""
    return JacobianOperator(f, x).to_scipy()


def lobpcg(f: Map, x: Tensor, seed: int, steps: int, value: float) -> Found:
    """scipy's LOBPCG on JᵀJ from one random start, with normscope's products, for `steps` steps.

    If it is stopped early, scipy returns the step with the least absolute residual, which is the start, and
    cuts the history there. `value` is therefore that of a longer run at the same step.
    """
    op = Counted(our_operator(f, x))
    _lobpcg(op, seed, steps)
    return Found(value, op.products)


def lobpcg_steps(f: Map, x: Tensor, seed: int, reference: float) -> tuple[int, float]:
    """The first of 20 steps at which LOBPCG is within the tolerance of `reference`, and its value there."""
    history = _lobpcg(our_operator(f, x), seed, 20)
    reached = (each for each in enumerate(history) if abs(each[1] - reference) <= TOLERANCE * reference)
    return next(reached, (20, history[-1]))


def _lobpcg(op: LinearOperator, seed: int, steps: int) -> list[float]:
    """σ_max after 0, 1, … steps."""
    square = LinearOperator(
        (op.shape[1], op.shape[1]), matvec=lambda v: op.rmatvec(op.matvec(v)), dtype=op.dtype
    )
    start = np.random.default_rng(seed).standard_normal((op.shape[1], 1)).astype(op.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it stops before its own tolerance on purpose
        *_, history = scipy.sparse.linalg.lobpcg(
            square, start, maxiter=steps, tol=1e-5, largest=True, retLambdaHistory=True
        )
    return [float(np.sqrt(np.max(values))) for values in history]


def power_iteration(f: Map, x: Tensor, seed: int, reference: float) -> Found:
    """v ← JᵀJv with normscope's products, stopped as soon as ‖Jv‖ is within the tolerance of `reference`."""
    op = JacobianOperator(f, x)
    v = torch.randn(x.numel(), generator=torch.Generator().manual_seed(seed)).to(x.device, x.dtype)
    value = 0.0
    while op.products + 2 <= 1000:
        u = op.matvec(v / v.norm())
        value = float(u.norm())
        if abs(value - reference) <= TOLERANCE * reference:
            break
        v = op.rmatvec(u)
    return Found(value, op.products)


def jacrev_svd(f: Map, x: Tensor) -> Found:
    """The whole Jacobian by `torch.func.jacrev`, and its singular values."""
    jacobian = torch.func.jacrev(f, chunk_size=256)(x).reshape(-1, x.numel())
    return Found(float(torch.linalg.svdvals(jacobian)[0]), len(jacobian))


class Counted(LinearOperator):
    """An operator that counts the vectors to which it is applied."""

    def __init__(self, of: LinearOperator) -> None:
        super().__init__(of.dtype, of.shape)
        self.of, self.products = of, 0

    def _matvec(self, v: Any) -> Any:
        self.products += 1
        return self.of.matvec(v)

    def _rmatvec(self, u: Any) -> Any:
        self.products += 1
        return self.of.rmatvec(u)


class _AtInput(nn.Module):
    """f with its input as the only parameter, because curvlinops differentiates by parameters."""

    def __init__(self, f: Map, x: Tensor) -> None:
        super().__init__()
        self.f, self.x = f, nn.Parameter(x.detach().clone())

    def forward(self, ignored: Tensor) -> Tensor:
        return self.f(self.x)


def curvlinops_operator(f: Map, x: Tensor) -> LinearOperator:
    """∂f/∂x by curvlinops, without its own checks and counts, which would cost it forwards.

    Raises:
        ModuleNotFoundError: curvlinops is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from its imports
        from curvlinops import JacobianLinearOperator
    module, ignored = _AtInput(f, x), torch.zeros(len(x), 1)
    operator = JacobianLinearOperator(
        module, [module.x], [(ignored, ignored)], check_deterministic=False, num_data=len(x)
    )
    return operator.to_scipy()
