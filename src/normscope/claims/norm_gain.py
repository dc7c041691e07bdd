"""Effect of a norm's affine γ on its Jacobian: the side that it multiplies, and the kernel that it changes.

Shapes: D width.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from normscope.claims.experiments import ROUND_OFF, distance, gaussian
from normscope.claims.form import Case, Evidence, Figure, Sentence, Setup, claim
from normscope.claims.norm_jacobian import by_autograd
from normscope.linalg import layer_norm_jacobian, left_kernel, numerical_rank, right_kernel, singular_values

WIDTHS = (4, 16, 64, 256)


@claim(
    "A3",
    asks="J diag(γ), and for the part on the left diag(γ) J, is at most 1e-10 of the matrix off autograd's "
    "Jacobian with γ; what is called unchanged is taken to at most 1e-10 of ‖J‖, and has as many dimensions",
    parts={
        "left": "γ multiplies it from the left.",
        "kernel": Sentence("γ leaves the null space {v : Jv = 0} as it is.", "at most one γ is zero"),
        "gradients": "γ leaves the directions whose gradient is lost, {u : Jᵀu = 0}, as they are.",
    },
)
def side_of_gain(setup: Setup) -> Evidence:
    """diag(γ) on either side, and both kernels, for γ alike, drawn, of both signs, spread out, with zeros."""
    cases = setup.cases(_gain_cases)
    off = [case.value for case in cases if case.part == "left"]
    moved = max(_left_residual(seed) for seed in setup.seeds)
    return Evidence(
        cases,
        Figure.largest("largest relative error of J diag(γ)", cases),
        notes=[
            f"diag(γ) J is off by {max(off):.0e} of the matrix.",
            "J diag(γ) is right where all γ are alike, and there alone.",
            f"{{u : Jᵀu = 0}} becomes γ⁻¹ ⊙ span{{1, ẑ}}: Jᵀ leaves {moved:.0e} of that.",
            "Two zeros in γ widen the null space only where z is the same at both coordinates: "
            f"{_two_zeros(cases, 'two zeros'):.0f} dimensions else, {_two_zeros(cases, 'alike'):.0f} there.",
        ],
    )


def _gain_cases(seed: int) -> Iterator[Case]:
    for width in WIDTHS:
        z = gaussian(seed, width)
        for name, gain, token in _gains(z, seed):
            where = f"d = {width}, γ {name}"
            truth, plain = by_autograd(token, 0.0, gain), layer_norm_jacobian(token, None, 0.0)
            yield Case.at_most(seed, where, distance(plain * gain, truth), ROUND_OFF)
            error = distance(layer_norm_jacobian(token, gain, 0.0), truth)
            yield Case(seed, where, error, error <= ROUND_OFF, "left")
            lost = right_kernel(functional.layer_norm(token, (width,), eps=0.0), centred=True)
            few = int((gain == 0).sum()) <= 1
            yield _kernel_case(seed, where, truth, lost, met=few, part="kernel")
            yield _kernel_case(seed, where, truth.T, lost, part="gradients")


def _kernel_case(seed: int, where: str, matrix: Tensor, lost: Tensor, *, part: str, met: bool = True) -> Case:
    """A case that holds where `lost` [D, 2] spans the kernel of `matrix`; its value is the dimension."""
    values = singular_values(matrix)
    dimension = len(values) - numerical_rank(values, 1e-12)[0]
    residual = float((matrix @ lost).norm() / values[0])
    holds = dimension == 2 and residual <= ROUND_OFF
    where = f"{where}, kernel of dimension {dimension}, {residual:.0e} of span{{1, ẑ}} comes through"
    return Case(seed, where, dimension, holds, part, met=met)


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


def _two_zeros(cases: list[Case], ending: str) -> float:
    """Dimension of the null space of the largest width."""
    return next(
        case.value
        for case in cases
        if case.part == "kernel" and f"d = {WIDTHS[-1]}" in case.where and f"{ending}," in case.where
    )


def _left_residual(seed: int) -> float:
    """‖JᵀU‖/‖J‖ for our basis U of the left kernel, over all γ."""
    z = gaussian(seed, 64)
    found = []
    for _, gain, token in _gains(z, seed):
        truth = by_autograd(token, 0.0, gain)
        basis, _ = left_kernel(functional.layer_norm(token, (64,), eps=0.0), gain, centred=True)
        found.append(float((truth.T @ basis).norm() / torch.linalg.matrix_norm(truth, 2)))
    return max(found)
