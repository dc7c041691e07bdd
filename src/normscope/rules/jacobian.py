"""NS4xx: findings of the Jacobian of a whole stack."""

from collections.abc import Iterator

from normscope.anatomy import Stack
from normscope.rules.figures import ends, relative_gain
from normscope.rules.rule import Case, Hit, figure, note_or_warning, rule

DECADES = 2.0
"""Largest |log10| of the gain relative to the stream's own growth. Published models: under 0.4."""


@rule(
    "NS401",
    summary="The stack as a whole shrinks or amplifies small differences between inputs.",
    why="""The stack's Jacobian J maps a change of the embeddings to a change of the last block's stream. Its
        RMS gain over random directions, divided by the factor by which the stream itself grew, says what
        happens to a difference of one percent. Far below one, different inputs arrive alike, and the
        gradient, which passes through Jᵀ, shrinks as much. Far above one, the map is chaotic and so are its
        gradients.""",
    threshold=f"""log10 of the RMS gain of the stack, less log10 of the stream's growth, outside ±{DECADES:g}:
        a warning, or a note where the stack's stream was not read as a whole. Stacks that a token
        enters with less than 10^-{DECADES:g} of the stream's RMS are left out: for such a token
        (ViT-MAE's class token starts at 0) every change is a large one.""",
    source="""Schoenholz et al. 2017, arXiv:1611.01232 (order and chaos); Dong et al. 2021, arXiv:2103.03404;
        the figures in docs/thresholds.md.""",
    remedy="""Against contraction: fewer Post-LN blocks, or a scaled skip (DeepNorm). Against expansion: norms
        at the branches' entry, smaller initial output projections, and an ε that is far below the
        variances it guards (NS505).""",
    remedies=("deepnorm", "branch-scale", "norm-eps"),
)
def gain_spread(case: Case) -> Iterator[Hit]:
    gains = case.finite("jacobian/contraction")
    for stack in case.anatomy.stacks:
        relative = relative_gain(case, stack)
        if relative is None or abs(relative) <= DECADES or _has_faint_token(case, stack):
            continue
        what = "shrinks" if relative < 0 else "amplifies"
        message = (
            f"{stack.name} {what} small relative differences by a factor of 10^{abs(relative):.1f} "
            f"(log10 of the gain: {figure(gains[stack.name])})."
        )
        rows = case.rows((stack.name,), "jacobian/contraction")
        rows += case.rows((f"{stack.name}.input", stack.blocks[-1].site), "stream/rms")
        yield Hit(note_or_warning(stack.complete), ends(stack), message, rows)


def _has_faint_token(case: Case, stack: Stack) -> bool:
    """True where a token enters the stack so small that every change of it is a large relative one."""
    least = case.finite("stream/faintest-token").get(f"{stack.name}.input")
    return least is not None and least < 10**-DECADES
