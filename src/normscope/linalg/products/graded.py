"""Graded matrices Q · diag(2^e) · T: products whose scales are hundreds of nats apart, without overflow.

Multiplying from the left by a factor J keeps the form (UDT, also "stratification"). The columns of
(J Q) diag(2^e) are sorted by size, and J Q Π = Q′ R by Householder QR. The size of each row of R diag(2^e) Π
goes to e′, its shape to T′ = W Πᵀ T, with |W| ≤ 1. All scales are powers of two and are kept as exponents, so
scaling is exact; T stays well conditioned, and small singular values keep their relative accuracy.

A column of J Q whose part orthogonal to the earlier ones is only round-off belongs to a kernel; it gets e =
−∞.

Shapes: B matrices at once, d×d each. Source: Loh et al. 1989, "Stable matrix-multiplication algorithms for
low-temperature numerical simulations of fermions"; Stewart 1997, "On graded QR decompositions of products
of matrices".
"""

from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

SLACK_BITS = 5.0
"""A row may exceed its diagonal by 2⁵ before the columns are sorted again, so T′ stays well conditioned."""

MAX_SORTS = 4


@dataclass(frozen=True)
class Graded:
    """Q diag(2^e) T.

    Attributes:
        q: orthogonal [B, d, d].
        exponents: e [B, d], whole numbers in float64; −inf for a zero row.
        t: [B, d, d], rows of largest entry in [1/2, 1).
        kept: least ratio of a diagonal of R to its round-off [B]; large is safe.
        dropped: largest such ratio that was treated as round-off [B]; 0 where there was none.
    """

    q: Tensor
    exponents: Tensor
    t: Tensor
    kept: Tensor
    dropped: Tensor

    @classmethod
    def of(cls, q: Tensor) -> "Graded":
        """Start of a product from an orthogonal Q [B, d, d]: e = 0, and T = Q⁻¹ is left out."""
        batch, d, _ = q.shape
        eye = torch.eye(d, dtype=q.dtype, device=q.device).expand(batch, d, d)
        kept, dropped = q.new_full((batch,), inf), q.new_zeros(batch)
        return cls(q, q.new_zeros(batch, d), eye, kept, dropped)

    def times(self, factor: Tensor, round_off: float) -> "Graded":
        """J · (Q 2^e T) for J = `factor` [B, d, d], whose entries are known to `round_off` of their size."""
        mantissas, bits = _scaled(factor)
        images = mantissas @ self.q
        noise = round_off * (mantissas.abs() @ self.q.abs()).amax(-2)
        order = _descending(self.exponents + images.abs().amax(-2).log2())
        for attempt in range(MAX_SORTS):
            columns = images.gather(-1, order.unsqueeze(-2).expand_as(images))
            exponents, floor = self.exponents.gather(-1, order), noise.gather(-1, order)
            q, r = torch.linalg.qr(columns)
            diagonal = r.diagonal(dim1=-2, dim2=-1).abs()
            dead = (diagonal <= floor) | (exponents == -inf)
            sizes = torch.where(dead, -inf, diagonal.log2() + exponents)
            if attempt + 1 == MAX_SORTS or _dominant(r, exponents, sizes):
                break
            order = order.gather(-1, _descending(sizes))
        r = torch.where(dead.unsqueeze(-1), 0.0, r)
        w, rows = row_scaled(r, exponents)
        t, more = row_scaled(w @ self.t.gather(-2, order.unsqueeze(-1).expand_as(self.t)), None)
        margin = torch.where(exponents == -inf, inf, diagonal / floor)
        return Graded(
            q,
            rows + more + bits,
            t,
            torch.minimum(self.kept, torch.where(dead, inf, margin).amin(-1)),
            torch.maximum(self.dropped, torch.where(dead & margin.isfinite(), margin, 0.0).amax(-1)),
        )

    def transposed(self) -> "Graded":
        """Tᵀ diag(2^e) in graded form, without Qᵀ: it has the same singular values, nearer to diagonal."""
        eye = torch.eye(self.t.shape[-1], dtype=self.t.dtype, device=self.t.device).expand_as(self.t)
        turned = replace(self, q=eye, t=eye).times(self.t.transpose(-1, -2), 0.0)
        return replace(turned, kept=self.kept, dropped=self.dropped)


def _scaled(factor: Tensor) -> tuple[Tensor, Tensor]:
    """J / 2^b and b [B, 1], with the largest entry of J / 2^b in [1/2, 1)."""
    _, bits = torch.frexp(factor.abs().amax((-2, -1), keepdim=True))
    half = (bits // 2).double()  # in two steps: 2^b itself may be out of range
    return factor * torch.exp2(-half) * torch.exp2(half - bits), bits.double().squeeze(-1)


def _descending(sizes: Tensor) -> Tensor:
    return torch.sort(sizes, dim=-1, descending=True, stable=True).indices


def _dominant(r: Tensor, exponents: Tensor, sizes: Tensor) -> bool:
    """Whether each row of R diag(2^e) is about as large as its diagonal, and zero rows come last."""
    rows = (r.abs().log2() + exponents.unsqueeze(-2)).amax(-1)
    alive = sizes > -inf
    in_order = bool((alive[..., :-1] | ~alive[..., 1:]).all())
    return in_order and bool((~alive | (rows <= sizes + SLACK_BITS)).all())


def row_scaled(matrix: Tensor, exponents: Tensor | None) -> tuple[Tensor, Tensor]:
    """M diag(2^e) as diag(2^r) W with the largest entry of each row of W in [1/2, 1): (W, r)."""
    mantissas, bits = torch.frexp(matrix)
    sizes = bits.double() if exponents is None else bits + exponents.unsqueeze(-2)
    sizes = torch.where(mantissas == 0, -inf, sizes)
    rows = sizes.amax(-1, keepdim=True)
    down = torch.where(mantissas == 0, 0.0, sizes - rows)
    return mantissas * torch.exp2(down), rows.squeeze(-1)
