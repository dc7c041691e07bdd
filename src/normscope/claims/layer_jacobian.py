"""The Jacobian of one layer, Post-LN and Pre-LN: its formula, its rank, its kernel.

Shapes: T tokens, D width.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from normscope.claims.experiments import ROUND_OFF, distance
from normscope.claims.form import Case, Evidence, Figure, Setup, claim
from normscope.claims.one_layer import Layer, by_autograd, degenerate_layers, identity, layers, norm_jacobians
from normscope.linalg import numerical_rank, right_kernel, singular_values
from normscope.nn import FeedForward, Residual, Where

RANK_TOLERANCE = 1e-9


@claim("A4")
def post_formula(setup: Setup) -> Evidence:
    """The product against autograd."""

    def formula(layer: Layer) -> Tensor:
        branch = by_autograd(layer.branch, layer.x)
        return norm_jacobians(layer, layer.joined) @ (identity(layer.x) + branch)

    cases = setup.cases(lambda seed: _formula_cases("post", seed, formula))
    return Evidence(cases, Figure.largest("largest relative error of the formula", cases))


@claim("A8")
def pre_formula(setup: Setup) -> Evidence:
    """The sum against autograd."""

    def formula(layer: Layer) -> Tensor:
        with torch.no_grad():
            normed = layer.norm(layer.x)
        return identity(layer.x) + by_autograd(layer.branch, normed) @ norm_jacobians(layer, layer.x)

    cases = setup.cases(lambda seed: _formula_cases("pre", seed, formula))
    return Evidence(cases, Figure.largest("largest relative error of the formula", cases))


def _formula_cases(scheme: str, seed: int, formula: Callable[[Layer], Tensor]) -> Iterator[Case]:
    for layer in layers(scheme, seed):
        yield Case.at_most(seed, layer.name, distance(formula(layer), by_autograd(layer, layer.x)), ROUND_OFF)


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
        tokens, width = layer.x.shape
        whole = by_autograd(layer, layer.x)
        lost = tokens * width - _rank(whole)
        yield Case(seed, layer.name, lost / tokens, lost >= 2 * tokens)
        invertible = _is_invertible(identity(layer.x) + by_autograd(layer.branch, layer.x))
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
    branch, x = FeedForward(64, 64).double(), torch.randn(1, 64, dtype=torch.float64)
    layer = Layer("", x, branch, Residual("post", Where(1, 1), 64, eps=1e-5).double())
    values = singular_values(by_autograd(layer, x))
    return numerical_rank(values, 1e-12)[0], float(values[-2] / values[0])


@claim("A6")
def post_kernel(setup: Setup) -> Evidence:
    """Both directions, and directions that neither side says it of."""
    cases = setup.cases(_kernel_cases)
    zero = [case for case in cases if "drawn" not in case.where]
    return Evidence(
        cases,
        Figure.largest(
            "largest ‖Jw‖, or distance of (I + J_F)w from the span, where both are said to be 0", zero
        ),
        notes=[
            "For drawn w the smaller of the two is "
            f"{min(case.value for case in cases if 'drawn' in case.where):.2g} or more."
        ],
    )


def _kernel_cases(seed: int) -> Iterator[Case]:
    for layer in (*layers("post", seed), *degenerate_layers(seed)):
        jacobian = by_autograd(layer, layer.x)
        if len(jacobian) > 256 or float(jacobian.abs().max()) < RANK_TOLERANCE:
            continue
        inner = identity(layer.x) + by_autograd(layer.branch, layer.x)
        z = layer.joined
        z_hat = (z - z.mean(-1, keepdim=True)) / z.std(-1, correction=0, keepdim=True)
        span = torch.block_diag(*right_kernel(z_hat, centred=True))
        for name, ws in _directions(jacobian, inner, span):
            through = (jacobian @ ws).norm(dim=0) / ws.norm(dim=0) / torch.linalg.matrix_norm(jacobian, 2)
            image = inner @ ws
            outside = (image - span @ (span.T @ image)).norm(dim=0) / ws.norm(dim=0)
            outside = outside / torch.linalg.matrix_norm(inner, 2)
            both = torch.stack((through, outside))
            agree = bool(((both < 1e-7).all(0) | (both > 1e-7).all(0)).all())
            value = float(both.min() if name == "drawn w" else both.max())
            yield Case(seed, f"{name}, {layer.name}", value, agree)


def _directions(jacobian: Tensor, inner: Tensor, span: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Columns w [T·D, k]."""
    _, values, vectors = torch.linalg.svd(jacobian)
    yield "w with Jw = 0", vectors[values < RANK_TOLERANCE * values[0]].T
    if _is_invertible(inner):
        yield "w with (I + J_F)w in the span", torch.linalg.solve(inner, span)
    else:
        kernel = torch.linalg.svd(inner)
        yield "w with (I + J_F)w = 0", kernel.Vh[RANK_TOLERANCE * max(kernel.S[0], 1) > kernel.S].T
    yield "drawn w", torch.randn(len(inner), 8, dtype=inner.dtype)
