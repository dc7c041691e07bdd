"""The output of LayerNorm: by the two formulas that are printed, and its distribution.

Shapes: N tokens, D width.
"""

import math
import statistics
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from normscope.claims.experiments import gaussian, of_part
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, lines_by, plots
from normscope.claims.half_precision import EPS, TOKENS, off
from normscope.nn import NORMS


@claim("C34")
def two_formulas(setup: Setup) -> Evidence:
    """Both over the scale of the input, and their gradients where there is no variance."""
    cases = setup.cases(_formula_cases, _constant_cases)
    claimed = of_part(cases)
    return Evidence(
        cases,
        Figure.largest("largest relative difference", claimed),
        plots=plots("C34", lines_by(claimed, "deviation", "eps")),
        notes=[
            f"The usual embedding, {case.where}: {case.value:.3g}."
            for case in claimed
            if case.at["deviation"] == EMBEDDING and case.seed == setup.seeds[0]
        ],
    )


EMBEDDING = 0.02
"""Deviation of the usual embedding."""


def _outside(x_ND: Tensor, eps: float) -> Tensor:
    """(h − μ)/(σ + ε), as §3.1 prints it."""
    centred_ND = x_ND - x_ND.mean(-1, keepdim=True)
    return centred_ND / (centred_ND.square().mean(-1, keepdim=True).sqrt() + eps)


def _formula_cases(seed: int) -> Iterator[Case]:
    x_ND = gaussian(seed, TOKENS, 256)
    for scale in (1e-4, 1e-3, 1e-2, EMBEDDING, 0.1, 1.0, 10.0, 100.0):
        for eps in (1e-5, 1e-6):
            z_ND = scale * x_ND
            inside = NORMS["layernorm"](256, eps).double()(z_ND).detach()
            far = off(_outside(z_ND, eps), inside)
            met = float(z_ND.var(-1, correction=0).min()) >= 1000 * eps
            at = {"deviation": scale, "eps": f"ε = {eps:g}"}
            yield Case.at_most(seed, "", far, 1e-3, met=met, at=at)


def _constant_cases(seed: int) -> Iterator[Case]:
    level = float(torch.randn((), generator=torch.Generator().manual_seed(seed)))
    formulas: dict[str, Callable[[Tensor], Tensor]] = {
        "σ + ε": lambda x: _outside(x, EPS),
        "√(var + ε)": lambda x: functional.layer_norm(x, (256,), eps=EPS),
    }
    for name, formula in formulas.items():
        x_ND = torch.full((1, 256), level, dtype=torch.float64, requires_grad=True)
        (gradient_ND,) = torch.autograd.grad(formula(x_ND)[0, 0], x_ND)
        largest = float(gradient_ND.abs().max())
        yield Case(seed, name, largest, math.isfinite(largest), "gradient")


@claim("C35")
def standard_normal(setup: Setup) -> Evidence:
    """Kolmogorov–Smirnov distances and kurtosis of features after the norm."""
    cases: list[Case] = []
    moved: list[float] = []
    for seed in setup.seeds:
        for name, x_ND in distributions(seed).items():
            y_ND = NORMS["layernorm"](LONG, EPS).double()(x_ND).detach()
            moved.append(_kurtosis_moved(x_ND, y_ND))
            cases += _normal_cases(name, x_ND, y_ND, seed)
    return Evidence(
        cases,
        Figure.largest("largest Kolmogorov–Smirnov distance from N(0, 1)", cases),
        notes=[
            f"What chance has at d = {LONG} is {CHANCE:.3g}.",
            f"The norm is linear but for its statistics: the kurtosis of a token's features moves by at most "
            f"{max(moved):.2g}.",
        ],
    )


LONG = 1024
CHANCE = 1.36 / math.sqrt(LONG)
"""Kolmogorov–Smirnov distance of as many draws of N(0, 1), at the 5 % level."""


def distributions(seed: int) -> dict[str, Tensor]:
    """(N, D) of what a stream may look like."""
    generator = np.random.default_rng(seed)
    shape = (32, LONG)
    drawn = {
        "normal": generator.normal(3, 2, shape),
        "normal of deviation 1e-3": generator.normal(0, 1e-3, shape),
        "uniform": generator.uniform(-1, 1, shape),
        "Laplace": generator.laplace(0, 1, shape),
        "log-normal": generator.lognormal(0, 1, shape),
        "after a ReLU": np.maximum(generator.normal(0, 1, shape), 0),
        "after a GELU": functional.gelu(torch.from_numpy(generator.normal(0, 1, shape))).numpy(),
        "normal with 4 channels × 30": generator.normal(0, 1, shape) * np.repeat((30, 1), (4, LONG - 4)),
    }
    return {name: torch.from_numpy(x) for name, x in drawn.items()}


def _normal_cases(name: str, x_ND: Tensor, y_ND: Tensor, seed: int) -> Iterator[Case]:
    met = float(x_ND.var(-1, correction=0).min()) >= 1000 * EPS
    yield Case.at_most(seed, name, _distance_from_normal(y_ND.numpy()), CHANCE)
    mean = float(y_ND.mean(-1).abs().max())
    variance = float((y_ND.var(-1, correction=0) - 1).abs().max())
    yield Case.at_most(seed, name, max(mean, variance), 1e-3, "moments", met=met)


def _distance_from_normal(y_ND: np.ndarray) -> float:
    """The median of the tokens' Kolmogorov–Smirnov distances from N(0, 1)."""
    from scipy import stats  # takes 0.4 s to import, which no other claim needs

    return statistics.median(float(stats.kstest(row, "norm").statistic) for row in y_ND)


def _kurtosis_moved(x_ND: Tensor, y_ND: Tensor) -> float:
    from scipy import stats

    before, after = stats.kurtosis(x_ND.numpy(), axis=1), stats.kurtosis(y_ND.numpy(), axis=1)
    return float(np.abs(after - before).max())
