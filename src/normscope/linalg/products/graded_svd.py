"""Log singular values of a graded matrix diag(2^e) T with relative accuracy.

First, QR steps: (diag(2^e) T)ᵀ in graded form has the same σ, and each step reduces the coupling of rows
i < j by (σ_j/σ_i)². Then rows are split into groups that are orthogonal to round-off. Each group goes to
LAPACK's preconditioned one-sided Jacobi (dgejsv) where its scales fit into float64, else to `jacobi.py`,
which has no such limit. Cost: O(d³).

Source: Drmač & Veselić 2008, "New fast and accurate Jacobi SVD algorithm" I, II.
"""

from math import inf, log

import numpy as np
import torch
from torch import Tensor

from normscope.linalg.products.graded import Graded
from normscope.linalg.products.jacobi import jacobi_log_lengths

QR_STEPS = 2
MAX_QR_STEPS = 20
LAPACK_BITS = 400  # scales 2^±200 about their middle: dgejsv squares them, and float64 ends at 2^±1022


def log_singular_values(matrix: Graded) -> tuple[Tensor, float]:
    """(log σ [B, d], descending, −inf for zero rows; largest cosine left between two rows)."""
    for _ in range(QR_STEPS):
        matrix = matrix.transposed()
    for _ in range(MAX_QR_STEPS):
        if not any(_too_wide(rows, scales) for rows, scales in _living_rows(matrix)):
            break
        matrix = matrix.transposed()
    values = torch.full_like(matrix.exponents, -inf)
    worst = 0.0
    for number, (rows, scales) in enumerate(_living_rows(matrix)):
        for group in _groups(rows):
            values[number, group], cosine = _group_log_values(rows[group], scales[group])
            worst = max(worst, cosine)
    return values.sort(dim=-1, descending=True).values, worst


def _living_rows(matrix: Graded) -> list[tuple[Tensor, Tensor]]:
    """The rows [r, d] of each matrix that are not zero, and their exponents [r]; the largest first."""
    living = []
    for t, exponents in zip(matrix.t, matrix.exponents, strict=True):
        order = torch.sort(exponents, descending=True, stable=True).indices[: int(exponents.isfinite().sum())]
        living.append((t[order], exponents[order]))
    return living


def _groups(rows: Tensor) -> list[slice]:
    """Runs of rows such that rows of different runs are orthogonal to round-off."""
    r, d = rows.shape
    if r == 0:
        return []
    unit = rows / rows.norm(dim=-1, keepdim=True)
    coupled = (unit @ unit.T).abs() > d**0.5 * torch.finfo(rows.dtype).eps
    last = torch.where(coupled, torch.arange(r, device=rows.device), 0).amax(-1)
    reach = torch.cummax(last, 0).values.tolist()
    ends = [i + 1 for i, furthest in enumerate(reach) if furthest <= i]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _too_wide(rows: Tensor, exponents: Tensor) -> bool:
    """Whether some group's scales are too far apart for LAPACK."""
    if float(exponents.amax() - exponents.amin() if len(rows) else 0) <= LAPACK_BITS:
        return False
    return any(float(exponents[g][0] - exponents[g][-1]) > LAPACK_BITS for g in _groups(rows))


def _group_log_values(rows: Tensor, exponents: Tensor) -> tuple[Tensor, float]:
    """Log σ [r] of diag(2^e) T for rows [r, d]."""
    if len(rows) == 1:
        return rows.norm(dim=-1).log() + exponents * log(2), 0.0
    middle = ((exponents[0] + exponents[-1]) / 2).round()
    if float(exponents[0] - exponents[-1]) <= LAPACK_BITS:
        from scipy.linalg import lapack  # imported late: it is slow to import

        scaled = (rows * torch.exp2(exponents - middle).unsqueeze(-1)).cpu().numpy().T
        # joba "C": full accuracy for columns of any scale; no U, no V, no transposing
        values, _, _, work, _, info = lapack.dgejsv(scaled, joba=0, jobu=3, jobv=3, jobr=0, jobt=1)
        if info == 0 and (values > 0).all():
            logs = np.log(values) + np.log(work[0] / work[1])
            return torch.as_tensor(logs).to(rows.device) + middle * log(2), 0.0
    return jacobi_log_lengths(rows.clone(), exponents)
