"""The Jacobian of one layer, Post-LN and Pre-LN: its formula, its rank, its kernel.

Shapes: T tokens, D width.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from normscope.claims.experiments import ROUND_OFF, distance, identity, jacobian
from normscope.claims.form import Case, Evidence, Figure, Setup, claim
from normscope.claims.one_layer import degenerate_layers, layers, residual
from normscope.claims.real_blocks import Layer
from normscope.linalg import numerical_rank, right_kernel, singular_values
from normscope.nn import FeedForward

RANK_TOLERANCE = 1e-9


@claim("A4")
def post_formula(setup: Setup) -> Evidence:
    """The product against autograd."""
    return _against_autograd(setup, "post", lambda layer: _of_norm(layer, layer.joined) @ _inner(layer))


@claim("A8")
def pre_formula(setup: Setup) -> Evidence:
    """The sum against autograd."""

    def formula(layer: Layer) -> Tensor:
        of_branch = jacobian(layer.branch, layer.norm(layer.x).detach())
        return identity(layer.x) + of_branch @ _of_norm(layer, layer.x)

    return _against_autograd(setup, "pre", formula)


def _against_autograd(setup: Setup, scheme: str, formula: Callable[[Layer], Tensor]) -> Evidence:
    cases = [
        Case.at_most(seed, layer.name, distance(formula(layer), jacobian(layer, layer.x)), ROUND_OFF)
        for seed in setup.seeds
        for layer in layers(scheme, seed)
    ]
    return Evidence(cases, Figure.largest("largest relative error of the formula", cases))


def _of_norm(layer: Layer, z_1TD: Tensor) -> Tensor:
    """J_LN(z) [T·D, T·D], a block a token."""
    return torch.block_diag(*layer.norm_jacobians(z_1TD))


def _inner(layer: Layer) -> Tensor:
    """I + J_F(x) [T·D, T·D]."""
    return identity(layer.x) + jacobian(layer.branch, layer.x)


@claim("A5")
def post_rank(setup: Setup) -> Evidence:
    """Singular values of whole layers and of single tokens."""
    cases = setup.cases(_rank_cases)
    ranks, last = zip(*map(_rank_with_eps, setup.seeds), strict=True)
    return Evidence(
        cases,
        Figure.smallest("fewest dimensions lost a token", cases),
        notes=[
            f"With ε = 1e-5 the rank of a layer of d = 64 is {', '.join(map(str, sorted(set(ranks))))}: "
            f"the last value is {max(last):.0e} of the largest or less."
        ],
    )


def _rank_cases(seed: int) -> Iterator[Case]:
    for layer in (*layers("post", seed), *degenerate_layers(seed)):
        _, tokens, width = layer.x.shape
        whole = jacobian(layer, layer.x)
        lost = tokens * width - _rank(whole)
        yield Case(seed, layer.name, lost / tokens, lost >= 2 * tokens)
        invertible = _is_invertible(_inner(layer))
        where, exact = f"{layer.name}, {lost} dimensions lost", lost == 2 * tokens
        yield Case(seed, where, lost / tokens, exact, "equality", met=invertible)
        for token in {0, tokens - 1} if tokens > 1 else ():
            its = slice(token * width, (token + 1) * width)
            lost = width - _rank(whole[its, its])
            where = f"{layer.name}, token {token}"
            yield Case(seed, where, lost, lost >= 2, "token")


def _rank(matrix: Tensor) -> int:
    """Rank at 1e-9 of the largest singular value; 0 where all values are round-off compared with 1."""
    values = singular_values(matrix)
    return 0 if values[0] < RANK_TOLERANCE else numerical_rank(values, RANK_TOLERANCE)[0]


def _is_invertible(matrix: Tensor) -> bool:
    values = singular_values(matrix)
    return bool(values[-1] > RANK_TOLERANCE * max(values[0], 1.0))


def _rank_with_eps(seed: int) -> tuple[int, float]:
    """Rank at round-off of a feed-forward layer with ε = 1e-5, and σ_(d−1)/σ_1."""
    torch.manual_seed(seed)
    branch, x = FeedForward(64, 64).double(), torch.randn(1, 1, 64, dtype=torch.float64)
    values = singular_values(jacobian(Layer("", x, branch, residual("post", 64, eps=1e-5)), x))
    return numerical_rank(values, 1e-12)[0], float(values[-2] / values[0])


@claim("A6")
def post_kernel(setup: Setup) -> Evidence:
    """Both directions, and directions that neither side says it of."""
    cases = setup.cases(_kernel_cases)
    zero = [case for case in cases if "drawn" not in case.where]
    least = min(case.value for case in cases if "drawn" in case.where)
    what = "largest ‖Jw‖, or distance of (I + J_F)w from the span, where both are said to be 0"
    note = f"For drawn w the smaller of the two is {least:.2g} or more."
    return Evidence(cases, Figure.largest(what, zero), notes=[note])


def _kernel_cases(seed: int) -> Iterator[Case]:
    for layer in (*layers("post", seed), *degenerate_layers(seed)):
        whole = jacobian(layer, layer.x)
        if len(whole) > 256 or float(whole.abs().max()) < RANK_TOLERANCE:
            continue
        inner = _inner(layer)
        z_hat = functional.layer_norm(layer.joined[0], layer.x.shape[-1:], eps=0.0)
        span = torch.block_diag(*right_kernel(z_hat, centred=True))
        for name, ws in _directions(whole, inner, span):
            through = (whole @ ws).norm(dim=0) / ws.norm(dim=0) / torch.linalg.matrix_norm(whole, 2)
            image = inner @ ws
            outside = (image - span @ (span.T @ image)).norm(dim=0) / ws.norm(dim=0)
            outside = outside / torch.linalg.matrix_norm(inner, 2)
            both = torch.stack((through, outside))
            agree = bool(((both < 1e-7).all(0) | (both > 1e-7).all(0)).all())
            value = float(both.min() if name == "drawn w" else both.max())
            yield Case(seed, f"{name}, {layer.name}", value, agree)


def _directions(whole: Tensor, inner: Tensor, span: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Columns w [T·D, k]."""
    _, values, vectors = torch.linalg.svd(whole)
    yield "w with Jw = 0", vectors[values < RANK_TOLERANCE * values[0]].T
    if _is_invertible(inner):
        yield "w with (I + J_F)w in the span", torch.linalg.solve(inner, span)
    else:
        kernel = torch.linalg.svd(inner)
        yield "w with (I + J_F)w = 0", kernel.Vh[RANK_TOLERANCE * max(kernel.S[0], 1) > kernel.S].T
    yield "drawn w", torch.randn(len(inner), 8, dtype=inner.dtype)
