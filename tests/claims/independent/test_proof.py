"""Verdicts of the drawn claims of group A, confirmed in plain torch (float64) without normscope.

Shapes: T tokens, D width.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

F64 = torch.float64
Map = Callable[[Tensor], Tensor]
every_seed = pytest.mark.parametrize("seed", [301, 302, 303])


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def norm(z: Tensor) -> Tensor:
    """LayerNorm over the last axis, without γ, β and ε: definition 1.1."""
    centred = z - z.mean(-1, keepdim=True)
    return centred / centred.square().mean(-1, keepdim=True).sqrt()


def norm_jacobian(z: Tensor) -> Tensor:
    """(1/σ)(I − 11ᵀ/d − ẑẑᵀ/d), by hand."""
    width, z_hat = len(z), norm(z)
    sigma = (z - z.mean()).square().mean().sqrt()
    ones = torch.ones(width, width, dtype=F64)
    return (torch.eye(width, dtype=F64) - ones / width - torch.outer(z_hat, z_hat) / width) / sigma


def branch(width: int, seed: int, size: float = 1.0) -> Map:
    """F(x) = W₂ tanh(W₁ x)."""
    up, down = drawn(4 * width, width, seed=seed) / width**0.5, drawn(width, 4 * width, seed=seed + 1)
    return lambda x: size * (torch.tanh(x @ up.T) @ (down / (4 * width) ** 0.5).T)


def post(f: Map) -> Map:
    return lambda x: norm(x + f(x))


def pre(f: Map) -> Map:
    return lambda x: x + f(norm(x))


def values(matrix: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrix)


@every_seed
@pytest.mark.parametrize("width", [3, 8, 24])
def test_a4_the_jacobian_of_post_ln_holds(width: int, seed: int) -> None:
    f, x = branch(width, seed), drawn(width, seed=seed + 9)
    found = jacobian(post(f), x)
    formula = norm_jacobian(x + f(x)) @ (torch.eye(width, dtype=F64) + jacobian(f, x))
    assert (found - formula).norm() < 1e-12 * found.norm()


@every_seed
def test_a9_singular_values_are_gains_of_changes_and_not_of_gradients(seed: int) -> None:
    layer, x = post(branch(8, seed)), drawn(8, seed=seed + 9)
    j = jacobian(layer, x)
    u, s, vh = torch.linalg.svd(j)
    step = 1e-6
    for i in range(8):
        change = (layer(x + step * vh[i]) - layer(x - step * vh[i])) / (2 * step)
        assert abs(float(change.norm() - s[i])) < 1e-7 * float(s[0])
    backward = (vh @ j).norm(dim=1)  # Jᵀv_i, as gradients travel
    assert float((backward - s).abs().max()) > 0.01 * float(s[0]), "part gradient: refuted"
    assert torch.allclose(u.T @ j, s[:, None] * vh, atol=1e-12), "part left: holds"


@every_seed
def test_a10_weyl_holds_and_its_printed_route_does_not(seed: int) -> None:
    eye, wrong = torch.eye(12, dtype=F64), 0
    for number in range(40):
        a = drawn(12, 12, seed=seed + number) * 10.0 ** (number % 5 - 3)
        assert values(eye + a)[-1] >= 1 - values(a)[0] - 1e-10
        b, c = drawn(12, 12, seed=seed + number), drawn(12, 12, seed=seed + number + 500)
        assert bool((values(b + c) >= values(b) - values(c)[0] - 1e-10).all())
        whole, left, right = (torch.linalg.eigvalsh(m.T @ m) for m in (b + c, b, c))
        wrong += bool((whole < left + right[0] - 1e-9).any())
    assert wrong > 0, "part printed: refuted"


@every_seed
@pytest.mark.parametrize("size", [0.05, 1.0])
def test_a12_table_1_holds_within_its_hypothesis(size: float, seed: int) -> None:
    width = 12
    eye, f, x = torch.eye(width, dtype=F64), branch(width, seed, size), drawn(width, seed=seed + 9)
    found = jacobian(post(f), x)
    s = values(found)
    assert s[-2] < 1e-12 * s[0] < s[-3], "rank d − 2"
    left = torch.stack([torch.ones(width, dtype=F64), norm(x + f(x))])
    assert (left @ found).norm() < 1e-12 * left.norm() * s[0], "two gradients are erased"
    a = jacobian(f, norm(x)) @ norm_jacobian(x)
    found = jacobian(pre(f), x)
    assert (found - eye - a).norm() < 1e-12 * found.norm()
    if values(a)[0] < 1:
        assert values(found)[-1] >= 1 - values(a)[0] - 1e-12
    assert (values(a)[0] < 1) == (size < 0.1), "the small branch is within the hypothesis"


def test_a12_without_the_hypothesis_row_5_is_refuted() -> None:
    x = drawn(12, seed=311)
    sigma = (x - x.mean()).square().mean().sqrt()
    found = jacobian(pre(lambda u: -sigma * u), x)
    assert int((values(found) > 1e-10).sum()) == 2


@every_seed
@pytest.mark.parametrize("depth", [1, 6, 30])
def test_a14_the_rank_of_post_ln_is_at_most_d_minus_2(depth: int, seed: int) -> None:
    width, x = 12, drawn(12, seed=seed + 9)
    product = torch.eye(width, dtype=F64)
    for layer in range(depth):
        f = branch(width, seed + 20 * layer)
        product = jacobian(post(f), x) @ product
        x = post(f)(x)
    left = torch.stack([torch.ones(width, dtype=F64), x])  # of the last norm
    assert (left @ product).norm() < 1e-11 * left.norm() * values(product)[0]
    if depth == 1:
        assert values(product)[-3] > 1e-8 * values(product)[0], "and not less"


@every_seed
def test_a18_gradients_along_the_right_kernel_get_through(seed: int) -> None:
    width = 12
    j = jacobian(post(branch(width, seed)), drawn(width, seed=seed + 9))
    u, s, vh = torch.linalg.svd(j)
    assert (vh[-2:] @ j).norm(dim=1).max() > 0.05 * s[0], (
        "v with J v = 0, put into the backward pass: refuted"
    )
    assert (u.T[-2:] @ j).norm() < 1e-12 * s[0], "part left: holds"
    arriving = drawn(4, width, seed=seed + 7) @ j
    assert (arriving @ vh[-2:].T).abs().max() < 1e-12 * arriving.norm(), "part arriving: holds"


@every_seed
@pytest.mark.parametrize("depth", [1, 8, 24])
def test_a24_pre_ln_erases_nothing_but_in_its_final_norm(depth: int, seed: int) -> None:
    width, x = 12, drawn(12, seed=seed + 9)
    layers = [pre(branch(width, seed + 20 * number, 0.2)) for number in range(depth)]
    whole: Map = functools.partial(functools.reduce, lambda state, layer: layer(state), layers)
    s = values(jacobian(whole, x))
    assert s[-1] > 1e-9 * s[0], "without final norm: holds"
    s = values(jacobian(lambda state: norm(whole(state)), x))
    assert s[-2] < 1e-12 * s[0] < s[-3], "with it: two are erased"
