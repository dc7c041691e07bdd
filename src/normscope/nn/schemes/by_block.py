"""Schemes whose norm placement depends on the block or the branch."""

from normscope.nn.joins import Scaled
from normscope.nn.placement import Placement, Slot, Where, norms_at
from normscope.nn.scheme import Initialisation, Inside, Scheme


def num_post(num_blocks: int) -> int:
    """Number of Post-LN blocks in Mix-LN: a quarter, at least one."""
    return max(1, num_blocks // 4)


def _mix_ln(where: Where) -> Placement:
    if where.block <= num_post(where.num_blocks):
        return norms_at(Slot.STREAM, Slot.FINAL)
    return norms_at(Slot.BRANCH_IN, Slot.FINAL)


MIX_LN = Scheme(
    "mix-ln",
    "N(x + F(x)) for l ≤ L/4, then x + F(N(x))",
    _mix_ln,
    "Li et al. 2024, arXiv:2412.13795",
)


def _keel(where: Where) -> Placement:
    return norms_at(Slot.BRANCH_IN) if where.block == 1 else norms_at(Slot.BRANCH_IN, Slot.STREAM)


def keel_alpha(where: Where) -> float:
    """α: the number of sublayers, 2L; 1 in the first block."""
    num_sublayers = where.num_sublayers
    return 1.0 if where.block == 1 else float(num_sublayers)


KEEL = Scheme(
    "keel",
    "N(αx + F(N(x))), α = 2L; x + F(N(x)) in the first block",
    _keel,
    "Chen and Wei 2026, arXiv:2601.19895",
    join=Scaled(stream_scale=keel_alpha),
)


def _hybridnorm(where: Where) -> Placement:
    # The only stream norm is between attention and feed-forward; the sum after the feed-forward has none.
    return norms_at(Slot.FINAL) if where.kind == "feed-forward" else norms_at(Slot.STREAM, Slot.FINAL)


HYBRIDNORM = Scheme(
    "hybridnorm",
    "z = N(x + attention(x)) with norms on q, k and v of each head; z + FFN(z)",
    _hybridnorm,
    "Zhuo et al. 2025, arXiv:2503.04598; GPT-2's initialisation, as in their code",
    initialisation=Initialisation("gpt2"),
    inside=Inside(qk_norm="head", v_norm=True),
)


def _normformer(where: Where) -> Placement:
    slots = (Slot.BRANCH_IN, Slot.FINAL)
    return norms_at(*slots) if where.kind == "feed-forward" else norms_at(*slots, Slot.BRANCH_OUT)


NORMFORMER = Scheme(
    "normformer",
    "x + N(attention(N(x))), a gain on each head; x + W₂ N(σ(W₁ N(x)))",
    _normformer,
    "Shleifer et al. 2021, arXiv:2110.09456",
    inside=Inside(before_down=True, head_gain=True),
)
