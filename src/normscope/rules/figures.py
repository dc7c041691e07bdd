"""Figures that rules compare with their thresholds and that need more than one row of the table.

Each is None where a row it needs was not measured or is not finite, or where its denominator is zero.
"""

import math
from collections.abc import Mapping
from statistics import median

from normscope.anatomy import Stack
from normscope.probes.attention import ENTROPY, ONE_KEY
from normscope.rules.rule import Case


def upper_half(stack: Stack) -> tuple[str, str]:
    """Sites of the block at half depth and of the last one."""
    return stack.blocks[(len(stack.blocks) - 1) // 2].site, stack.blocks[-1].site


def ends(stack: Stack) -> tuple[str, str]:
    """Sites of the first and the last block."""
    return stack.blocks[0].site, stack.blocks[-1].site


def growth(case: Case, stack: Stack) -> float | None:
    """RMS of the stream after the last block over that at half depth."""
    half, last = upper_half(stack)
    return _ratio(case.finite("stream/rms"), last, half)


def diversity_kept(case: Case, stack: Stack) -> float | None:
    """Token diversity of what leaves the stack over that of what enters it."""
    return _ratio(case.finite("stream/diversity"), f"{stack.name}.hidden", f"{stack.name}.input")


def decline(case: Case, stack: Stack) -> tuple[float, float] | None:
    """Median update-to-stream ratio of the branches in the lower half and in the upper quarter.

    Branches that start at zero do not count.
    """
    ratios = {site: v for site, v in case.finite("branch/update-ratio").items() if v > 0}
    count = len(stack.blocks)
    parts = stack.blocks[: count // 2], stack.blocks[count - max(1, count // 4) :]
    low, high = ([ratios[b.site] for k in part for b in k.branches if b.site in ratios] for part in parts)
    return (median(low), median(high)) if low and high else None


def relative_gradients(case: Case, stack: Stack) -> tuple[float, float] | None:
    """‖∂loss/∂x‖ · RMS(x) after the first block and after the last one."""
    gradient, rms = case.finite("gradient/stream"), case.finite("stream/rms")
    first, last = ends(stack)
    if any(site not in figures for figures in (gradient, rms) for site in (first, last)):
        return None
    return gradient[first] * rms[first], gradient[last] * rms[last]


def relative_gain(case: Case, stack: Stack) -> float | None:
    """log10 of the RMS gain of the stack's Jacobian, less log10 of the growth of the stream's RMS."""
    gain = case.finite("jacobian/contraction").get(stack.name)
    grown = _ratio(case.finite("stream/rms"), stack.blocks[-1].site, f"{stack.name}.input")
    return None if gain is None else gain - math.log10(grown or 1.0)


def qk_shares(case: Case) -> dict[str, float]:
    """RMS gradient of W_Q or W_K, the larger, over that of W_V, by branch.

    Attention in which no query sees two keys has no choice to learn, and is left out.
    """
    q, k, v = (case.finite(f"gradient/{role}") for role in "qkv")
    idle = {row.site for row in case.table if row.quantity == ENTROPY and ONE_KEY in row.how}
    sites = [site for site in v if v[site] > 0 and site in q and site in k and site not in idle]
    return {site: max(q[site], k[site]) / v[site] for site in sites}


def _ratio(figures: Mapping[str, float], above: str, below: str) -> float | None:
    if above not in figures or not figures.get(below):
        return None
    return figures[above] / figures[below]
