"""The Jacobian of the norm by itself: its formula, its kernel, what γ and ε do to it.

Shapes: D width.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from normscope.claims.claim import Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.look import Look
from normscope.claims.sources import Source
from normscope.linalg import layer_norm_jacobian

WIDTHS = (3, 4, 16, 64, 256, 1024)
ROUND_OFF = 1e-10
"""Largest relative error that float64 explains, at the widths and scales drawn here."""


@claim(
    "A1",
    Source("000", "Lemma 2.1", "LayerNorm 的 Jacobian"),
    Source("000", "(13)–(14)"),
    says="The Jacobian of LayerNorm at z is (1/σ)(I − 11ᵀ/d − ẑẑᵀ/d).",
    hypothesis="its relative distance from autograd's is at most 1e-10: widths from 3 to 1024, scales from "
    "1e-3 to 1e3, skewed and nearly constant inputs; ε = 0, and ε > 0 with √(var + ε) for σ",
    parts={
        "printed": Sentence("Line (14) of the proof, P/σ − ẑẑᵀ/d, is the same matrix.", "σ is 1"),
    },
)
def jacobian_of_layer_norm(look: Look) -> Evidence:
    """The closed form against autograd, and the line of the proof that drops a 1/σ."""
    cases = [case for seed in look.seeds for case in _formula_cases(seed)]
    printed = [case for case in cases if case.part == "printed" and not case.met]
    return Evidence(
        cases=cases,
        figure=Figure.largest("largest relative error", cases),
        notes=[f"Line (14) is off by up to {max(case.value for case in printed):.3g} of the matrix."],
        of="inputs",
    )


def _formula_cases(seed: int) -> Iterator[Case]:
    for width in WIDTHS:
        for name, z in inputs(width, seed):
            for eps in (0.0, 1e-5):
                truth = by_autograd(z, eps)
                where = f"d = {width}, {name}, ε = {eps:g}"
                error = distance(layer_norm_jacobian(z, None, eps), truth)
                yield Case(seed=seed, where=where, value=error, holds=error <= ROUND_OFF)
                if eps == 0:
                    sigma = float(z.std(correction=0))
                    error = distance(_line_14(z), truth)
                    is_one = abs(sigma - 1) <= ROUND_OFF
                    holds = error <= ROUND_OFF
                    yield Case(seed=seed, where=where, value=error, holds=holds, met=is_one, part="printed")


def inputs(width: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Float64 inputs z [D], by name."""
    z = torch.randn(width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    yield "σ = 1", (z - z.mean()) / z.std(correction=0)
    yield "z ~ N(0, 1)", z
    yield "z ~ N(0, 1) · 1e-3", 1e-3 * z
    yield "z ~ N(5, 1) · 1e3", 1e3 * (z + 5)
    yield "one coordinate of 100", torch.cat((z[:1] + 100, z[1:]))
    yield "1 + 1e-3 · N(0, 1)", 1 + 1e-3 * z


def by_autograd(z: Tensor, eps: float) -> Tensor:
    """∂LN(z)/∂z [D, D]."""
    return torch.autograd.functional.jacobian(lambda v: functional.layer_norm(v, v.shape, eps=eps), z)


def distance(matrix: Tensor, truth: Tensor) -> float:
    """‖matrix − truth‖ / ‖truth‖, Frobenius."""
    return float((matrix - truth).norm() / truth.norm())


def _line_14(z: Tensor) -> Tensor:
    """P/σ − ẑẑᵀ/d, as printed."""
    width, sigma = len(z), z.std(correction=0)
    z_hat = (z - z.mean()) / sigma
    projector = torch.eye(width, dtype=z.dtype) - 1 / width
    return projector / sigma - torch.outer(z_hat, z_hat) / width
