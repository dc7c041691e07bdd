"""The identity as a floor, for any matrix: σ_min(I + A) ≥ 1 − ‖A‖, and the printed proof of it.

Shapes: D width.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from normscope.claims.experiments import ROUND_OFF, gaussian, of_part, values
from normscope.claims.form import Case, Evidence, Figure, Setup, claim
from normscope.claims.real_blocks import F64
from normscope.linalg import singular_values, weyl_interval, weyl_lower_bound


@claim("A10")
def weyl(setup: Setup) -> Evidence:
    """The bound against dense singular values, and the step of its proof that drops two terms."""
    cases = setup.cases(_bound_cases, _pair_cases)
    own, routes = of_part(cases), of_part(cases, "printed")
    tight = sum(case.value <= ROUND_OFF for case in own)
    return Evidence(
        cases,
        Figure.smallest("smallest slack σ_min(I + A) − (1 − ‖A‖), in 1 + ‖A‖", own),
        notes=[
            f"{tight} of {len(own)} matrices attain the bound.",
            f"The printed route fails for {sum(not case.holds for case in routes)} of {len(routes)} pairs, "
            f"by up to {-min(values(routes, 'printed')):.3g} of ‖B‖² + ‖C‖².",
        ],
    )


def _bound_cases(seed: int) -> Iterator[Case]:
    for width in (3, 16, 64):
        eye = torch.eye(width, dtype=F64)
        for name, a in _perturbations(width, seed):
            norm = float(singular_values(a)[0])
            slack = float(singular_values(eye + a)[-1]) - weyl_lower_bound(norm)
            yield Case.at_least(seed, f"d = {width}, A = {name}", slack / (1 + norm), -ROUND_OFF)


def _perturbations(width: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """A [D, D] by name."""
    random = gaussian(seed, width, width)
    orthogonal = torch.linalg.qr(random)[0]
    unit = orthogonal[:, :1]
    eye = torch.eye(width, dtype=F64)
    shapes = {
        "I": eye,
        "uuᵀ": unit @ unit.T,
        "an orthogonal Q": orthogonal,
        "a shift": torch.diag(torch.ones(width - 1, dtype=F64), 1),
        "skew": (random - random.T) / width**0.5,
        "Gaussian": random / width**0.5,
        "Gaussian of rank one": random[:, :1] @ random[:1] / width,
    }
    for name, shape in shapes.items():
        for scale in (-1e3, -2.0, -1.0, -0.5, -1e-8, 0.5, 2.0):
            yield f"{scale:g} · {name}", scale * shape


def _pair_cases(seed: int) -> Iterator[Case]:
    for width in (3, 16, 64):
        for name, b, c in _pairs(width, seed):
            where = f"d = {width}, {name}"
            size = float(b.norm() ** 2 + c.norm() ** 2)
            of_b, of_c, of_sum = (singular_values(each) for each in (b, c, b + c))
            slack = float((of_sum - weyl_interval(of_b, of_c[0])[0]).min() / (of_b[0] + of_c[0]))
            yield Case(seed, where, slack, slack >= -ROUND_OFF, "pairs")
            first, second = b + b.T, c + c.T
            slack = _eigen_slack(first + second, first, second) / size**0.5
            yield Case(seed, where, slack, slack >= -ROUND_OFF, "symmetric")
            slack = _eigen_slack((b + c).T @ (b + c), b.T @ b, c.T @ c) / size
            yield Case(seed, where, slack, slack >= -ROUND_OFF, "printed")


def _pairs(width: int, seed: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    b, c = (gaussian(each, width, width) for each in (seed, seed + 1000))
    eye = torch.eye(width, dtype=F64)
    yield "B and C Gaussian", b, c
    yield "B and C Gaussian, C a tenth", b, 0.1 * c
    yield "B = I, C Gaussian", eye, c / width**0.5
    yield "B = I, C = −I/2", eye, -0.5 * eye
    yield "B Gaussian, C = −B", b, -b
    yield "B Gaussian, C = B/2", b, 0.5 * b
    yield "B = I, C skew", eye, (c - c.T) / width**0.5


def _eigen_slack(whole: Tensor, first: Tensor, second: Tensor) -> float:
    """min_i λ_i(whole) − λ_i(first) − λ_d(second)."""
    values = [torch.linalg.eigvalsh(each) for each in (whole, first, second)]
    return float((values[0] - values[1] - values[2][0]).min())
