"""The Jacobian of the norm by itself: its formula, its kernel, what γ and ε do to it.

Shapes: D width.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from normscope.claims import experiments
from normscope.claims.exact import as_exact, exact_rank, scaled_norm_jacobian
from normscope.claims.experiments import ROUND_OFF, distance, gaussian, of_part, values
from normscope.claims.form import Case, Evidence, Figure, Line, Setup, claim, lines_along, plots
from normscope.linalg import layer_norm_jacobian, left_kernel, numerical_rank, right_kernel, singular_values

WIDTHS = (3, 4, 16, 64, 256, 1024)
SMALL_WIDTHS = WIDTHS[:5]
EXACT_WIDTHS = (3, 4, 8, 16)
GAIN_WIDTHS = (4, 16, 64, 256)
EPS = 1e-5
RATIOS = [10.0**power for power in range(-4, 9)]
"""Variance / ε."""
STARTS = ("xavier", "normal", "gpt2", "small")
"""Initialisations in use."""
STEP, CLOSE = 1e-4, 1e-6
"""Central differences: their step, in σ, and the relative error that they leave."""


@claim("A1")
def jacobian_of_layer_norm(setup: Setup) -> Evidence:
    """The closed form against autograd, and the line of the proof that drops a 1/σ."""
    cases, differences = setup.cases(_formula_cases), setup.cases(_difference_cases)
    return Evidence(
        [*cases, *differences],
        Figure.largest("largest relative error of the formula", cases),
        notes=[
            f"From central differences it is {max(values(differences)):.0e} off at most.",
            f"Line (14) is off by up to {max(values(cases, 'printed')):.3g} of the matrix.",
            "It is right for σ = 1 alone.",
        ],
    )


def _formula_cases(seed: int) -> Iterator[Case]:
    for width in WIDTHS:
        for name, z in inputs(width, seed):
            for eps in (0.0, EPS):
                truth = by_autograd(z, eps)
                where = f"d = {width}, {name}, ε = {eps:g}"
                yield Case.at_most(seed, where, distance(layer_norm_jacobian(z, None, eps), truth), ROUND_OFF)
                if eps == 0:
                    yield Case.at_most(seed, where, distance(_line_14(z), truth), ROUND_OFF, "printed")


def _difference_cases(seed: int) -> Iterator[Case]:
    for width in WIDTHS:
        for name, z in inputs(width, seed) if width <= 64 else ():
            error = distance(layer_norm_jacobian(z, None, 0.0), _by_differences(z))
            where = f"d = {width}, {name}, central differences"
            yield Case(seed, where, error, error <= CLOSE)


def _by_differences(z: Tensor) -> Tensor:
    """∂LN(z)/∂z [D, D] without ε, by central differences."""
    step = STEP * z.std(correction=0)
    steps = step * torch.eye(len(z), dtype=z.dtype)
    ahead, behind = (functional.layer_norm(z + sign * steps, z.shape, eps=0.0) for sign in (1, -1))
    return ((ahead - behind) / (2 * step)).T


def inputs(width: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Float64 inputs z [D], by name."""
    z = gaussian(seed, width)
    yield "σ = 1", (z - z.mean()) / z.std(correction=0)
    yield "z ~ N(0, 1)", z
    yield "z ~ N(0, 1) · 1e-3", 1e-3 * z
    yield "z ~ N(5, 1) · 1e3", 1e3 * (z + 5)
    yield "one coordinate of 100", torch.cat((z[:1] + 100, z[1:]))
    yield "1 + 1e-3 · N(0, 1)", 1 + 1e-3 * z


def by_autograd(z: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    """∂LN(z)/∂z [D, D], with γ where it is given."""
    return experiments.jacobian(lambda v: functional.layer_norm(v, v.shape, weight=gain, eps=eps), z)


def _line_14(z: Tensor) -> Tensor:
    """P/σ − ẑẑᵀ/d, as printed."""
    width, sigma = len(z), z.std(correction=0)
    z_hat = (z - z.mean()) / sigma
    projector = torch.eye(width, dtype=z.dtype) - 1 / width
    return projector / sigma - torch.outer(z_hat, z_hat) / width


@claim("A2")
def kernel_of_layer_norm(setup: Setup) -> Evidence:
    """Ranks and kernels, in float64 and by fractions; with ε, in real models and by scale."""
    kernels, others = setup.cases(_kernel_cases), setup.cases(_angle_cases, _fraction_cases)
    real = setup.cases(lambda seed: _eps_cases(seed, setup))
    worst = max(real, key=lambda case: case.value)
    by_scale = {seed: _gains_by_scale(seed) for seed in setup.seeds}
    measured = lines_along(RATIOS, {"measured": by_scale}, marks=True)
    formula = Line("ε/(var + ε)", RATIOS, [1 / (1 + ratio) for ratio in RATIOS])
    off = np.abs(np.array(list(by_scale.values())) * (1 + np.array(RATIOS)) - 1).max()
    return Evidence(
        [*kernels, *others, *real],
        Figure.largest("largest share that comes through along 1 or ẑ", kernels),
        plots=plots("A2", [*measured, formula]),
        notes=[
            f"The largest gain of ẑ in a real model is {worst.value:.2g} of that elsewhere: {worst.where}.",
            f"ẑ has the gain ε/(var + ε) beside other directions, to {off:.0e} of it.",
        ],
    )


def _kernel_cases(seed: int) -> Iterator[Case]:
    for width in WIDTHS:
        for name, z in list(inputs(width, seed))[: None if width in SMALL_WIDTHS else 2]:
            j = by_autograd(z, 0.0)
            sigma = singular_values(j)
            rank, _ = numerical_rank(sigma, ROUND_OFF)
            basis = right_kernel(_normalised(z), centred=True)  # of 1 and ẑ, if it has two dimensions
            left = float((j @ basis).norm() / sigma[0])
            holds = rank == width - 2 == width - round(float(basis.square().sum())) and left <= ROUND_OFF
            yield Case(seed, f"d = {width}, {name}, rank {rank}", left, holds)


def _angle_cases(seed: int) -> Iterator[Case]:
    for width in SMALL_WIDTHS:
        for name, z in inputs(width, seed):
            kernel = torch.linalg.svd(by_autograd(z, 0.0)).Vh[-2:].T
            basis = right_kernel(_normalised(z), centred=True)
            sine = float(torch.linalg.matrix_norm(kernel - basis @ (basis.T @ kernel), 2))
            where = f"d = {width}, {name}, sine of the largest principal angle"
            yield Case(seed, where, sine, sine <= ROUND_OFF)


def _fraction_cases(seed: int) -> Iterator[Case]:
    """d − rank of the closed form, σ left out, by Gaussian elimination in fractions."""
    generator = torch.Generator().manual_seed(seed)
    for width in EXACT_WIDTHS:
        z = [int(x) for x in torch.randint(-9, 10, (width,), generator=generator)]
        z[0], z[1] = 10, -10  # σ > 0
        lost = width - exact_rank(scaled_norm_jacobian(as_exact(z)))
        yield Case(seed, f"d = {width}, whole numbers, exact", lost, lost == 2)


def _eps_cases(seed: int, setup: Setup) -> Iterator[Case]:
    for scheme, start in product(("post", "pre"), STARTS):
        model = f"nn:decoder,scheme={scheme},init={start},depth=6,width=64,heads=2,eps={EPS}"
        for name, z_BTD in entering_norms(model, seed, setup).items():
            variance = z_BTD.var(-1, correction=0)
            token = z_BTD.flatten(0, 1)[variance.argmin()]
            gain = _gain_along(token, EPS)
            smallest = float(variance.min())
            where = f"{scheme}, {start} weights, ε = {EPS:g}, {name}, variance {smallest:.1e}"
            yield Case(seed, where, gain, gain < 0.01, "eps", met=smallest > 100 * EPS)


def entering_norms(spec: str, seed: int, setup: Setup) -> dict[str, Tensor]:
    """Inputs (B, T, D) of each LayerNorm of a model at its start, on text; float64, by the norm's path."""
    subject = experiments.on_text(spec, seed, setup)
    named = subject.model.named_modules()
    names: dict[nn.Module, str] = {m: name for name, m in named if isinstance(m, nn.LayerNorm)}
    with torch.no_grad(), experiments.calls_of(names) as calls:
        subject.forward()
    return {names[norm]: z_BTD.double() for norm, z_BTD, _ in calls}


def _gain_along(z: Tensor, eps: float) -> float:
    """‖Jẑ‖/‖ẑ‖ beside ‖J‖, by autograd."""
    j, z_hat = by_autograd(z, eps), _normalised(z)
    return float((j @ z_hat).norm() / z_hat.norm() / singular_values(j)[0])


def _gains_by_scale(seed: int) -> list[float]:
    """The gain of ẑ at each of `RATIOS`."""
    z = _normalised(gaussian(seed, 16))
    return [_gain_along(ratio**0.5 * z, 1.0) for ratio in RATIOS]


def _normalised(z: Tensor) -> Tensor:
    """ẑ [D], without ε."""
    return (z - z.mean()) / z.std(correction=0)


@claim("A3")
def side_of_gain(setup: Setup) -> Evidence:
    """diag(γ) on either side, and both kernels, for γ alike, drawn, of both signs, spread out, with zeros."""
    cases = setup.cases(_gain_cases)
    moved = max(_left_residual(seed) for seed in setup.seeds)
    dimension = {case.at["gain"]: case.value for case in of_part(cases, "kernel")}  # at the largest width
    return Evidence(
        cases,
        Figure.largest("largest relative error of J diag(γ)", cases),
        notes=[
            f"diag(γ) J is off by {max(values(cases, 'left')):.0e} of the matrix.",
            "J diag(γ) is right where all γ are alike, and there alone.",
            f"{{u : Jᵀu = 0}} becomes γ⁻¹ ⊙ span{{1, ẑ}}: Jᵀ leaves {moved:.0e} of that.",
            "Two zeros in γ widen the null space only where z is the same at both coordinates: "
            f"{dimension['with two zeros']:.0f} dimensions else, "
            f"{dimension['with two zeros where z is alike']:.0f} there.",
        ],
    )


def _gain_cases(seed: int) -> Iterator[Case]:
    for width in GAIN_WIDTHS:
        z = gaussian(seed, width)
        for name, gain, token in _gains(z, seed):
            where = f"d = {width}, γ {name}"
            truth, plain = by_autograd(token, 0.0, gain), layer_norm_jacobian(token, None, 0.0)
            yield Case.at_most(seed, where, distance(plain * gain, truth), ROUND_OFF)
            error = distance(layer_norm_jacobian(token, gain, 0.0), truth)
            yield Case(seed, where, error, error <= ROUND_OFF, "left")
            lost = right_kernel(functional.layer_norm(token, (width,), eps=0.0), centred=True)
            few = int((gain == 0).sum()) <= 1
            yield replace(_kernel_case(seed, where, truth, lost, "kernel"), met=few, at={"gain": name})
            yield _kernel_case(seed, where, truth.T, lost, "gradients")


def _kernel_case(seed: int, where: str, matrix: Tensor, lost: Tensor, part: str) -> Case:
    """A case that holds where `lost` [D, 2] spans the kernel of `matrix`; its value is the dimension."""
    sigma = singular_values(matrix)
    dimension = len(sigma) - numerical_rank(sigma, 1e-12)[0]
    residual = float((matrix @ lost).norm() / sigma[0])
    holds = dimension == 2 and residual <= ROUND_OFF
    where = f"{where}, kernel of dimension {dimension}, {residual:.0e} of span{{1, ẑ}} comes through"
    return Case(seed, where, dimension, holds, part)


def _gains(z: Tensor, seed: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """γ [D] by name, with the token that it is tried on."""
    width = len(z)
    drawn = gaussian(1000 + seed, width)
    one = torch.ones(width, dtype=torch.float64)
    yield "= 1", one, z
    yield "= 2.5", 2.5 * one, z
    yield "~ N(1, 0.02²)", 1 + 0.02 * drawn, z
    yield "of both signs", drawn.sign() * (1 + drawn.abs()), z
    yield "from 1e-3 to 1e3", torch.logspace(-3, 3, width, dtype=torch.float64), z
    yield "with one zero", _with_zeros(1 + 0.1 * drawn, 1), z
    yield "with two zeros", _with_zeros(1 + 0.1 * drawn, 2), z
    yield "with two zeros where z is alike", _with_zeros(1 + 0.1 * drawn, 2), torch.cat((z[1:2], z[1:]))
    yield "with half zeros", _with_zeros(1 + 0.1 * drawn, width // 2), z


def _with_zeros(gain: Tensor, count: int) -> Tensor:
    return torch.cat((torch.zeros_like(gain[:count]), gain[count:]))


def _left_residual(seed: int) -> float:
    """‖JᵀU‖/‖J‖ for our basis U of the left kernel, over all γ."""

    def residual(gain: Tensor, token: Tensor) -> float:
        truth = by_autograd(token, 0.0, gain)
        basis, _ = left_kernel(functional.layer_norm(token, (64,), eps=0.0), gain, centred=True)
        return float((truth.T @ basis).norm() / torch.linalg.matrix_norm(truth, 2))

    return max(residual(gain, token) for _, gain, token in _gains(gaussian(seed, 64), seed))
