"""Maps of known spectra for every algorithm: random rotations of chosen singular values."""

import torch
from torch import Tensor

from normscope.linalg.maps import Matrix


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal entries, float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(n: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(drawn(n, n, seed=seed))[0]


def rotated(values: Tensor, *, shape: tuple[int, int] | None = None, seed: int = 0) -> Matrix:
    """U diag(σ) Vᵀ [m, n] with random rotations; square by default."""
    m, n = shape or (len(values), len(values))
    diagonal = torch.zeros(m, n, dtype=torch.float64)
    diagonal[range(len(values)), range(len(values))] = values.double()
    matrix = orthogonal(m, seed=2 * seed) @ diagonal @ orthogonal(n, seed=2 * seed + 1)
    return Matrix(matrix.to(values.dtype))


def spectra(n: int) -> dict[str, Tensor]:
    """Difficult sets of singular values (n,), in any order."""
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    cluster = 0.5 + 0.01 * uniform
    cluster[n // 3] = 0.6
    return {
        "uniform": uniform,
        "cluster and spike": cluster,
        "one cluster": 1 + 1e-6 * uniform,
        "all equal": torch.full((n,), 3.0, dtype=torch.float64),
        "pairs": torch.linspace(0.1, 1, n // 2, dtype=torch.float64).repeat_interleave(2)[:n],
        "triple top": torch.cat((torch.full((3,), 2.0).double(), uniform[3:])),
        "rank deficient": torch.where(torch.arange(n) < n // 3, uniform, 0.0),
        "zero": torch.zeros(n, dtype=torch.float64),
        "condition 1e2": torch.logspace(0, -2, n, dtype=torch.float64),
        "condition 1e9": torch.logspace(0, -9, n, dtype=torch.float64),
        "lognormal": torch.exp(drawn(n, seed=6)),
        "tiny": 1e-30 * uniform,
        "huge": 1e30 * uniform,
    }
