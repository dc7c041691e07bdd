"""Tests of the inverse of a stack from solves with its layers against dense float64; unmet conditions."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
import torch
from drawn_maps import drawn, orthogonal, rotated
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from normscope.linalg import (
    JacobianOperator,
    Layer,
    LayerwiseInverse,
    Matrix,
    Side,
    Status,
    TokenProjector,
    dense,
    layer_norm_jacobian,
    layerwise,
    layerwise_sigma_min,
    left_kernel,
    right_kernel,
    sigma_max,
    sigma_min,
)
from normscope.linalg.golub_kahan import LinearMap
from normscope.linalg.solve import Solver
from normscope.nn import build

F64 = torch.float64


def pre(depth: int, n: int, scale: float, *, seed: int = 0) -> list[Layer]:
    """I + A of a Pre-LN stack."""
    branches = (scale * drawn(n, n, seed=seed + 31 * i) / n**0.5 for i in range(depth))
    return [Layer(Matrix(torch.eye(n, dtype=F64) + branch)) for branch in branches]


def post(depth: int, tokens: int, d: int, scale: float, *, seed: int = 0, eps: float = 0.0) -> list[Layer]:
    """N′(I + A) of a Post-LN stack, with the left kernels of the norms."""
    layers = []
    for i, branch in enumerate(pre(depth, tokens * d, scale, seed=seed)):
        z, gamma = drawn(tokens, d, seed=seed + 31 * i + 7), 1 + 0.2 * drawn(d, seed=seed + 31 * i + 9)
        norm = torch.block_diag(*layer_norm_jacobian(z, gamma, eps))
        middle = z - z.mean(-1, keepdim=True)
        normalised = middle / torch.sqrt(middle.square().mean(-1, keepdim=True) + eps)
        kernel = TokenProjector(left_kernel(normalised, gamma, True)[0])
        layers.append(Layer(Matrix(norm @ branch.map.matrix), left_kernel=kernel))
    return layers


def product(layers: list[Layer]) -> Tensor:
    return _product([layer.map.matrix.double() for layer in layers])


def _product(matrices: list[Tensor]) -> Tensor:
    whole = matrices[0]
    for matrix in matrices[1:]:
        whole = matrix @ whole
    return whole


def least(matrix: Tensor, kernel: int = 0) -> float:
    return float(torch.linalg.svdvals(matrix)[-1 - kernel])


@pytest.mark.parametrize("layers", [pre(4, 24, 0.4), post(4, 3, 8, 0.2)], ids=["pre", "post"])
def test_it_is_the_pseudo_inverse(layers: list[Layer]) -> None:
    inverse = LayerwiseInverse(layers, tol=1e-12)
    expected = torch.linalg.pinv(product(layers), rtol=1e-9)
    scale = float(expected.norm())
    assert inverse.shape == expected.shape
    for seed in range(3):
        u = drawn(24, seed=seed)
        torch.testing.assert_close(inverse.matvec(u), expected @ u, rtol=0, atol=1e-8 * scale)
        # Jᵀ is pulled through from its own range; a vector outside is projected first
        torch.testing.assert_close(inverse.rmatvec(u), expected.T @ u, rtol=0, atol=1e-8 * scale)
    assert not inverse.blocked
    assert inverse.worst <= 1e-12
    assert inverse.leak < 1e-12


@pytest.mark.parametrize("tol", [5e-2, 1e-3])
@pytest.mark.parametrize("scale", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_sigma_min_is_within_its_error(kind: str, scale: float, tol: float) -> None:
    layers = pre(6, 48, scale) if kind == "pre" else post(6, 3, 16, scale)
    whole = product(layers)
    true = least(whole, 0 if kind == "pre" else 6)
    found = layerwise_sigma_min(layers, tol=tol)
    assert found.status is Status.CONVERGED
    assert abs(1 - true / found.value) <= found.error <= tol
    assert found.deflated is (Side.NONE if kind == "pre" else Side.LEFT)
    _, values, right = torch.linalg.svd(whole)
    last = len(values) - (1 if kind == "pre" else 7)
    if values[last - 1] > 1.5 * values[last]:
        assert abs(float(right[last] @ found.right)) > 1 - tol


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["pre", "post", "spread"]),
    depth=st.integers(1, 8),
    tokens=st.integers(1, 3),
    d=st.integers(4, 10),
    scale=st.floats(0.02, 0.8),
    tol=st.sampled_from([0.2, 0.05, 1e-2, 1e-3]),
    budget=st.integers(2, 300),
    seed=st.integers(0, 10**6),
)
def test_no_status_flatters(kind, depth, tokens, d, scale, tol, budget, seed) -> None:
    n = tokens * d
    if kind == "spread":
        spread = [10 ** (-2 * scale * torch.rand(n, dtype=F64)) for _ in range(depth)]
        layers = [Layer(rotated(values, seed=seed + i)) for i, values in enumerate(spread)]
    else:
        layers = (
            pre(depth, n, scale, seed=seed) if kind == "pre" else post(depth, tokens, d, scale, seed=seed)
        )
    whole = product(layers)
    true = least(whole, 2 * tokens if kind == "post" else 0)
    known = 1e-13 * float(torch.linalg.matrix_norm(whole, 2)) / true  # error of the dense figure
    found = layerwise_sigma_min(layers, tol=tol, max_products=budget, seed=seed)
    assert found.products <= budget + 1e-9  # a sum of 1/L
    if found.status is not Status.NOT_CONVERGED:
        assert abs(1 - true / found.value) <= found.error + known
        assert found.error <= tol
    else:
        assert not found.error <= tol


def test_where_long_iterations_fail_it_needs_few_products() -> None:
    layers = [*pre(11, 64, 0.25), Layer(rotated(torch.cat((torch.ones(63), torch.tensor([5e-4]))).double()))]
    whole = product(layers)
    values = torch.linalg.svdvals(whole)
    assert float(values[0] / values[-1]) > 5e3
    found = layerwise_sigma_min(layers)
    assert found.status is Status.CONVERGED
    assert abs(1 - float(values[-1]) / found.value) <= found.error
    assert found.products < 100
    long = sigma_min(Matrix(whole), max_products=100)
    assert long.status is Status.NOT_CONVERGED


def test_condition_numbers_beyond_float64_squares() -> None:
    values = torch.logspace(0, -1.5, 16, dtype=F64)
    u = [orthogonal(16, seed=s) for s in range(7)]
    layers = [Layer(Matrix(u[i + 1] @ torch.diag(values) @ u[i].T)) for i in range(6)]  # aligned: κ = 1e9
    found = layerwise_sigma_min(layers, tol=1e-2)
    assert found.status is Status.CONVERGED
    assert found.value == pytest.approx(1e-9, rel=1e-2)


def test_costs_are_in_products_of_the_whole() -> None:
    layers = pre(5, 32, 0.3)
    found = layerwise_sigma_min(layers)
    spent = sum(layer.map.products for layer in layers)
    assert found.products == pytest.approx(spent / 5)


def test_solves_are_as_tight_as_the_first_product_asks_for() -> None:
    layers = pre(12, 96, 0.1)
    found = layerwise_sigma_min(layers, tol=1e-2)
    assert found.status is Status.CONVERGED
    assert found.products <= 150  # a second iteration, with tighter solves, would make it 197


def test_float32_stacks() -> None:
    layers = [Layer(Matrix(layer.map.matrix.float())) for layer in pre(4, 32, 0.4)]
    true = least(product(layers))
    found = layerwise_sigma_min(layers, tol=1e-2)
    assert found.status is Status.CONVERGED
    assert abs(1 - true / found.value) <= found.error
    assert layerwise_sigma_min(layers, tol=1e-7, max_products=200).status is Status.NOT_CONVERGED


def test_pseudo_inverses_that_do_not_multiply_are_not_called_converged() -> None:
    # N′ · (I + A): the first has full rank, the second a kernel. (BC)⁺ is not C⁺B⁺ here.
    z = drawn(1, 12)
    normalised = z - z.mean(-1, keepdim=True)
    normalised = normalised / normalised.square().mean(-1, keepdim=True).sqrt()
    norm = Matrix(layer_norm_jacobian(z, None, 0.0)[0])
    kernels = {
        "left_kernel": TokenProjector(left_kernel(normalised, None, True)[0]),
        "kernel": TokenProjector(right_kernel(normalised, True)),
    }
    layers = [*pre(1, 12, 0.4), Layer(norm, **kernels)]
    found = layerwise_sigma_min(layers)
    assert found.status is Status.NOT_CONVERGED
    assert "layer 2 has rank 10, the first 12" in found.note
    joined = Layer(Matrix(norm.matrix @ layers[0].map.matrix), left_kernel=kernels["left_kernel"])
    assert layerwise_sigma_min([joined]).value == pytest.approx(least(product(layers), 2), rel=5e-2)


def test_a_layer_that_loses_what_the_one_before_passes_on_is_seen() -> None:
    # Both of rank 5 of 6, and the kernel of the second is in the range of the first: the product has rank 4.
    u = orthogonal(6)
    first = u[:, :5] @ u[:, :5].T
    second = torch.eye(6, dtype=F64) - torch.outer(u[:, 0], u[:, 0])
    layers = [
        Layer(Matrix(first), left_kernel=u[:, 5:], kernel=u[:, 5:]),
        Layer(Matrix(second), left_kernel=u[:, :1]),
    ]
    found = layerwise_sigma_min(layers)
    assert found.status is Status.NOT_CONVERGED
    assert "leaves a residual" in found.note


def test_kernels_that_were_not_named_are_seen() -> None:
    layers = [replace(layer, left_kernel=None) for layer in post(3, 2, 8, 0.2)]
    found = layerwise_sigma_min(layers, max_products=100)
    assert found.status is Status.NOT_CONVERGED
    assert "kernel that was not named" in found.note


def test_what_is_called_a_left_kernel_and_is_none_is_reported() -> None:
    layers = [replace(layer, left_kernel=orthogonal(16, seed=3)[:, :1]) for layer in pre(3, 16, 0.3)]
    found = layerwise_sigma_min(layers)
    assert found.status is Status.NOT_CONVERGED
    assert found.kernel_gain > 0.01
    assert "gain" in found.note


def leaking(size: float, scale: float, *, n: int = 30, depth: int = 5, seed: int = 0) -> list[Layer]:
    """(I − zzᵀ)(I + A) + size · zrᵀ, with z named as the left kernel that it nearly is."""
    layers = []
    for i, branch in enumerate(pre(depth, n, scale, seed=seed)):
        z, r = (torch.nn.functional.normalize(drawn(n, seed=seed + 31 * i + k), dim=0) for k in (3, 5))
        whole = branch.map.matrix
        leak = size * torch.outer(z, r) - torch.outer(z, z @ whole)
        layers.append(Layer(Matrix(whole + leak), left_kernel=z.unsqueeze(1)))
    return layers


@pytest.mark.parametrize("size", [1e-4, 3e-3])
@pytest.mark.parametrize("scale", [0.3, 0.9])
def test_a_named_kernel_that_leaks_is_in_the_error(scale: float, size: float) -> None:
    for seed in range(0, 2000, 200):
        layers = leaking(size, scale, seed=seed)
        found = layerwise_sigma_min(layers)
        true = least(product(layers), 1)
        assert found.status is Status.NOT_CONVERGED or abs(1 - true / found.value) <= found.error, seed
        assert found.products < 250  # tighter solves do not help


def test_a_leak_out_of_the_right_kernel_alone_is_in_the_error() -> None:
    # diag(1, 0.5, 0) and a leak of 0.7 at its kernel e₃: no solution x = J⁺u has a part there.
    values, kernel = torch.tensor([1.0, 0.5, 0.7], dtype=F64), torch.eye(3, dtype=F64)[:, 2:]
    found = layerwise_sigma_min([Layer(Matrix(torch.diag(values)), left_kernel=kernel)])
    assert found.value == pytest.approx(0.5)  # of three, the second is 0.7
    assert found.status is Status.NOT_CONVERGED or found.error >= 0.4


def test_the_error_of_an_inverse_reaches_both_ends_of_what_is_possible() -> None:
    inverse = LayerwiseInverse([Matrix(torch.eye(2, dtype=F64))])
    for length, upper, slack in ((2.0, 3.0, 0.25), (2.0, 2.01, 0.25), (1.0, 4.0, 0.01)):
        ends = np.array([length * (1 - slack), upper + slack * length])  # of ‖J⁺‖
        expected = np.abs(1 - length / ends).max()
        assert layerwise._total(length, upper, slack, inverse) == pytest.approx(expected)


def test_a_leak_that_is_small_beside_the_stack_converges() -> None:
    layers = leaking(1e-6, 0.3)
    found = layerwise_sigma_min(layers)
    assert found.status is Status.CONVERGED
    assert abs(1 - least(product(layers), 1) / found.value) <= found.error


def test_layers_that_do_not_meet_are_reported() -> None:
    with pytest.raises(ValueError, match="no layers"):
        LayerwiseInverse([])
    with pytest.raises(ValueError, match=r"shape \(5, 7\) after one of shape \(6, 5\)"):
        LayerwiseInverse([Matrix(drawn(6, 5)), Matrix(drawn(5, 7))])
    with pytest.raises(ValueError, match="max_products=1"):
        layerwise_sigma_min(pre(1, 4, 0.1), max_products=1)
    with pytest.raises(ValueError, match="confidence=2"):
        layerwise_sigma_min(pre(1, 4, 0.1), confidence=2)


@pytest.mark.parametrize("tol", [0.1, 1e-3, 1e-9])
def test_as_a_map_it_says_how_well_it_solves(tol: float) -> None:
    layers = pre(4, 24, 0.1)
    found = sigma_max(LayerwiseInverse(layers, tol=tol), tol=1e-3)
    true = 1 / least(product(layers))
    assert found.status is Status.NOT_CONVERGED or abs(1 - found.value / true) <= found.error <= 1e-3
    assert (found.status is Status.CONVERGED) is (tol == 1e-9)


def test_as_a_map_it_knows_no_bound_where_it_is_not_the_inverse() -> None:
    layers = [replace(layer, left_kernel=None) for layer in post(3, 2, 8, 0.2)]
    inverse = LayerwiseInverse(layers, tol=1e-9, max_products=60)
    assert inverse.round_off == 1e-9
    found = sigma_max(inverse, tol=1e-3, max_products=20)
    assert inverse.round_off == inf
    assert found.status is Status.NOT_CONVERGED


@pytest.mark.parametrize("by_residual", [True, False])
def test_a_solver_learns_nothing_twice(by_residual: bool) -> None:
    op = pre(1, 20, 0.5)[0].map
    solver = Solver(op, by_residual=by_residual)
    b = drawn(20)
    first = solver.solve(b, tol=1e-10)
    torch.testing.assert_close(op.matrix @ first.x, b)
    assert first.products > 0
    again = solver.solve(-3 * b, tol=1e-9)
    assert again.products == 0
    torch.testing.assert_close(again.x, -3 * first.x)
    forgetful = Solver(op, by_residual=by_residual, memory=0)
    for _ in range(2):
        assert forgetful.solve(b, tol=1e-10).products == first.products


def test_a_solver_gives_least_squares_of_least_norm() -> None:
    matrix = drawn(12, 5) @ drawn(5, 9, seed=1)
    b = drawn(12, seed=2)
    found = Solver(Matrix(matrix), by_residual=False).solve(b, tol=1e-12)
    expected = torch.linalg.pinv(matrix, rtol=1e-10) @ b
    assert found.least
    torch.testing.assert_close(found.x, expected)
    assert found.residual == pytest.approx(float((b - matrix @ expected).norm() / b.norm()), rel=1e-6)
    assert Solver(Matrix(matrix), by_residual=False).solve(0 * b, tol=1e-12).products == 0


def test_a_square_map_with_a_kernel_gets_a_solution_of_least_norm() -> None:
    right, left = orthogonal(9, seed=1)[:, :5], orthogonal(9, seed=2)[:, :5]
    b = left @ drawn(5)  # solves go well: each step takes more than STAGNATION off
    found = Solver(Matrix(left @ right.T + 0.1 * left @ drawn(5, 5) @ right.T), by_residual=False)
    torch.testing.assert_close(found.solve(b, tol=1e-12).x, torch.linalg.pinv(found.op.matrix, rtol=1e-9) @ b)


def blocks(scheme: str) -> tuple[list[LinearMap], list[Tensor]]:
    """The Jacobian of each block of a small model, and the streams between them."""
    torch.manual_seed(1)
    model = build("decoder", scheme=scheme, depth=3, width=16, heads=2, context=4, vocab=16, eps=1e-12)
    model = model.double().eval()
    state = drawn(1, 4, 16, seed=5)
    maps: list[LinearMap] = []
    streams = []
    for block in model.blocks:
        op = JacobianOperator(block, state)
        maps.append(op if scheme == "pre" else Matrix(dense(op)))
        state = block(state).detach()
        streams.append(state[0])
    return maps, streams


@pytest.mark.parametrize("scheme", ["pre", "res-post", "peri", "post"])
def test_real_blocks_of_every_placement(scheme: str) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        maps, streams = blocks(scheme)
        layers = [Layer(each) for each in maps]
        if scheme == "post":  # γ = 1, β = 0: the stream is ẑ
            kernels = [TokenProjector(left_kernel(stream, None, True)[0]) for stream in streams]
            layers = [Layer(each, left_kernel=kernel) for each, kernel in zip(maps, kernels, strict=True)]
        whole = _product([each.matrix if isinstance(each, Matrix) else dense(each) for each in maps])
        true = least(whole, 8 if scheme == "post" else 0)
        found = layerwise_sigma_min(layers)
    assert found.status is Status.CONVERGED
    assert abs(1 - true / found.value) <= found.error
    assert found.products < 250
