"""The parts of `bench spectra` about layers: log σ of a thousand, products in batches, σ_min by inverses.

Shapes: B rows, D width.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, cast

import mpmath
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.process import seconds
from normscope.claims.real_blocks import product
from normscope.linalg import (
    Composition,
    JacobianOperator,
    dense,
    layerwise_sigma_min,
    product_log_singular_values,
    sigma_min,
    singular_values,
)
from normscope.nn import build

F64 = torch.float64
DIGITS = 1500


class Layer(nn.Module):
    """x + W₂ GELU(W₁ LN(x)), weights N(0, 1/d): the smallest Pre-LN layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = (nn.Linear(width, width) for _ in range(2))
        for linear in (self.up, self.down):
            nn.init.normal_(linear.weight, std=width**-0.5)

    def forward(self, x_BD: Tensor) -> Tensor:
        """(…, D) → (…, D)."""
        return x_BD + self.down(nn.functional.gelu(self.up(self.norm(x_BD))))


def layers(width: int, depth: int, dtype: torch.dtype = torch.float32) -> list[Layer]:
    """`depth` layers from seed 0, whose parameters require no gradient."""
    torch.manual_seed(0)
    return [Layer(width).to(dtype).requires_grad_(False) for _ in range(depth)]


def layer_jacobians(width: int, depth: int) -> Tensor:
    """J_l [L, d, d] of each layer at its own input, float64."""
    stack, factors = layers(width, depth, F64), []
    x = torch.randn(width, dtype=F64)
    for layer in stack:
        factors.append(dense(JacobianOperator(layer, x)))
        x = layer(x)
    return torch.stack(factors)


def log_sigma(width: int = 8, depth: int = 1000) -> dict[str, Any]:
    """Largest error of log σ in nats, against multi-precision, for normscope and for plain float64."""
    torch.manual_seed(0)
    kinds = {
        "Gaussian factors": torch.randn(depth, width, width, dtype=F64) / width**0.5,
        "Pre-LN layers": layer_jacobians(width, depth),
    }
    return {name: _log_sigma_errors(factors) for name, factors in kinds.items()}


def _log_sigma_errors(factors: Tensor) -> dict[str, Any]:
    expected = multiprecision(factors)
    found = product_log_singular_values(factors)
    plain = torch.linalg.svdvals(product(list(factors))).log()
    return {
        "error": float((found.log_values - expected).abs().max()),
        "stated": float(found.error.max()),
        "plain": float((plain - expected).abs().nan_to_num(torch.inf, torch.inf).max()),
        "range": [float(expected[-1]), float(expected[0])],
        "status": str(found.status),
    }


def multiprecision(factors: Tensor) -> Tensor:
    """log σ (d,) of J_L ⋯ J_1, descending, with `DIGITS` digits."""
    with mpmath.workdps(DIGITS):
        whole = mpmath.eye(factors.shape[-1])
        for factor in factors.tolist():
            whole = mpmath.matrix(factor) * whole
        values = [float(mpmath.log(s)) for s in mpmath.svd_r(whole, compute_uv=False)]
    return torch.tensor(values, dtype=F64).sort(descending=True).values


def batched(width: int = 64, depth: int = 1000, tokens: int = 1, vectors: int = 64, rounds: int = 5) -> Any:
    """Processor seconds per vector of Jv and Jᵀu on kept graphs, in batches and one by one, in turns."""
    f, x = nn.Sequential(*layers(width, depth)), torch.randn(tokens, width)
    op = JacobianOperator(f, x)
    rows = torch.randn(vectors, x.numel())
    alone = rows[: max(1, vectors // 16)]
    ways: dict[str, tuple[Callable[[], Tensor], int]] = {
        "Jv in a batch": (lambda: op.matmat(rows), len(rows)),
        "Jv one by one": (lambda: torch.stack([op.matvec(row) for row in alone]), len(alone)),
        "Jᵀu in a batch": (lambda: op.rmatmat(rows), len(rows)),
        "Jᵀu one by one": (lambda: torch.stack([op.rmatvec(row) for row in alone]), len(alone)),
    }
    gaps = []  # ‖a − b‖/‖b‖: a batch must give the same as its single vectors
    for kind in ("Jv", "Jᵀu"):
        together, one_by_one = ways[f"{kind} in a batch"][0](), ways[f"{kind} one by one"][0]()
        gaps.append(float((together[: len(alone)] - one_by_one).norm() / one_by_one.norm()))
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (run, count) in ways.items():
            spent[name].append(seconds(run).cpu / count)
    medians = {name: statistics.median(each) for name, each in spent.items()}
    return {"seconds": medians, "gap": max(gaps), "vectors": vectors, "tokens": tokens}


def inverse(
    width: int = 32, tokens: int = 12, depth: int = 12, gain: float = 1.0, budget: int = 400
) -> dict[str, Any]:
    """σ_min of a Pre-LN decoder's stack: layer-wise inverse, Golub–Kahan–Lanczos on J, dense; float64."""
    with sdpa_kernel(SDPBackend.MATH):
        maps = _block_maps(width, tokens, depth, gain)
        values = singular_values(product([dense(each) for each in maps]))
        true = float(values[-1])
        by_layers = layerwise_sigma_min(maps, max_products=budget)
        plain = sigma_min(Composition(*reversed(maps)), max_products=budget)
    return {
        "n": maps[0].shape[0],
        "condition": float(values[0]) / true,
        "true": true,
        "layers": _sigma_min_row(by_layers, true),
        "plain": _sigma_min_row(plain, true),
    }


def _sigma_min_row(found: Any, true: float) -> dict[str, Any]:
    return {
        "products": found.products,
        "error": abs(1 - true / found.value) if found.value else torch.inf,
        "stated": found.error,
        "status": str(found.status),
    }


def _block_maps(width: int, tokens: int, depth: int, gain: float) -> Sequence[JacobianOperator]:
    """Each block's Jacobian at its own input, with Xavier matrices times `gain`."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"depth": depth, "width": width, "heads": 2, "vocab": 16, "context": tokens}
    model = build("decoder", scheme="pre", **sizes).to(F64).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.xavier_normal_(parameter, gain=gain)
    state, maps = torch.randn(1, tokens, width, dtype=F64), []
    for block in cast(nn.ModuleList, model.blocks):
        maps.append(JacobianOperator(block, state))
        state = block(state)
    return maps
