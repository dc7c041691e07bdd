"""Log singular values of products of many square factors, J = J_L ⋯ J_1: a deep stack's Jacobian.

The plain product loses every σ below ε σ_max, and soon over- or underflows. Here the product is kept graded,
Q diag(2^e) T (`graded.py`), and one-sided Jacobi on diag(2^e) T (`graded_svd.py`) gives σ. Singular values
that are exactly zero (a norm's kernel) give log σ = −∞.

No residual shows the error: an error in the middle of a product changes σ more, the more the factors on both
sides cancel. So the product is repeated from a random rotation of the input (σ does not change), with a
random relative error in every entry of every factor, of the size of its own error. The change of σ is the
error estimate (stochastic arithmetic).

Sources: Vignes 1993, for the errors; those of `graded.py` and `graded_svd.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor
from torch.nn import functional as F

from normscope.linalg.dense import dense
from normscope.linalg.golub_kahan import LinearMap, Status
from normscope.linalg.products.graded import Graded
from normscope.linalg.products.graded_svd import log_singular_values

SAFETY = 20.0
"""Error over the largest change seen at a σ or its neighbours: large, because the samples are few."""

NEIGHBOURS = 2  # number of σ on each side whose changes count

KERNEL_ROUND_OFF = 4.0
"""In units of d ε: a sum that is smaller than this, relative to its terms, counts as zero."""


@dataclass(frozen=True)
class ProductSpectrum:
    """log σ of products, with errors.

    Attributes:
        log_values: log σ [..., d], natural, descending, −inf for the kernel; float64.
        error: estimate of |error of log σ| in nats [..., d]; 0 in the kernel, inf where a repetition did not
            agree about the kernel.
        rank: number of finite log σ [...].
        gap: ratio of the least |R_ii| that counted to the largest treated as round-off, both relative to the
            expected round-off [...]; inf without a kernel; near 1 the rank is uncertain.
        products: products with the factors spent; 0 for dense factors.
        status: CONVERGED where all errors are ≤ tol.
    """

    log_values: Tensor = field(repr=False)
    error: Tensor = field(repr=False)
    rank: Tensor
    gap: Tensor
    products: int
    status: Status


def product_log_singular_values(
    factors: Tensor | Sequence[LinearMap],
    *,
    tol: float = 1e-9,
    factor_error: float | None = None,
    seed: int = 0,
) -> ProductSpectrum:
    """log σ of J_L ⋯ J_1, of each of a batch of products.

    Costs three QR decompositions and four matrix products per factor (six below d = 4, where fewer σ show the
    error), O(L d³); a `LinearMap` also costs d products (`dense`).

    Args:
        factors: dense, [..., L, d, d] with J_1 first, or L square maps, J_1 first, one made dense at a time.
        tol: error in nats up to which the status is CONVERGED.
        factor_error: relative error of the factors' entries; by default ε of their dtype. A column under 4 d
            times this error, relative to the others, counts as a kernel.
        seed: of the repetitions.

    Raises:
        ValueError: the factors are not square or not of one size, or there are none.
        FloatingPointError: a factor is not finite.

    Examples:
        >>> halves = torch.diag(torch.tensor([0.5, 0.25], dtype=torch.float64)).expand(2000, 2, 2)
        >>> product_log_singular_values(halves).log_values  # the product itself would be zero
        tensor([-1386.2944, -2772.5887], dtype=torch.float64)
    """
    lead, d, length = factor_sizes(factors)
    repetitions = 2 if d >= 4 else 5  # few σ have few neighbours
    if factor_error is None:
        factor_error = torch.finfo(factors.dtype if isinstance(factors, Tensor) else factors[0].dtype).eps
    generator = torch.Generator().manual_seed(seed)
    state: Graded | None = None
    for factor in dense_factors(factors):
        copies = _disturbed(factor, repetitions, factor_error, generator)
        if state is None:
            state = Graded.of(_starts(factor, repetitions, generator))
        state = state.times(copies, KERNEL_ROUND_OFF * d * factor_error)
    assert state is not None
    values, cosine = log_singular_values(state)
    values = values.unflatten(0, (1 + repetitions, -1))
    error = _error(values, length, cosine)
    kept, dropped = (x.unflatten(0, (1 + repetitions, -1))[0] for x in (state.kept, state.dropped))
    return ProductSpectrum(
        log_values=values[0].reshape(*lead, d),
        error=error.reshape(*lead, d),
        rank=values[0].isfinite().sum(-1).reshape(lead),
        gap=torch.where(dropped > 0, kept / dropped, inf).reshape(lead),
        products=0 if isinstance(factors, Tensor) else length * d,
        status=Status.CONVERGED if bool((error <= tol).all()) else Status.NOT_CONVERGED,
    )


def dense_factors(factors: Tensor | Sequence[LinearMap]) -> Iterator[Tensor]:
    """J_1, J_2, … in float64, each [B, d, d], B the product of the leading axes; made one at a time."""
    each = factors.unbind(-3) if isinstance(factors, Tensor) else map(dense, factors)
    for number, factor in enumerate(each):
        if not bool(factor.isfinite().all()):
            raise FloatingPointError(f"factor {number + 1} is not finite")
        yield factor.detach().double().reshape(-1, *factor.shape[-2:])


def factor_sizes(factors: Tensor | Sequence[LinearMap]) -> tuple[tuple[int, ...], int, int]:
    """Leading axes, d and L."""
    if isinstance(factors, Tensor):
        if factors.dim() < 3 or factors.shape[-1] != factors.shape[-2] or 0 in factors.shape:
            raise ValueError(
                f"factors of shape {list(factors.shape)}: expected [..., L, d, d], none of them 0"
            )
        return tuple(factors.shape[:-3]), factors.shape[-1], factors.shape[-3]
    shapes = {tuple(op.shape) for op in factors}
    if len(shapes) != 1 or len(set(*shapes)) != 1:
        raise ValueError(f"factors of shapes {sorted(shapes)}: expected at least one, all d×d of one d")
    return (), factors[0].shape[0], len(factors)


def _starts(factor: Tensor, repetitions: int, generator: torch.Generator) -> Tensor:
    """Q_0 [(1 + repetitions)·B, d, d]: the identity, then random rotations."""
    batch, d, _ = factor.shape
    gaussian = torch.randn(repetitions * batch, d, d, generator=generator, dtype=torch.float64)
    rotations = torch.linalg.qr(gaussian.to(factor.device))[0]
    eye = torch.eye(d, dtype=factor.dtype, device=factor.device)
    return torch.cat((eye.expand(batch, d, d), rotations))


def _disturbed(factor: Tensor, repetitions: int, size: float, generator: torch.Generator) -> Tensor:
    """J, then J ⊙ (1 + ε·N(0, 1)) `repetitions` times: [(1 + repetitions)·B, d, d]."""
    noise = torch.randn(repetitions, *factor.shape, generator=generator, dtype=torch.float64)
    copies = factor * (1 + size * noise.to(factor.device))
    return torch.cat((factor, copies.flatten(0, 1)))


def _error(values: Tensor, length: int, cosine: float) -> Tensor:
    """Error [B, d] of values [0] from the others: the largest change nearby, times SAFETY, above a floor."""
    d = values.shape[-1]
    first, others = values[0], values[1:]
    both_zero = (first == -inf) & (others == -inf).all(0)
    change = torch.where(both_zero, 0.0, (others - first).abs()).nan_to_num(inf, inf).amax(0)
    window = 2 * NEIGHBOURS + 1
    nearby = F.max_pool1d(change.unsqueeze(1), window, stride=1, padding=NEIGHBOURS).squeeze(1)
    eps = torch.finfo(torch.float64).eps
    floor = 4 * eps * ((length * d) ** 0.5 + first.abs()) + d * max(cosine - 4 * d**0.5 * eps, 0.0)
    return torch.where(both_zero, 0.0, torch.where(first.isfinite(), SAFETY * nearby + floor, inf))
