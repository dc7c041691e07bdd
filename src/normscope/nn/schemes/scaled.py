"""Sums scaled by depth: LayerNorm Scaling, DeepScaleLM, depth-μP, unit scaling."""

import math
from types import MappingProxyType

from normscope.nn.joins import Scaled
from normscope.nn.placement import Rule, Slot, Where, norms_at
from normscope.nn.scheme import Initialisation, Scheme

PRE_SLOTS = norms_at(Slot.BRANCH_IN, Slot.FINAL)


LAYERNORM_SCALING = Scheme(
    "layernorm-scaling",
    "x + F(N(x)/√l)",
    PRE_SLOTS,
    "Sun et al. 2025, arXiv:2502.05795; no 1/√(2L) on the weights beside it, as in their code",
    entry_scale=lambda where: where.block**-0.5,
)


def dslm_beta(where: Where) -> float:
    """β: β² = 2/N of N branches, .005 at 192 layers."""
    return math.sqrt(2 / where.num_sublayers)


def dslm_lambda(where: Where) -> float:
    """λ: λ² = 1 − β², which keeps the variance of the stream."""
    return math.sqrt(1 - 2 / where.num_sublayers)


def _correlation(where: Where) -> float:
    """Correlation r of two tokens at a branch's input: .221 at the first, then by the paper's moments."""
    beta = 2 / where.num_sublayers
    r = 0.221
    for index in range(where.sublayer - 1):
        feed_forward = index % where.per_block == where.per_block - 1
        r_out = r + (math.sqrt(1 - r * r) - r * math.acos(r)) / math.pi if feed_forward else 1.0
        r = min(1.0, (1 - beta) * r + beta * r_out)
    return r


DSLM = Scheme(
    "dslm",
    "λx + βF(N(x)), λ² = 1 − 1/L, β² = 1/L",
    PRE_SLOTS,
    "Kedia et al. 2024 (DeepScaleLM), arXiv:2403.09635",
    join=Scaled(stream_scale=dslm_lambda, branch_scale=dslm_beta),
    initialisation=Initialisation(
        "fan-in",
        MappingProxyType(
            {
                # Attention averages tokens of correlation r to a variance r; v and o compensate for that.
                **dict.fromkeys(("v", "o"), lambda where: _correlation(where) ** -0.25),
                # Both maps of the feed-forward have variance √½/d, because the ReLU loses half.
                **dict.fromkeys(("up", "gate"), lambda where: 2**-0.25),
                "down": lambda where: 2 * 2**-0.25,
            }
        ),
        embedding=lambda where: 2**-0.5,
    ),
)


def depth_mup(exponent: float = 1.0) -> Scheme:
    """Depth-μP with a = `exponent`: branches × m^-a, m = depth/base_depth; `SCHEMES` has a = 1.

    a = ½ is depth-μP (Yang et al. 2023, arXiv:2310.02244), a = 1 CompleteP. It needs the learning rates and
    Adam's ε of `param_groups`.
    """

    def branch_scale(where: Where) -> float:
        return (where.num_blocks / where.base_depth) ** -exponent

    return Scheme(
        "depth-mup",
        "x + m^-a F(N(x)), m = L over the base depth, a = 1",
        PRE_SLOTS,
        "Dey et al. 2025 (CompleteP), arXiv:2505.01618",
        join=Scaled(branch_scale=branch_scale),
        depth_exponent=exponent,
    )


DEPTH_MUP = depth_mup()


def tau(where: Where) -> float:
    """τ = 1/√(L + i − 1) at branch i: embedding, attentions and feed-forwards then have equal weights."""
    return (where.num_sublayers / 2 + where.sublayer - 1) ** -0.5


def _over_root(numerator: Rule) -> Rule:
    return lambda where: numerator(where) / math.sqrt(1 + tau(where) ** 2)


UNIT_SCALING = Scheme(
    "unit-scaling",
    "(x + τF(N(x)))/√(1 + τ²), τ = 1/√(L + i − 1) at branch i",
    PRE_SLOTS,
    "Blake et al. 2024 (u-μP), arXiv:2407.17465, Appendix G with both ratios 1; the stream's part of it",
    join=Scaled(stream_scale=_over_root(lambda where: 1.0), branch_scale=_over_root(tau)),
    initialisation=Initialisation("fan-in"),
)
