"""Tests of log σ of products against multi-precision SVDs and telescoping factors; their stated errors."""

from math import inf, log

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normscope.linalg import Status, product_log_singular_values
from normscope.linalg.products.graded import Graded
from normscope.linalg.products.graded_svd import log_singular_values
from normscope.linalg.products.jacobi import jacobi_log_lengths
from normscope.linalg.products.lyapunov import lyapunov_exponents

F64 = torch.float64
Stack = Tensor


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def rotations(count: int, d: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(gaussian(count, d, d, seed=seed))[0]


def telescope(diagonals: Tensor, seed: int = 0) -> Stack:
    """J_l = U_l diag(s_l) U_{l−1}ᵀ for `diagonals` [L, d]: the product is U_L diag(Π s_l) U_0ᵀ."""
    u = rotations(len(diagonals) + 1, diagonals.shape[1], seed)
    return u[1:] @ torch.diag_embed(diagonals) @ u[:-1].transpose(-1, -2)


def multiprecision(factors: Stack, digits: int = 900) -> Tensor:
    """log σ of the product in arithmetic of `digits` digits; values under half of those are a kernel."""
    with mpmath.workdps(digits):
        product = mpmath.eye(factors.shape[-1])
        for factor in factors.double().tolist():
            product = mpmath.matrix(factor) * product
        values = mpmath.svd_r(product, compute_uv=False)
        zero = max(values) * mpmath.mpf(10) ** (-digits // 2)
        logs = [float(mpmath.log(s)) if s > zero else -inf for s in values]
    return torch.tensor(logs, dtype=F64).sort(descending=True).values


def assert_within(found: Tensor, expected: Tensor, error: Tensor | float) -> None:
    """Assert the same kernel, and values within `error` elsewhere."""
    assert torch.equal(found.isfinite(), expected.isfinite())
    gap = torch.where(expected.isfinite(), (found - expected).abs(), 0.0)
    assert bool((gap <= error).all()), f"{gap} above {error}"


def centring(d: int) -> Tensor:
    return torch.eye(d, dtype=F64) - 1 / d


def stacks() -> dict[str, Stack]:
    eye = torch.eye(5, dtype=F64)
    decay = torch.diag(torch.logspace(0, -2, 5, dtype=F64))
    norms = torch.stack([eye + 0.3 * gaussian(5, 5, seed=i) if i % 2 else centring(5) for i in range(80)])
    return {
        "gaussian": gaussian(150, 5, 5),
        "residual": eye + 0.3 * gaussian(200, 5, 5),
        "decay": gaussian(100, 5, 5) @ decay,
        "repeated σ": 3 * rotations(100, 5),
        "shear": torch.tensor([[1.0, 3.0], [0.0, 1.0]], dtype=F64).expand(60, 2, 2),
        "rank 2": gaussian(40, 5, 2) @ gaussian(40, 2, 5, seed=1),
        "norms between": norms,
        "one of them singular": torch.cat((gaussian(9, 5, 5), centring(5)[None], gaussian(9, 5, 5, seed=1))),
        "scalars": gaussian(100, 1, 1),
        "one factor": gaussian(1, 5, 5),
        "tiny": 1e-300 * gaussian(20, 5, 5),
        "huge": 1e300 * gaussian(20, 5, 5),
        "zero": torch.zeros(3, 4, 4, dtype=F64),
        "there and back": telescope(torch.stack([torch.logspace(s, -s, 5, dtype=F64) for s in (1, -1)] * 3)),
    }


@pytest.mark.parametrize("factors", stacks().values(), ids=stacks())
def test_against_a_multiprecision_svd(factors: Stack) -> None:
    found = product_log_singular_values(factors)
    expected = multiprecision(factors)
    assert_within(found.log_values, expected, found.error)
    assert_within(found.log_values, expected, 1e-9)
    assert found.status is Status.CONVERGED
    assert bool((found.error <= 1e-9).all())
    assert int(found.rank) == int(expected.isfinite().sum())
    assert found.products == 0
    assert float(found.gap) > 1e6  # inf without a kernel


@pytest.mark.parametrize("d", [3, 7, 24])
def test_a_thousand_layers_that_telescope(d: int) -> None:
    rates = -torch.linspace(0, 3, d, dtype=F64)
    rates[d // 2] = rates[0]  # repeated
    factors = telescope(rates.exp().expand(1000, d))
    found = product_log_singular_values(factors)
    expected = (1000 * rates).sort(descending=True).values  # down to −3000 nats
    assert_within(found.log_values, expected, 1e-9)
    assert_within(found.log_values, expected, found.error)
    assert found.status is Status.CONVERGED
    plain = torch.linalg.svdvals(torch.linalg.multi_dot([*factors.flip(0)])).log()
    assert not bool((plain - expected).abs().amax() < 300)  # what float64 makes of the product itself


def test_a_thousand_layers_with_a_kernel_that_is_carried_along() -> None:
    diagonals = torch.tensor([2.0, 1.0, 0.5, 0.0], dtype=F64).expand(1000, 4)
    found = product_log_singular_values(telescope(diagonals))
    expected = torch.tensor([1000 * log(2), 0.0, -1000 * log(2), -inf], dtype=F64)
    assert_within(found.log_values, expected, 1e-9)
    assert int(found.rank) == 3
    assert float(found.error[3]) == 0
    assert float(found.gap) > 1e9


def test_kernels_that_do_not_meet_add_up() -> None:
    zero_at = torch.ones(2, 4, dtype=F64)
    zero_at[0, 0], zero_at[1, 3] = 0, 0
    found = product_log_singular_values(telescope(zero_at))
    assert_within(found.log_values, torch.tensor([0.0, 0.0, -inf, -inf], dtype=F64), 1e-12)


def test_columns_that_lie_over_one_another_come_last() -> None:
    a, b, c = gaussian(3, 3)
    parallel = torch.stack((8 * a, 4 * a, b), 1)  # by size the dependent column would be the second
    nearly = torch.stack((8 * a, 4 * a + 1e-7 * c, b), 1)
    for first, error in ((parallel, 1e-12), (nearly, 1e-7)):
        factors = torch.cat((first[None], gaussian(20, 3, 3)))
        assert_within(product_log_singular_values(factors).log_values, multiprecision(factors), error)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    d=st.integers(1, 6),
    length=st.integers(1, 40),
    decades=st.floats(0, 9),
    zeros=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
def test_no_error_is_understated(d: int, length: int, decades: float, zeros: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    exponents = -decades * torch.rand(length, d, generator=generator, dtype=F64)
    exponents[:, d - min(zeros, d - 1) :] = -inf
    u, v = rotations(length, d, seed), rotations(length, d, seed + 1)
    factors = u @ torch.diag_embed(10**exponents) @ v
    # rounding changes the rank of the factors; the diagonals give the intended rank
    found = product_log_singular_values(factors, tol=1e-7, seed=seed)
    expected = multiprecision_of_meant(u, exponents, v)
    honest = torch.isinf(found.error) | (found.log_values == expected)
    honest |= (found.log_values - expected).abs() <= found.error
    assert bool(honest.all()), f"{found.log_values - expected} above {found.error}"
    assert (found.status is Status.CONVERGED) == bool((found.error <= 1e-7).all())


def multiprecision_of_meant(u: Tensor, exponents: Tensor, v: Tensor) -> Tensor:
    with mpmath.workdps(700):
        product = mpmath.eye(u.shape[-1])
        for left, powers, right in zip(u.tolist(), (10**exponents).tolist(), v.tolist(), strict=True):
            product = mpmath.matrix(left) * (mpmath.diag(powers) * (mpmath.matrix(right) * product))
        values = mpmath.svd_r(product, compute_uv=False)
        zero = max(values) * mpmath.mpf(10) ** -600
        logs = [float(mpmath.log(s)) if s > zero else -inf for s in values]
    return torch.tensor(logs, dtype=F64).sort(descending=True).values


def test_an_ill_conditioned_middle_is_not_called_converged() -> None:
    there = torch.logspace(0, -8, 6, dtype=F64)
    factors = telescope(torch.stack([there, there.flip(0)]))
    found = product_log_singular_values(factors)
    expected = multiprecision(factors)
    assert found.status is Status.NOT_CONVERGED
    assert float((found.log_values - expected).abs().max()) > 1e-9  # else the status would be too shy
    assert_within(found.log_values, expected, found.error)


def test_the_error_of_the_entries_can_be_said() -> None:
    rough = telescope(torch.logspace(0, -3, 6, dtype=F64).expand(20, 6)).float().double()
    exact = product_log_singular_values(rough)
    known = product_log_singular_values(rough, factor_error=torch.finfo(torch.float32).eps)
    assert float(exact.error.max()) < 1e-9 < float(known.error.max())
    assert known.status is Status.NOT_CONVERGED
    meant = 20 * torch.logspace(0, -3, 6, dtype=F64).log()
    assert_within(known.log_values, meant, known.error)


class Matrix:
    """A dense map without `matmat`."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.dtype, self.device = matrix, matrix.dtype, matrix.device
        self.shape = tuple(matrix.shape)

    def matvec(self, v: Tensor) -> Tensor:
        return self.matrix @ v

    def rmatvec(self, u: Tensor) -> Tensor:
        return self.matrix.T @ u


class Batched(Matrix):
    def matmat(self, vectors: Tensor) -> Tensor:
        return vectors @ self.matrix.T


@pytest.mark.parametrize("kind", [Matrix, Batched])
def test_maps_are_as_their_matrices(kind: type[Matrix]) -> None:
    factors = gaussian(30, 4, 4)
    found = product_log_singular_values([kind(f) for f in factors])
    dense = product_log_singular_values(factors)
    assert torch.equal(found.log_values, dense.log_values)
    assert found.products == 30 * 4
    assert torch.equal(
        lyapunov_exponents([kind(f) for f in factors]).values, lyapunov_exponents(factors).values
    )
    half = product_log_singular_values([kind(f.float()) for f in factors])  # known to float32's ε only
    assert_within(half.log_values, dense.log_values, half.error)
    assert 1e-9 < float(half.error.max()) < 1e-2


def test_a_batch_is_its_products_one_by_one() -> None:
    factors = gaussian(2, 3, 25, 4, 4)
    factors[1, 2, 7] = centring(4)
    found = product_log_singular_values(factors)
    exponents = lyapunov_exponents(factors)
    assert found.log_values.shape == found.error.shape == exponents.values.shape == (2, 3, 4)
    assert found.rank.tolist() == [[4, 4, 4], [4, 4, 3]]
    for i in range(2):
        for j in range(3):
            alone = product_log_singular_values(factors[i, j])
            assert_within(found.log_values[i, j], alone.log_values, 1e-11)
            torch.testing.assert_close(exponents.values[i, j], lyapunov_exponents(factors[i, j]).values)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"\[\.\.\., L, d, d\]"):
        product_log_singular_values(torch.zeros(3, 4, 5))
    with pytest.raises(ValueError, match="at least one"):
        product_log_singular_values([])
    with pytest.raises(ValueError, match="all d×d of one d"):
        product_log_singular_values([Matrix(torch.eye(3)), Matrix(torch.eye(4))])
    factors = gaussian(5, 3, 3)
    factors[2, 0, 0] = inf
    with pytest.raises(FloatingPointError, match="factor 3"):
        product_log_singular_values(factors)


@pytest.mark.parametrize("r", [1, 2, 5, 8])
@pytest.mark.parametrize("bits", [0, 40, 1200, 3000])
def test_jacobi_alone_on_scales_beyond_float64(r: int, bits: int) -> None:
    t = torch.eye(r, dtype=F64) + 0.4 * gaussian(r, r, seed=r) / r**0.5
    exponents = -(torch.linspace(0, 1, r, dtype=F64) * bits).round().flip(0)
    logs, cosine = jacobi_log_lengths(t.clone(), exponents)
    with mpmath.workdps(2500):
        rows = [
            [x * mpmath.mpf(2) ** int(e) for x in row] for row, e in zip(t.tolist(), exponents, strict=True)
        ]
        values = mpmath.svd_r(mpmath.matrix(rows), compute_uv=False)
        expected = torch.tensor([float(mpmath.log(s)) for s in values], dtype=F64)
    assert_within(logs.sort().values, expected.sort().values, 1e-12 * (1 + bits))
    assert cosine <= 1e-14
    graded = Graded.of(torch.eye(r, dtype=F64)[None])
    state = Graded(graded.q, exponents[None], t[None], graded.kept, graded.dropped)
    assert_within(log_singular_values(state)[0][0].sort().values, expected.sort().values, 1e-12 * (1 + bits))


def test_lyapunov_exponents_are_not_log_singular_values() -> None:
    shear = torch.tensor([[1.0, 3.0], [0.0, 1.0]], dtype=F64).expand(60, 2, 2)
    exponents = lyapunov_exponents(shear)
    log_values = product_log_singular_values(shear).log_values
    assert float(exponents.values.abs().max()) < 1e-12
    assert float(log_values[0]) == pytest.approx(log(180), abs=1e-3)  # σ₁ of [[1, 3·60], [0, 1]]
    assert float(log_values.sum()) == pytest.approx(0, abs=1e-12)


def test_a_confidence_that_is_none_is_reported() -> None:
    with pytest.raises(ValueError, match="confidence=95"):
        lyapunov_exponents(torch.eye(2).expand(40, 2, 2), confidence=95)


def test_lyapunov_exponents_sum_to_log_det_and_tend_to_log_sigma() -> None:
    factors = gaussian(2000, 3, 3, seed=1)
    found = lyapunov_exponents(factors)
    log_values = product_log_singular_values(factors).log_values
    log_det = float(torch.linalg.slogdet(factors)[1].mean())
    assert float(found.values.sum()) == pytest.approx(log_det, abs=1e-12)
    assert float((found.values - log_values / 2000).abs().max()) < 5e-3
    # Gaussian factors: 2 λ_i = log 2 + ψ((d − i + 1)/2) (Newman 1986)
    exact = (log(2) + torch.special.digamma(torch.tensor([1.5, 1.0, 0.5], dtype=F64))) / 2
    assert_within(found.values, exact, found.error)
    assert float(found.error.max()) < 0.15
    assert bool(torch.isinf(lyapunov_exponents(factors[:19]).error).all())


def test_a_kernel_of_float32_factors_is_seen_at_their_own_round_off() -> None:
    generator = torch.Generator().manual_seed(4)
    factors = torch.randn(3, 8, 8, dtype=torch.float64, generator=generator)
    factors[1] = factors[1] @ (torch.eye(8, dtype=torch.float64) - 1 / 8)
    assert int(product_log_singular_values(factors.float()).rank) == 7
