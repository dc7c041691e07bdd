"""Name the scheme of each branch, by its own dataflow or by that of its whole stack.

Where the dataflow does not decide, the scheme is None and the placement is the name (GPT-2 differs from
Pre-LN only in its initialisation). Some schemes need the whole stack: Mix-LN's first blocks look like
Post-LN, KEEL's first block like Pre-LN, and LayerNorm Scaling's factor depends on the number of the block.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from normscope.anatomy.branches import FoundBranch
from normscope.anatomy.inside import (
    divided_by_norm,
    entry_scale,
    inner_norm,
    qk_norm,
    scalar_bias,
    value_normed,
)
from normscope.anatomy.types import Stack, at_call

Blocks = list[list[FoundBranch]]
BLENDED = "nanochat"
WITHOUT_NORMS = "residual-no-norm"


def name_schemes(blocks: Blocks, complete: bool) -> None:
    """Name every branch: by its stack where one rule holds for the whole stack, else by itself.

    Args:
        complete: whether everything was read; otherwise no stack is called free of norms.
    """
    for branch in _all(blocks):
        branch.scheme = next((name for name, holds in BRANCH_RULES if holds(branch)), None)
    whole = next((name for name, holds in STACK_RULES if holds(blocks)), None)
    if whole is not None and (complete or whole != WITHOUT_NORMS):
        for branch in _all(blocks):
            branch.scheme = whole


def named_by_long_skips(stack: Stack) -> Stack:
    """The stack with its branches named after nanochat where learnt shares of the stream and of its start are
    added before every block.

    In the first block both are the same value, so that only the others have a long skip.
    """
    learnt = [s for s in stack.long_skips if s.stream_scale == s.skip_scale == "learnt" and s.into]
    entered = {at_call(block.path, block.call) for block in stack.blocks[1:]}
    plain = all(branch.scheme is None and branch.placement == "pre" for branch in stack.branches)
    if not plain or not entered or {s.into for s in learnt} != entered or len({s.source for s in learnt}) > 1:
        return stack
    blocks = (
        replace(block, branches=tuple(replace(branch, scheme=BLENDED) for branch in block.branches))
        for block in stack.blocks
    )
    return replace(stack, blocks=tuple(blocks))


def _all(blocks: Blocks) -> list[FoundBranch]:
    return [branch for block in blocks for branch in block]


def _own(b: FoundBranch) -> str:
    return b.scheme or b.placement


def _kinds(b: FoundBranch) -> set[str]:
    """Kinds of the norms at its entry, or on the stream where there are none."""
    return {norm.kind for norm in b.norms_in or b.sum.norms_behind}


def _is_beside(b: FoundBranch) -> bool:
    return b.sum.several == "beside" and b.placement == "post"


def _is_ngpt(b: FoundBranch) -> bool:
    learnt = b.norm_out is not None and b.join == "learnt"
    return b.placement == "post" and (b.sum.skip_norm is not None or learnt)


def _is_keel_block(b: FoundBranch) -> bool:
    return b.placement == "post" and b.normed and isinstance(b.stream_scale, float)


def _is_post(b: FoundBranch) -> bool:
    """Norms on the stream alone, and no scale on the branch."""
    return b.placement == "post" and not b.normed and b.branch_scale is None


def _is_learnt(b: FoundBranch) -> bool:
    """A learnt scale on the branch alone."""
    return b.join == "learnt" and b.stream_scale is None


# DeepNorm's smallest α is an encoder's .81 (N⁴M)^1/16.
_LEAST_ALPHA = 0.8

BRANCH_RULES: tuple[tuple[str, Callable[[FoundBranch], bool]], ...] = (
    ("hyper-connections", lambda b: b.sum.several == "mixed"),
    ("mhc", lambda b: b.sum.several == "stochastic"),
    ("mhc-lite", lambda b: b.sum.several == "permuted"),
    ("kromhc", lambda b: b.sum.several == "kronecker"),
    ("siamesenorm", lambda b: _is_beside(b) and b.normed),
    ("residual-dual", _is_beside),
    ("parallel", lambda b: b.parallel),
    ("sigma-reparam", divided_by_norm),
    ("b2t", lambda b: b.placement == "post" and bool(b.sum.long_skips)),
    ("ngpt", _is_ngpt),
    ("keel", _is_keel_block),
    ("deepnorm", lambda b: _is_post(b) and _number(b.stream_scale) > _LEAST_ALPHA),
    ("admin", lambda b: _is_post(b) and b.join == "learnt"),
    ("gtrxl", lambda b: b.join == "gate" and b.recurrent),
    ("highway", lambda b: b.join == "gate"),
    ("gpas", lambda b: b.sum.shrunk),
    ("layerscale", lambda b: _is_learnt(b) and b.vector),
    ("fixup", lambda b: b.join == "learnt" and b.placement == "none" and scalar_bias(b)),
    ("rezero", lambda b: _is_learnt(b) and b.placement == "none"),
    ("dyt", lambda b: _kinds(b) == {"dyt"}),
    ("derf", lambda b: _kinds(b) == {"derf"}),
    ("seednorm", lambda b: _kinds(b) == {"seednorm"}),
    ("bhyt", lambda b: _kinds(b) == {"bhyt"}),
    ("scalenorm", lambda b: b.placement == "pre" and _kinds(b) == {"l2norm"}),
    ("layernorm-scaling", lambda b: b.placement == "pre" and 0 < (entry_scale(b) or 0) < 1),
    ("sub-ln", lambda b: b.placement == "pre" and inner_norm(b)),
)
"""Name → condition on a branch, in the order of precedence."""


def _is_mix_ln(blocks: Blocks) -> bool:
    """Post-LN blocks, then Pre-LN blocks."""
    kinds = [{_own(b) for b in block if b.join == "add"} for block in blocks]
    first = sum(kind == {"post"} for kind in kinds)
    return 0 < first < len(kinds) and kinds == [{"post"}] * first + [{"pre"}] * (len(kinds) - first)


def _is_keel(blocks: Blocks) -> bool:
    """A first block of plain Pre-LN, then KEEL."""
    first, rest = blocks[0], _all(blocks[1:])
    return bool(rest) and {_own(b) for b in first} == {"pre"} and {_own(b) for b in rest} == {"keel"}


def _is_b2t(blocks: Blocks) -> bool:
    """Post-LN blocks whose last sum reaches back to the block's entry."""
    return all([_own(b) for b in block] == ["post"] * (len(block) - 1) + ["b2t"] for block in blocks)


def _is_layernorm_scaling(blocks: Blocks) -> bool:
    """1/√l after the norm in every block l from the second on."""
    return len(blocks) > 1 and all(
        b.placement == "pre" and math.isclose(entry_scale(b) or 1.0, number**-0.5, rel_tol=1e-3)
        for number, block in enumerate(blocks, start=1)
        for b in block
    )


def _is_sub_ln(blocks: Blocks) -> bool:
    """A norm inside every branch; Magneto's cross-attention has none."""
    own = [b for b in _all(blocks) if b.kind != "cross-attention"]
    crossed = [_own(b) for b in _all(blocks) if b.kind == "cross-attention"]
    return bool(own) and {_own(b) for b in own} == {"sub-ln"} and set(crossed) <= {"pre", "sub-ln"}


def _is_normformer(blocks: Blocks) -> bool:
    """Norms around the attention, a norm inside the feed-forward."""
    return all(
        b.placement == "pre" and inner_norm(b) if b.kind == "feed-forward" else b.placement == "peri"
        for b in _all(blocks)
    ) and {"attention", "feed-forward"} <= {b.kind for b in _all(blocks)}


def _is_hybridnorm(blocks: Blocks) -> bool:
    """Norms on q, k and v, none at the entries, one on the stream after the attention."""
    attentions = [b for b in _all(blocks) if b.kind != "feed-forward"]
    return bool(attentions) and all(
        not b.normed and value_normed(b) and qk_norm(b) in ("head", "full") for b in attentions
    )


def _is_res_post(blocks: Blocks, qk: str) -> bool:
    """Res-post with this norm on queries and keys."""
    found = {qk_norm(b) for b in _all(blocks) if b.kind in ("attention", "cross-attention")}
    return all(_own(b) == "res-post" for b in _all(blocks)) and found == {qk}


def _is_dslm(blocks: Blocks) -> bool:
    """λx + βF with λ² + β² = 1, the same everywhere."""
    return _keeps_variance(blocks) and len({b.stream_scale for b in _all(blocks)}) == 1


def _keeps_variance(blocks: Blocks) -> bool:
    """λ² + β² = 1 everywhere, β not 0."""
    pairs = [(b.stream_scale, b.branch_scale) for b in _all(blocks)]
    return all(
        isinstance(a, float) and isinstance(b, float) and math.isclose(a**2 + b**2, 1, rel_tol=1e-4)
        for a, b in pairs
    )


def _is_depth_mup(blocks: Blocks) -> bool:
    """x + βF(N(x)) with one fixed 0 < β < 1."""
    plain = all(_own(b) == "pre" and b.stream_scale is None for b in _all(blocks))
    scales = {b.branch_scale for b in _all(blocks)}
    return plain and len(scales) == 1 and 0 < _number(scales.pop()) < 1


def _number(scale: object) -> float:
    return scale if isinstance(scale, float) else 0.0


def _is_without_norms(blocks: Blocks) -> bool:
    """Plain sums and no norm anywhere."""
    return all(_own(b) == "none" and b.join == "add" for b in _all(blocks))


STACK_RULES: tuple[tuple[str, Callable[[Blocks], bool]], ...] = (
    ("mix-ln", _is_mix_ln),
    ("keel", _is_keel),
    ("b2t", _is_b2t),
    ("layernorm-scaling", _is_layernorm_scaling),
    ("sub-ln", _is_sub_ln),
    ("normformer", _is_normformer),
    ("hybridnorm", _is_hybridnorm),
    ("swin-v2", lambda blocks: _is_res_post(blocks, "cosine")),
    ("olmo2", lambda blocks: _is_res_post(blocks, "full")),
    ("dslm", _is_dslm),
    ("unit-scaling", _keeps_variance),
    ("depth-mup", _is_depth_mup),
    (WITHOUT_NORMS, _is_without_norms),
)
"""Name → condition on a stack, in the order of precedence."""
