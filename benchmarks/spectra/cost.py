"""Growth of the cost of σ_max: normscope's Pre-LN decoder over width, depth and length, one at a time.

An exponent is the slope of a straight line through log seconds against log size, with its 95 % interval.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import scipy.stats
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.spectra.rivals import TOLERANCE
from benchmarks.spectra.stack import Map, between
from normscope.linalg import JacobianOperator, SigmaMax, sigma_max
from normscope.nn import build

BASE = {"width": 256, "depth": 8, "length": 64}
SIZES = {
    "width": (64, 128, 256, 512, 768),
    "depth": (2, 4, 8, 16, 32),
    "length": (16, 32, 64, 128, 256, 512),
}
STARTS = 3


@dataclass(frozen=True)
class Point:
    """One size, medians over the starts.

    Attributes:
        n: T·d, rows and columns of the Jacobian.
        seconds: processor time of `sigma_max` to 1 %, including set-up.
        forwards: the same time as a number of plain forwards.
        products: number of products Jv and Jᵀu.
    """

    width: int
    depth: int
    length: int
    n: int
    seconds: float
    forwards: float
    products: float


def decoder_stack(width: int, depth: int, length: int) -> tuple[Map, Tensor]:
    """(f, x): the blocks of a Pre-LN decoder from seed 0, and a standard normal stream [1, T, d]."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"width": width, "depth": depth, "vocab": 16, "context": length}
    model = build("decoder", scheme="pre", **sizes).eval().requires_grad_(False)
    blocks = nn.Sequential(*cast(nn.ModuleList, model.blocks))
    return blocks, torch.randn(1, length, width)


def point(width: int, depth: int, length: int, starts: int = STARTS) -> Point:
    """Measure σ_max of one size, between forwards."""
    f, x = decoder_stack(width, depth, length)
    found, spent, forwards = [], [], []
    with sdpa_kernel(SDPBackend.MATH):
        f(x)
        for seed in range(starts):
            sigma, each = between(partial(_sigma, f, x, seed), f, x, 5)
            found.append(sigma.products)
            spent.append(each["cpu_s"])
            forwards.append(each["cpu_s"] / each["forward_cpu_s"])
    return Point(width, depth, length, x.numel(), *map(statistics.median, (spent, forwards, found)))


def _sigma(f: Map, x: Tensor, seed: int) -> SigmaMax:
    return sigma_max(JacobianOperator(f, x), tol=TOLERANCE, seed=seed)


def points() -> Iterator[tuple[str, Point]]:
    """Yield the points along each axis from the base."""
    for axis, values in SIZES.items():
        for value in values:
            yield axis, point(**(BASE | {axis: value}))


def exponent(sizes: Sequence[float], figures: Sequence[float]) -> tuple[float, float]:
    """(p, half of its 95 % interval) of figure ≈ c·size^p, by least squares in logarithms."""
    fit = scipy.stats.linregress(np.log(sizes), np.log(figures))
    return float(fit.slope), float(fit.stderr * scipy.stats.t.ppf(0.975, len(sizes) - 2))
