"""NS3xx: findings of the backward pass."""

from collections.abc import Collection, Iterator
from statistics import median

from normscope.anatomy import Stack
from normscope.probes.jacobian.derivative import TOLERANCE
from normscope.rules.figures import ends, qk_shares, relative_gradients
from normscope.rules.rule import Case, Hit, figure, note_or_warning, rule

SPREAD = 1e3
"""Factor between the relative gradients at the two ends of a stack. Published models: under 3."""
STARVED = 1e-5
"""RMS gradient of W_Q and W_K over that of W_V under which queries and keys count as starved."""
APART = 1e-4
"""Token diversity from which on starved queries and keys have another cause than collapsed tokens."""

WRONG = TOLERANCE
"""Relative error against finite differences above which a derivative is wrong: the probe's tolerance."""


@rule(
    "NS301",
    summary="The loss hardly depends on the lower blocks: their gradient is lost on the way down.",
    why="""The gradient at a block is the product of all Jacobians above it, transposed. It is compared as the
        relative gradient, ‖∂loss/∂x‖ · RMS(x), which says how much a change of the stream by one percent
        changes the loss. Rescaling x does not change it, so stacks with and without norms can be compared.
        Adam's division hides a vanishing gradient until it nears Adam's ε or the batch's noise.""",
    threshold=f"""Relative gradient at the first block under 1/{SPREAD:g} of that at the last block of the
        stack: a warning, or a note where the stack's stream was not read as a whole.""",
    source="""Xiong et al. 2020, arXiv:2002.04745; Wang et al. 2022, arXiv:2203.00555; the figures in
        docs/thresholds.md.""",
    remedy="""Give the gradient a path around the norms (Pre-LN, or DeepNorm's α on the skip), and check that
        no gain or gate starts at zero between stream and loss.""",
    remedies=("pre-ln", "deepnorm"),
)
def gradient_vanish(case: Case) -> Iterator[Hit]:
    for stack in case.anatomy.stacks:
        pair = relative_gradients(case, stack)
        if pair and pair[1] > 0 and pair[0] < pair[1] / SPREAD:
            yield _hit(case, stack, pair, "vanishes on its way down")


@rule(
    "NS302",
    summary="The gradient grows on its way down: the lower blocks get all of it.",
    why="""Jacobians of norm above one multiply. A stream that a branch amplifies without a norm, or norms
        that divide by a tiny deviation (their Jacobian is 1/σ), make the relative gradient ‖∂loss/∂x‖ ·
        RMS(x) grow at every block. A global clip then removes the upper blocks' step.""",
    threshold=f"""Relative gradient at the first block above {SPREAD:g} times that at the last block of the
        stack: a warning, or a note where the stack's stream was not read as a whole.""",
    source="Wang et al. 2022, arXiv:2203.00555; the figures in docs/thresholds.md.",
    remedy="""Normalise the branches' input, start the branches small (output projections × 1/√(2L)),
        normalise q and k where logits grow. Clipping does not even it out: it scales the gradient of all
        blocks alike.""",
    remedies=("branch-scale", "qk-norm"),
)
def gradient_explode(case: Case) -> Iterator[Hit]:
    for stack in case.anatomy.stacks:
        pair = relative_gradients(case, stack)
        if pair and pair[0] > pair[1] * SPREAD:
            yield _hit(case, stack, pair, "grows on its way down")


@rule(
    "NS303",
    summary="Queries and keys get almost no gradient compared with values: attention cannot learn.",
    why="""The gradient of W_Q and W_K passes through the differences between the values that attention
        averages. When token diversity is lost the values are equal: this gradient falls with the square root
        of the diversity, that of W_V does not. The gradient is also proportional to the size of keys and
        queries. With weights of a fixed small deviation and inputs that no norm has brought to unit size,
        the logits start near zero and hardly move.""",
    threshold=f"""RMS gradient of W_Q and of W_K both under {STARVED:g} of that of W_V. A note in some
        branches, a warning in half of a model's attention or more. Silent where both are exactly zero
        behind a tensor of zeros, and not once that has left zero.""",
    source="""Noci et al. 2022, arXiv:2206.03126; docs/slopes.md: in the last of 32 blocks the
        ratio of both gradients is 2.7e-6 in Post-LN and 0.066 in Pre-LN.""",
    remedy="""Where the tokens have collapsed, fix the collapse first (NS202): change the placement, scale the
        skip, or start the branches smaller. Where the tokens differ, the logits are too small at the start:
        start W_Q and W_K larger, or enlarge their input.""",
    remedies=("deepnorm", "small-init"),
)
def qk_starved(case: Case) -> Iterator[Hit]:
    shares = qk_shares(case)
    zero = [site for site, share in shares.items() if share == 0]
    is_zero_start = len(zero) <= case.finite("wiring/num-freed").get("", 0.0)
    low = (site for site, share in shares.items() if share < STARVED and (share or not is_zero_start))
    sites = case.in_depth(low)
    if not sites:
        return
    least = figure(min(shares[site] for site in sites))
    message = (
        f"W_Q and W_K get as little as {least} of W_V's gradient in {len(sites)} of {len(shares)} branches."
    )
    rows = case.rows(sites, *(f"gradient/{role}" for role in "qkv"))
    grave = 2 * len(sites) >= len(shares)
    yield Hit(note_or_warning(grave), sites, message, rows, _remedy_of_starved(case, sites))


def _remedy_of_starved(case: Case, sites: Collection[str]) -> str:
    """Remedy for starved q and k, by the diversity of the tokens around the branches.

    Empty where the diversity is unknown: the rule's own remedy is used then.
    """
    diversity = case.finite("stream/diversity")
    blocks = {case.anatomy.blocks[case.depth[site]].site for site in sites if site in case.depth}
    around = [diversity[block] for block in blocks if block in diversity]
    if not around:
        return ""
    if median(around) < APART:
        return (
            "Fix the collapse of the tokens first (NS202): change the placement, scale the skip, or start "
            "the branches smaller."
        )
    return (
        f"The tokens differ (diversity {figure(median(around))}): the logits are too small at the start. "
        "Start W_Q and W_K with more than a fixed deviation of 0.02 (1/√d at small widths), or scale their "
        "input up: a norm in front of the attention, embeddings × √d."
    )


@rule(
    "NS304",
    summary="A backward does not give the derivative of its forward.",
    why="""A backward written by hand, a detached tensor, a scaled gradient or a straight-through estimate
        makes autograd return something other than the derivative. Training then follows another direction
        than the loss's gradient, and figures from the Jacobian do not describe this forward.""",
    threshold=f"""Relative error of Jv against central differences of the forward above {WRONG:g}: a warning,
        or a note where a part of the model was not read, because that part may cause the difference.""",
    source="""Exact mathematics: differences of step h err by h² and by rounding divided by h. The probe
        subtracts its own error; torch.autograd.gradcheck is the same test.""",
    remedy="""Where this is intended (quantisation, gradient scaling), ignore the finding with --ignore NS304.
        Otherwise compare the named part with torch.autograd.gradcheck in float64, and look for detach(),
        torch.no_grad() and custom autograd.Functions in it.""",
)
def wrong_derivative(case: Case) -> Iterator[Hit]:
    errors = case.finite("derivative/relative-error")
    sites = case.in_depth(site for site, value in errors.items() if value > WRONG)
    if not sites:
        return
    worst = max(sites, key=lambda site: errors[site])
    message = (
        f"{len(sites)} of {len(errors)} parts have a wrong derivative; "
        f"the largest error is {figure(100 * errors[worst])} %, in {worst or 'the whole model'}."
    )
    whole = not case.anatomy.unread and all(stack.complete for stack in case.anatomy.stacks)
    rows = case.rows(sites, "derivative/relative-error")
    yield Hit(note_or_warning(whole), sites, message, rows)


def _hit(case: Case, stack: Stack, pair: tuple[float, float], what: str) -> Hit:
    sites = ends(stack)
    message = (
        f"The gradient of {stack.name} {what}: relative to the stream it is {figure(pair[1])} after the last "
        f"block and {figure(pair[0])} after the first."
    )
    rows = case.rows(sites, "gradient/stream", "stream/rms")
    return Hit(note_or_warning(stack.complete), sites, message, rows)
