"""Singular values of a layer as gains, the case ‖A‖ = 1, and the kind of map that F is.

Shapes: T tokens, D width.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from normscope.claims.experiments import jacobian
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, lines_by, plots
from normscope.claims.one_layer import NO_EPS, layers, pulled_back, residual
from normscope.claims.real_blocks import F64, Layer
from normscope.linalg import numerical_rank, singular_values
from normscope.nn import FeedForward

STEP = 1e-5
"""Step of central differences in float64; their error is about 1e-10."""
CLOSE = 1e-6
EPS = 1e-5
SIZES = (0.5, 0.75, 0.9, 0.999, 1.0)
"""‖A‖."""


@claim("A9")
def singular_values_are_gains(setup: Setup) -> Evidence:
    """Gains by finite differences, forward, and by the backward pass, against the SVD."""
    cases = setup.cases(_gain_cases)
    return Evidence(cases, Figure.largest("largest error of a gain, in σ_1", cases))


def _gain_cases(seed: int) -> Iterator[Case]:
    for layer in (*layers("post", seed), *layers("pre", seed), *_bare_norms(seed)):
        if layer.x.numel() > 64:
            continue
        u, values, vh = torch.linalg.svd(jacobian(layer, layer.x))
        changes = torch.stack([_change(layer, v) for v in vh])
        errors = {
            "": changes.norm(dim=1) - values,
            "gradient": pulled_back(layer, vh).norm(dim=1) - values,
            "left": pulled_back(layer, u.T) - values[:, None] * vh,
        }
        for part, error in errors.items():
            yield Case.at_most(seed, layer.name, float((error / values[0]).abs().max()), CLOSE, part)


def _bare_norms(seed: int) -> Iterator[Layer]:
    """Norms with γ = 1 and no branch: their Jacobian is symmetric."""
    for width in (3, 16, 64):
        torch.manual_seed(seed)
        x = torch.randn(1, 1, width, dtype=F64)
        yield Layer(f"norm alone, d = {width}", x, lambda x: 0 * x, residual("post", width))


@torch.no_grad()
def _change(layer: Layer, direction: Tensor) -> Tensor:
    """(f(x + hv) − f(x − hv)) / 2h."""
    v = STEP * direction.view_as(layer.x)
    return ((layer(layer.x + v) - layer(layer.x - v)) / (2 * STEP)).flatten()


@claim("A17")
def norm_of_one(setup: Setup) -> Evidence:
    """Smallest singular values at ‖A‖ = 1 and just under it."""
    cases = setup.cases(_perturbation_cases)
    at_one = [case for case in cases if not case.met]
    real = next(case for case in at_one if "Pre-LN" in case.where)
    lines = lines_by((case for case in cases if case.at["width"] == 64), "size", "name")
    return Evidence(
        cases,
        Figure.smallest("smallest σ_min at ‖A‖ = 1", at_one),
        notes=[
            "Strictly under 1 the smallest σ_min found is "
            f"{min(case.value for case in cases if case.met):.1e}.",
            f"A Pre-LN layer can have ‖A‖ = 1: {real.where}.",
        ],
        plots=plots("A17", lines),
    )


def _perturbation_cases(seed: int) -> Iterator[Case]:
    for name, size, matrix in _perturbations(seed):
        values = singular_values(torch.eye(len(matrix), dtype=F64) + matrix)
        rank, _ = numerical_rank(values, 1e-12)
        where = f"{name}, d = {len(matrix)}, ‖A‖ = {size:g}, rank {rank}"
        met = float(torch.linalg.matrix_norm(matrix, 2)) < 1 - 1e-12
        at: dict[str, float | str] = {"width": len(matrix), "size": size, "name": name}
        yield Case(seed, where, float(values[-1]), bool(values[-1] > 1e-12), met=met, at=at)


def _perturbations(seed: int) -> Iterator[tuple[str, float, Tensor]]:
    """A with ‖A‖ = c ≤ 1 [D, D], by name and c."""
    for width in (3, 16, 64, 256):
        torch.manual_seed(seed)
        eye = torch.eye(width, dtype=F64)
        drawn, x = torch.randn(width, width, dtype=F64), torch.randn(1, 1, width, dtype=F64)
        orthogonal = torch.linalg.qr(drawn)[0]
        for size in SIZES:
            yield "A = −c I", size, -size * eye
            yield "A = −c 11ᵀ/d", size, torch.full_like(eye, -size / width)
            yield "A drawn", size, size * drawn / torch.linalg.matrix_norm(drawn, 2)
            yield "A orthogonal · c", size, size * orthogonal
            shrunk = Layer("", x, partial(torch.mul, -size * x.std(correction=0)), residual("pre", width))
            yield "Pre-LN, F(u) = −c σ(x) u", size, jacobian(shrunk, x) - eye


@claim("A20")
def branch_of_one_token(setup: Setup) -> Evidence:
    """Share of a branch's Jacobian between different tokens."""
    cases = setup.cases(_mixing_cases)
    return Evidence(
        cases,
        Figure.largest("largest share of ‖J_F‖² between tokens", cases),
        notes=["A4 to A6 put the theorems to the test on whole sequences, with T(d − 2) for d − 2."],
    )


def _mixing_cases(seed: int) -> Iterator[Case]:
    for layer in layers("post", seed):
        kind = layer.name.split(",")[0]
        if not ("attention" in kind or "feed-forward" in kind) or layer.x.numel() > 256:
            continue
        squares_TDTD = jacobian(layer.branch, layer.x).square().view(*layer.x.shape[1:] * 2)
        within = squares_TDTD.diagonal(dim1=0, dim2=2).sum()
        share = max(0.0, 1 - float(within / squares_TDTD.sum()))
        for part in ("", "feed-forward") if isinstance(layer.branch, FeedForward) else ("",):
            yield Case(seed, layer.name, share, share <= 1e-12, part)


@claim("A21")
def any_input(setup: Setup) -> Evidence:
    """Ranks where a branch cancels what varies in the stream."""
    cases = setup.cases(lambda seed: _cancelling_cases(seed, setup))
    flat = [case for case in cases if case.at["variance"] == 0]
    gain = max(float(case.at["gain"]) for case in flat)
    return Evidence(
        cases,
        Figure.largest("rank above d − 2 where x + F(x) does not vary, with ε", flat, "eps"),
        notes=[f"There the layer multiplies by up to {gain:.0f}, 1/√ε."],
    )


def _cancelling_cases(seed: int, setup: Setup) -> Iterator[Case]:
    for width in setup.sizes((3, 16, 64), (5, 24, 48)):
        torch.manual_seed(seed)
        x, noise = torch.randn(2, 1, 1, width, dtype=F64)
        noise = (noise - noise.mean()) / noise.std(correction=0)
        for variance, eps in product((1.0, 1e-2, 2e-3, 1e-4, 1e-6, 0.0), (NO_EPS, EPS)):
            if variance == 0 and eps == NO_EPS:
                continue
            shift = 3 + variance**0.5 * noise - x
            layer = Layer("", x, partial(torch.add, shift, alpha=0), residual("post", width, eps))
            values = singular_values(jacobian(layer, x))
            rank, _ = numerical_rank(values, 0.01 if eps == EPS else 1e-7)
            where = f"d = {width}, variance {variance:g}, largest gain {values[0]:.1f}"
            met, part = eps == NO_EPS or variance > 100 * EPS, "eps" if eps == EPS else ""
            at = {"variance": variance, "gain": float(values[0])}
            yield Case.at_most(seed, where, rank - (width - 2), 0, part, met=met, at=at)
