"""One-sided Jacobi on diag(2^e) T: log singular values with relative accuracy, whatever the scales.

Rows g_i = 2^{e_i} t_i are rotated pair by pair until all are orthogonal; their lengths are then the singular
values. Only ratios ρ = |g_j|/|g_i| ≤ 1 and cosines enter a rotation,

    tan θ = 2cρ / ((1 − ρ²) + √((1 − ρ²)² + 4c²ρ²)),

and tan θ/ρ, which the smaller row needs, is bounded too, so nothing under- or overflows. d/2 disjoint pairs
are rotated at once (round robin). Cost: about 10·r²·d per sweep of r rows, 3–8 sweeps.

Source: Hestenes 1958; Demmel & Veselić 1992, "Jacobi's method is more accurate than QR"; Drmač & Veselić
2008.
"""

from math import log

import torch
from torch import Tensor

from normscope.linalg.products.graded import row_scaled

MAX_SWEEPS = 30


def jacobi_log_lengths(t: Tensor, exponents: Tensor) -> tuple[Tensor, float]:
    """Log singular values [..., r] (any order) of diag(2^e) T, and the largest cosine two rows still have.

    Args:
        t: rows [..., r, d].
        exponents: e [..., r], whole numbers, finite.
    """
    rounds = _round_robin(t.shape[-2], t.device)
    enough = 4 * t.shape[-1] ** 0.5 * torch.finfo(t.dtype).eps
    cosine = 0.0
    for _ in range(MAX_SWEEPS):
        t, more = row_scaled(t, None)
        exponents = torch.where(more.isfinite(), exponents + more, 0.0)
        cosine = max([_rotate(t, exponents, pairs) for pairs in rounds], default=0.0)
        if cosine <= enough:
            break
    return t.norm(dim=-1).log() + exponents * log(2), cosine


def _round_robin(d: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Rounds of disjoint pairs that cover all pairs of d players: the circle method."""
    players = list(range(d + d % 2))  # where d is odd, the player paired with player d sits out
    rounds = []
    for _ in range(d - 1 + d % 2 if d > 1 else 0):
        met = zip(players[: len(players) // 2], reversed(players), strict=False)
        pairs = torch.tensor([pair for pair in met if max(pair) < d], dtype=torch.long, device=device)
        rounds.append((pairs[:, 0], pairs[:, 1]))
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def _rotate(t: Tensor, exponents: Tensor, pairs: tuple[Tensor, Tensor]) -> float:
    """Rotate all pairs of rows by their angle, in place; return the largest cosine before."""
    first, second = pairs
    x, y = t[..., first, :], t[..., second, :]
    ex, ey = exponents[..., first], exponents[..., second]
    nx, ny = (z.norm(dim=-1) for z in (x, y))
    swap = ex + nx.log2() < ey + ny.log2()  # x is the larger one from here on
    x, y = torch.where(swap.unsqueeze(-1), y, x), torch.where(swap.unsqueeze(-1), x, y)
    nx, ny = torch.where(swap, ny, nx), torch.where(swap, nx, ny)
    down = torch.exp2(torch.where(swap, ex - ey, ey - ex).clamp(max=1023))
    cosine = torch.where(ny > 0, (x * y).sum(-1) / (nx * ny), 0.0)
    shape = torch.where(nx > 0, ny / nx, 0.0)
    rho = down * shape
    gap = (1 - rho) * (1 + rho)
    root = gap + torch.sqrt(gap * gap + (2 * cosine * rho).square())
    slope = torch.where(cosine == 0, 0.0, 2 * cosine / root)  # tan θ / ρ
    cos = torch.rsqrt(1 + (slope * rho).square())
    onto_x, onto_y = (cos * slope * rho * down).unsqueeze(-1), (cos * slope * shape).unsqueeze(-1)
    cos = cos.unsqueeze(-1)
    larger, smaller = cos * x + onto_x * y, cos * y - onto_y * x
    swap = swap.unsqueeze(-1)
    t[..., first, :] = torch.where(swap, smaller, larger)
    t[..., second, :] = torch.where(swap, larger, smaller)
    return float(cosine.abs().max())
