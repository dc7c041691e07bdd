"""Tests of the norms' closed forms against autograd in float64."""

import pytest
import torch
from torch import Tensor

from normscope.linalg import (
    layer_norm_jacobian,
    left_kernel,
    left_kernel_share,
    right_kernel,
    rms_norm_jacobian,
)

D = 12


def norm(z: Tensor, gamma: Tensor | None, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """(ẑ, y), written out."""
    middle = z - z.mean(-1, keepdim=True) if centred else z
    normalised = middle / torch.sqrt(middle.square().mean(-1, keepdim=True) + eps)
    return normalised, normalised if gamma is None else gamma * normalised


def gammas() -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    dense = torch.randn(D, generator=generator, dtype=torch.float64) + 0.3
    one, two = dense.clone(), dense.clone()
    one[4] = 0
    two[[1, 7]] = 0
    wide = torch.logspace(-3, 3, D, dtype=torch.float64)
    return {"none": None, "dense": dense, "one-zero": one, "two-zeros": two, "wide": wide}


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("gamma", gammas().values(), ids=gammas())
def test_erased_share_is_that_of_the_dense_left_kernel(gamma: Tensor | None, centred: bool) -> None:
    z = torch.randn(D, dtype=torch.float64) * 3 + 1
    g = torch.randn(D, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: norm(x, gamma, 0.0, centred)[1], z)
    u, s, _ = torch.linalg.svd(jacobian)
    kernel = u[:, s < 1e-12 * s[0]]
    expected = (kernel.T @ g).square().sum() / g.square().sum()
    share = left_kernel_share(g, norm(z, gamma, 0.0, centred)[0], gamma, centred)
    torch.testing.assert_close(share, expected, rtol=1e-8, atol=1e-12)
    tiny = left_kernel_share(g * 1e-200, norm(z, gamma, 0.0, centred)[0], gamma, centred)
    torch.testing.assert_close(tiny, share)  # squares of 1e-200 are zero


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("gamma", gammas().values(), ids=gammas())
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
def test_closed_form_is_the_jacobian_autograd_gives(gamma: Tensor | None, eps: float, centred: bool) -> None:
    z = torch.randn(3, D, dtype=torch.float64) * 2 + 1
    closed = (layer_norm_jacobian if centred else rms_norm_jacobian)(z, gamma, eps)
    for token, jacobian in zip(z, closed, strict=True):
        expected = torch.autograd.functional.jacobian(lambda x: norm(x, gamma, eps, centred)[1], token)
        torch.testing.assert_close(jacobian, expected, rtol=1e-10, atol=1e-12)


def test_closed_form_is_that_of_the_library_norms() -> None:
    z, gamma = torch.randn(D, dtype=torch.float64), torch.randn(D, dtype=torch.float64)
    functions = {
        layer_norm_jacobian: lambda x: torch.nn.functional.layer_norm(x, (D,), gamma, eps=1e-3),
        rms_norm_jacobian: lambda x: torch.nn.functional.rms_norm(x, (D,), gamma, eps=1e-3),
    }
    for closed, function in functions.items():
        expected = torch.autograd.functional.jacobian(function, z)
        torch.testing.assert_close(closed(z, gamma, 1e-3), expected)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3, 1e4])
def test_singular_values_without_gamma(eps: float, centred: bool) -> None:
    z = torch.randn(3, D, dtype=torch.float64) * 2 + 1
    values = torch.linalg.svdvals((layer_norm_jacobian if centred else rms_norm_jacobian)(z, None, eps))
    variance = (z.var(-1, correction=0) if centred else z.square().mean(-1)).unsqueeze(-1)
    others = values[:, : -2 if centred else -1]
    torch.testing.assert_close(others, (variance + eps).rsqrt().expand_as(others), rtol=1e-9, atol=1e-15)
    at_z = values[:, -2:-1] if centred else values[:, -1:]
    torch.testing.assert_close(at_z, eps / (variance + eps) ** 1.5, rtol=1e-9, atol=1e-15)
    if centred:
        assert float(values[:, -1].max()) < 1e-15


def test_a_constant_token_has_no_direction_of_its_own() -> None:
    z = torch.full((D,), 3.0, dtype=torch.float64)
    values = torch.linalg.svdvals(layer_norm_jacobian(z, None, 1e-2))
    torch.testing.assert_close(values, torch.tensor([10.0] * (D - 1) + [0.0], dtype=torch.float64))
    share = left_kernel_share(torch.ones_like(z), z - 3, None, True)  # ẑ = 0: only 1 is null
    assert float(share) == pytest.approx(1)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("gamma", gammas().values(), ids=gammas())
def test_kernels_are_orthonormal_and_null_on_their_side(gamma: Tensor | None, centred: bool) -> None:
    z = torch.randn(5, D, dtype=torch.float64)
    normalised = norm(z, None, 0.0, centred)[0]
    jacobian = (layer_norm_jacobian if centred else rms_norm_jacobian)(z, gamma, 0.0)
    basis, zeros = left_kernel(normalised, gamma, centred)
    gram = basis.transpose(-1, -2) @ basis
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(gram, torch.diag_embed(diagonal.round()), rtol=0, atol=1e-9)
    scale = torch.linalg.svdvals(jacobian)[:, :1, None]
    assert float((jacobian.transpose(-1, -2) @ basis / scale).abs().max()) < 1e-9
    assert float(basis[..., zeros, :].abs().sum()) == 0
    ranks = torch.linalg.matrix_rank(jacobian, rtol=1e-12)
    assert (diagonal.sum(-1) + zeros.sum() + ranks).round().tolist() == [D] * 5
    right = right_kernel(normalised, centred)
    assert float((jacobian @ right / scale).abs().max()) < 1e-12
    assert float(right.square().sum((-1, -2)).mean()) == pytest.approx(2 if centred else 1)


def test_the_left_kernel_is_not_the_right_one() -> None:
    gamma = torch.logspace(-1, 1, D, dtype=torch.float64)
    z = norm(torch.randn(D, dtype=torch.float64), None, 0.0, True)[0]
    ones = torch.ones(D, dtype=torch.float64)
    assert float(left_kernel_share(ones, z, gamma, True)) < 0.9
    assert float(left_kernel_share(1 / gamma, z, gamma, True)) == pytest.approx(1)


def test_zeros_of_gamma_with_equal_entries_keep_a_direction() -> None:
    z = norm(torch.tensor([1.0, 2.0, 2.0, -1.0, 0.5, 4.0], dtype=torch.float64), None, 0.0, True)[0]
    gamma = torch.tensor([1.0, 0.0, 0.0, 2.0, 1.0, 3.0], dtype=torch.float64)
    basis, zeros = left_kernel(z, gamma, True)
    assert zeros.tolist() == [False, True, True, False, False, False]
    assert float(basis.square().sum()) == pytest.approx(1)  # ẑ − ẑ₁·1 vanishes at both
    everything = left_kernel_share(torch.randn(6), z, torch.zeros(6), True)
    assert float(everything) == pytest.approx(1)


def test_the_direction_of_a_small_token_passes() -> None:
    z = torch.randn(D, dtype=torch.float64)
    for eps, expected in ((1e-6, 1.0), (1e2, 0.0)):
        normalised = norm(z, None, eps, False)[0]
        share = float(left_kernel_share(normalised, normalised, None, False))
        assert share == pytest.approx(expected, abs=1e-6)


def test_the_share_is_over_all_tokens_and_nan_of_nothing() -> None:
    z = norm(torch.randn(4, 3, D, dtype=torch.float64), None, 0.0, True)[0]
    g = torch.zeros_like(z)
    g[0, 0], g[1, 1, 0], g[1, 1, 1] = 1.0, 5.0, -5.0  # 12 units of energy in the kernel, 50 mostly outside it
    jacobian = layer_norm_jacobian(z, None, 0.0)
    u, s, _ = torch.linalg.svd(jacobian[1, 1])
    inside = 12 + float((u[:, s < 1e-9].T @ g[1, 1]).square().sum())
    assert float(left_kernel_share(g, z, None, True)) == pytest.approx(inside / 62)
    assert float(left_kernel_share(0 * g, z, None, True)) != float(left_kernel_share(0 * g, z, None, True))
