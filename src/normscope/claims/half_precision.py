"""LayerNorm in half precision: its statistics and its ε.

Shapes: N tokens, D width.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from normscope.claims.experiments import gaussian
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, lines_by, plots
from normscope.nn import NORMS

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPES = HALVES | {"float32": torch.float32}
WIDTHS, FRESH_WIDTHS = (64, 256, 1024, 4096), (96, 640, 3072)
OFFSETS, TOKENS = (0.0, 1.0, 10.0), 8
EPS = 1e-5
Moments = Callable[[Tensor], tuple[Tensor, Tensor]]
"""(N, D) → mean and variance (N, 1), computed in the dtype of the input."""


def two_pass(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, then mean square of what is left; each sum adds one coordinate at a time in the input's dtype."""
    mean_N1 = _sum(x_ND) / x_ND.shape[1]
    return mean_N1, _sum((x_ND - mean_N1).square()) / x_ND.shape[1]


def one_pass(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """E[x²] − E[x]²."""
    mean_N1 = _sum(x_ND) / x_ND.shape[1]
    return mean_N1, _sum(x_ND.square()) / x_ND.shape[1] - mean_N1.square()


def welford(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Welford's running mean and sum of squares (1962)."""
    mean_N, squares_N = torch.zeros_like(x_ND[:, 0]), torch.zeros_like(x_ND[:, 0])
    for count, x_N in enumerate(x_ND.unbind(1), start=1):
        delta_N = x_N - mean_N
        mean_N = mean_N + delta_N / count
        squares_N = squares_N + delta_N * (x_N - mean_N)
    return mean_N[:, None], squares_N[:, None] / x_ND.shape[1]


def _sum(x_ND: Tensor) -> Tensor:
    total_N = torch.zeros_like(x_ND[:, 0])
    for x_N in x_ND.unbind(1):
        total_N = total_N + x_N
    return total_N[:, None]


METHODS: Mapping[str, Moments] = {"two-pass": two_pass, "one-pass": one_pass, "Welford": welford}


def norm_by(moments: Moments, x_ND: Tensor, inner: torch.dtype) -> Tensor:
    """LayerNorm without γ and β, all of it computed in `inner`, in the dtype of `x_ND`."""
    wide_ND = x_ND.to(inner)
    mean_N1, var_N1 = moments(wide_ND)
    return ((wide_ND - mean_N1) / (var_N1 + EPS).sqrt()).to(x_ND.dtype)


def exact_norm(x_ND: Tensor) -> Tensor:
    """The same in float64 by NumPy."""
    x = x_ND.double().numpy()
    centred = x - x.mean(-1, keepdims=True)
    return torch.from_numpy(centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPS))


def off(found: Tensor, truth: Tensor) -> float:
    """RMS error over RMS, infinite where a value is not finite."""
    error = float((found.double() - truth).norm() / truth.norm())
    return error if math.isfinite(error) else math.inf


def tokens(width: int, offset: float, dtype: torch.dtype, seed: int) -> Tensor:
    """(N, D) of variance 1 about `offset`, rounded to `dtype`: what the truth is computed of, too."""
    return (gaussian(seed, TOKENS, width) + offset).to(dtype)


@claim("C24")
def float32_statistics(setup: Setup) -> Evidence:
    """Three algorithms in both half precisions."""
    widths = setup.sizes(WIDTHS, FRESH_WIDTHS)
    cases = setup.cases(*(functools.partial(_statistics_cases, width) for width in widths))
    centred = (case for case in cases if not case.part and case.at["mean"] == 0)
    return Evidence(
        cases,
        Figure.largest("largest error with statistics in half precision, in roundings of it", cases),
        plots=plots("C24", lines_by(centred, "width", "dtype")),
    )


def _statistics_cases(width: int, seed: int) -> Iterator[Case]:
    for name, dtype in HALVES.items():
        unit = torch.finfo(dtype).eps / 2  # the largest relative error of rounding
        for mean in OFFSETS:
            x_ND = tokens(width, mean, dtype, seed)
            truth = exact_norm(x_ND)
            half = {key: off(norm_by(how, x_ND, dtype), truth) / unit for key, how in METHODS.items()}
            wide = off(norm_by(two_pass, x_ND, torch.float32), truth) / unit
            theirs = off(NORMS["layernorm"](width, EPS).to(dtype)(x_ND).detach(), truth) / unit
            for part, value, holds, met in (
                ("", half["two-pass"], half["two-pass"] > 10 and wide <= 2, width * unit > 1),
                ("welford", half["Welford"], half["Welford"] <= 10, True),
                ("better", half["Welford"], half["Welford"] < half["one-pass"], mean >= 10),
                ("robust", theirs, theirs <= 2, True),
            ):
                at: dict[str, float | str] = {"dtype": name, "width": width, "mean": mean}
                yield Case(seed, "", value, holds, part, met=met, at=at)


@claim("C25")
def lower_eps(setup: Setup) -> Evidence:
    """Output and gradient of nearly constant inputs under four ε, in three precisions."""
    cases = setup.cases(_lowering_cases, _guard_cases)
    smallest = {name: torch.tensor(1e-8).to(dtype).item() for name, dtype in DTYPES.items()}
    return Evidence(
        cases,
        Figure.largest("gradient at ε = 1e-6 over that at 1e-5", cases),
        notes=[
            "ε = 1e-8 is " + ", ".join(f"{value:.3g} in {name}" for name, value in smallest.items()) + ".",
            f"ε = 1e-12 (BERT's) is {torch.tensor(1e-12).to(torch.float16).item():g} in float16.",
        ],
    )


DEVIATIONS = (0.0, 1e-8, 1e-6)


def _lowering_cases(seed: int) -> Iterator[Case]:
    for name, dtype in DTYPES.items():
        for deviation in DEVIATIONS:
            before, after = (_gain(dtype, deviation, eps, seed) for eps in (1e-5, 1e-6))
            rescued = math.isfinite(after) and not math.isfinite(before)
            ratio = after / before if math.isfinite(before) else math.inf
            where = f"{name}, deviation {deviation:g}"
            yield Case(seed, where, ratio, rescued or ratio < 1)


def _guard_cases(seed: int) -> Iterator[Case]:
    for name, dtype in DTYPES.items():
        for eps in (1e-5, 1e-6, 1e-8, 1e-12):
            gain = _gain(dtype, 0.0, eps, seed)
            there = torch.tensor(eps).to(dtype).item() > 0
            where, finite = f"{name}, ε = {eps:g}", math.isfinite(gain)
            yield Case(seed, where, gain, finite, "guard", met=there)
            if eps == 1e-5:
                yield Case(seed, where, gain, finite, "usual")


def _gain(dtype: torch.dtype, deviation: float, eps: float, seed: int) -> float:
    """RMS gradient of a random sum of the outputs in the inputs; NaN where it or an output is not finite."""
    generator = torch.Generator().manual_seed(seed)
    x_D, v_D = torch.randn(2, 64, generator=generator)
    x_D = (deviation * x_D).to(dtype).requires_grad_()
    centred_D = x_D - x_D.mean()
    # Written out, as torch's own kernel would take its statistics in float32.
    y_D = centred_D / (centred_D.square().mean() + torch.tensor(eps, dtype=dtype)).sqrt()
    (gradient_D,) = torch.autograd.grad((y_D * v_D.to(dtype)).sum(), x_D)
    finite = bool(y_D.isfinite().all() and gradient_D.isfinite().all())
    return float(gradient_D.double().square().mean().sqrt()) if finite else math.nan
