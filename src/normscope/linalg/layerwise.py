"""σ_min of a product of layers, as 1/σ_max of its inverse from solves with the layers: `layer_inverse`.

Sources: Golub & Kahan 1965; Simoncini & Szyld 2003 (inexact Krylov methods); Ben-Israel & Greville.
"""

from collections.abc import Sequence
from math import hypot, inf, nan, sqrt

import numpy as np
import torch

from normscope.linalg.golub_kahan import (
    CONFIDENCE,
    Bidiagonalisation,
    LinearMap,
    Status,
    check_budget,
    round_off_of,
)
from normscope.linalg.layer_inverse import Layer, LayerwiseInverse
from normscope.linalg.smallest import LEAK_MARGIN, Side, SigmaMin, side_of

SOLVE_SHARE = 0.1  # tolerance of the solves, as a share of that of σ_min

PROCESS_SHARES = (0.6, 0.3)
"""Shares of the tolerance for Golub–Kahan–Lanczos, first and second try; solves get the rest."""

FIRST_SHARE = 0.1
"""Largest error of the first J⁺u, as a share of the tolerance: solves are tightened until it is met. Errors
of many layers and products add up, and a later restart costs the whole iteration.
"""


def layerwise_sigma_min(
    layers: Sequence[LinearMap | Layer],
    *,
    tol: float = 5e-2,
    max_products: float = 400.0,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> SigmaMin:
    """The smallest non-zero singular value of J = layers[-1] … layers[0], as 1/σ_max(J⁺).

    Costs some tens to a few hundred products of J, whatever its κ; a product with one of L layers counts 1/L.

    Args:
        layers: maps, or `Layer`s where kernels are known; the first layer first.
        max_products: budget in products of the whole J; a solve that would go beyond is cut short.
        tol, seed, confidence: as in `sigma_min`.

    Returns:
        As `sigma_min`. The error is the sum of three: Golub–Kahan–Lanczos on J⁺, the solves (measured at the
        last vector), and the leak into a named left kernel after the whole stack, relative to σ.
        NOT_CONVERGED where a solve misses its tolerance or pseudo-inverses do not multiply; `note` says so.

    Raises:
        ValueError: as `LayerwiseInverse`; a budget under 2; a confidence outside (0, 1).
        FloatingPointError: where a product is not finite.

    Examples:
        >>> layers = [Matrix(torch.diag(torch.tensor([1.0, 0.1 * k]))) for k in (1, 2, 3)]
        >>> round(layerwise_sigma_min(layers).value, 5)
        0.006
    """
    check_budget(max_products, confidence)
    inverse = LayerwiseInverse(layers, tol=SOLVE_SHARE * min(tol, 5e-2), budget=max_products)
    _started(inverse, seed).half_step()
    if (by := _excess(inverse, tol)) > 1:
        inverse.tighten(by)
        seed += 1  # measure the error at a vector outside the recycled directions
    while True:
        process = _started(inverse, seed)
        for share in PROCESS_SHARES:
            _iterate(inverse, process, share * tol, confidence)
            found = _result(inverse, process, confidence, tol)
            if found.status is Status.CONVERGED or inverse.blocked:
                return found
            if found.value and _leaking(inverse, found.value) > (1 - PROCESS_SHARES[-1]) * tol:
                return found  # tighter solves do not help
        if inverse.tol < 100 * torch.finfo(inverse.dtype).eps:
            return found
        inverse.tighten(4)  # the rest of the error is the solves'; their directions are kept
        seed += 1


def _started(inverse: LayerwiseInverse, seed: int) -> Bidiagonalisation:
    within = (inverse.between[-1].keep_left, inverse.between[0].keep_right)
    return Bidiagonalisation(inverse, seed=seed, within=within)


def _excess(inverse: LayerwiseInverse, tol: float) -> float:
    """Factor by which the error of the first product was too large, as far as the precision allows."""
    most = inverse.tol / (100 * torch.finfo(inverse.dtype).eps)
    return min((inverse.first_error or 0.0) / (FIRST_SHARE * tol), most)


def _iterate(inverse: LayerwiseInverse, process: Bidiagonalisation, tol: float, confidence: float) -> None:
    while not process.alpha or process.error(confidence) > tol:
        if inverse.blocked or process.exhausted:
            return
        process.step()


def _result(inverse: LayerwiseInverse, process: Bidiagonalisation, confidence: float, tol: float) -> SigmaMin:
    side = _side(inverse.layers)
    if not process.alpha:
        n, m = inverse.shape
        empty = (torch.zeros(size, dtype=inverse.dtype, device=inverse.device) for size in (m, n))
        note = _note(inverse) or "nothing of a random vector comes through"
        return SigmaMin(
            0.0, inf, inf, inverse.cost, Status.NOT_CONVERGED, side, inverse.leak, nan, note, *empty
        )
    largest, residual, right, left = process.triple(0)
    preimage, solve_error = right, inf
    if not inverse.is_spent:
        preimage, solve_error = inverse.error_of(left)
        inverse.measure_gain()
    if inverse.is_spent:  # before that call, or in it
        preimage = largest * right
    length = float(preimage.double().norm())
    solve_error = max(solve_error, inverse.first_error or 0.0, inverse.worst)
    slack = solve_error * sqrt(2) * float(np.linalg.norm(process.bidiagonal())) / largest
    slack += _leaking(inverse, 1 / length)
    error = _total(length, process.largest * (1 + process.error(confidence)), slack, inverse)
    error = inf if inverse.blocked else error
    return SigmaMin(
        value=1 / length,
        error=error,
        residual=residual,
        products=inverse.cost,
        status=Status.CONVERGED if error <= tol else Status.NOT_CONVERGED,
        deflated=side,
        kernel_gain=inverse.leak,
        largest=nan,
        note=_note(inverse),
        left=left,
        right=preimage / length,
    )


def _leaking(inverse: LayerwiseInverse, sigma: float) -> float:
    """Relative change of σ_min by D, the part that the layers leave in their named left kernels.

    By min–max, σ_min is at least σ(1 − ‖DJ⁺‖) and at most √(σ²(1 + ‖DJ⁺‖)² + ‖D restricted to J's kernel‖²).
    The first J⁺u has a random u, which shows at least 1/LEAK_MARGIN of ‖DJ⁺‖/√m in nine cases of ten; the
    last has the vector where J⁺ is largest. `inverse.gain` is of a random vector, too.
    """
    relative = max(LEAK_MARGIN * sqrt(inverse.shape[1]) * inverse.first_carried, inverse.carried)
    return relative + hypot(1.0, LEAK_MARGIN * (inverse.gain or 0.0) / sigma) - 1


def _total(length: float, upper: float, slack: float, inverse: LayerwiseInverse) -> float:
    """Relative error of 1/length, where ‖J⁺‖ is between `length` and `upper` up to a share `slack`."""
    slack += 8 * sum(round_off_of(layer.map) for layer in inverse.layers)
    if not slack < 1:
        return inf
    return max(1 - length / (upper + slack * length), 1 / (1 - slack) - 1)


def _note(inverse: LayerwiseInverse) -> str:
    if inverse.obstacle:
        return inverse.obstacle
    if inverse.is_spent:
        return f"the budget of {inverse.budget:g} products is spent"
    if inverse.blocked:
        return (
            f"a solve leaves a residual of {inverse.worst:.1g}: a layer has a kernel that was not named, or "
            "maps part of the range of the layers before it to zero"
        )
    return f"a named left kernel has a gain of {inverse.leak:.2g}" if inverse.leak > 1e-6 else ""


def _side(layers: Sequence[Layer]) -> Side:
    return side_of(layers[0].kernel is not None, any(layer.left_kernel is not None for layer in layers))
