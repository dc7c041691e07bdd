"""NS3xx: what the backward pass shows."""

from collections.abc import Collection, Iterator
from statistics import median

from normscope.anatomy import Stack
from normscope.probes.jacobian.derivative import TOLERANCE
from normscope.rules.figures import ends, qk_shares, relative_gradients
from normscope.rules.finding import Severity
from normscope.rules.rule import Case, Hit, figure, note_or_warning, rule

SPREAD = 1e3
"""Factor between the relative gradients at the two ends of a stack. Published models: under 3."""
STARVED = 1e-5
"""RMS gradient of W_Q and W_K over that of W_V under which queries and keys get none to speak of."""
APART = 1e-4
"""Token diversity from which on starved queries and keys are no matter of collapsed tokens."""

WRONG = TOLERANCE
"""Relative error against finite differences above which a derivative is wrong, as the probe has it."""


@rule(
    "NS301",
    summary="The loss hardly depends on the lower blocks: their gradient is lost on the way down.",
    why="""The gradient at a block is the product of all Jacobians above it, transposed. It is compared as the
        relative gradient, ‖∂loss/∂x‖ · RMS(x): what a change of the stream by one percent would do to the
        loss. A stack without norms and one with them can be compared that way, because rescaling x changes
        nothing. Adam's division hides a vanishing gradient until it nears Adam's ε or the batch's noise.""",
    threshold=f"""Relative gradient at the first block under 1/{SPREAD:g} of that at the last block of the
        stack.""",
    source="""Xiong et al. 2020, arXiv:2002.04745; Wang et al. 2022, arXiv:2203.00555; the figures in
        docs/thresholds.md.""",
    remedy="""Give the gradient a path beside the norms (Pre-LN, or DeepNorm's α on the skip), and check that
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
        RMS(x) grow at every block, and a global clip then takes the upper blocks' step away.""",
    threshold=f"""Relative gradient at the first block above {SPREAD:g} times that at the last block of the
        stack.""",
    source="""Res-post without QK-norm at 64 blocks: 7e6, with it 14, our measurement; Wang et al. 2022,
        arXiv:2203.00555.""",
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
    summary="Queries and keys get no gradient beside values: attention cannot learn where to look.",
    why="""The gradient of W_Q and W_K passes through the differences between the values that attention
        averages. With token diversity gone these are equal, and the gradient goes with the square root of the
        diversity, while that of W_V does not. It also has the size of the keys and queries themselves as a
        factor: with weights of a fixed small deviation on inputs that no norm has brought to unit size, the
        logits start near zero and hardly move.""",
    threshold=f"""RMS gradient of W_Q and of W_K both under {STARVED:g} of that of W_V. A note in some
        branches, a warning in half of a model's attention or more.""",
    source="""Noci et al. 2022, arXiv:2206.03126; our measurement for Post-LN: 0.53 at 2 blocks, 9e-8 at 32;
        Pre-LN: 3e-2.""",
    remedy="""Where the tokens have collapsed, treat that (NS202): placement, a scaled skip, smaller branches
        at the start. Where they are apart, the logits are too small at the start: larger W_Q and W_K, or a
        larger input to them.""",
    remedies=("deepnorm", "small-init"),
)
def qk_starved(case: Case) -> Iterator[Hit]:
    shares = qk_shares(case)
    sites = case.in_depth(site for site, share in shares.items() if share < STARVED)
    if not sites:
        return
    least = figure(min(shares[site] for site in sites))
    message = f"W_Q and W_K get down to {least} of W_V's gradient in {len(sites)} of {len(shares)} branches."
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
            "Treat the collapse of the tokens (NS202): placement, a scaled skip, smaller branches at first."
        )
    return (
        f"The tokens are apart (diversity {figure(median(around))}): the logits are too small at the start. "
        "Give W_Q and W_K more than a fixed deviation of 0.02 (1/√d at small widths), or scale what enters "
        "them up: a norm in front of the attention, embeddings × √d."
    )


@rule(
    "NS304",
    summary="A backward does not give the derivative of its forward.",
    why="""A backward written by hand, a detached tensor, a scaled gradient or a straight-through estimate
        makes autograd return something other than the derivative. Training then follows another direction
        than the loss's gradient, and no figure that rests on the Jacobian is about this forward.""",
    threshold=f"""Relative error of Jv against central differences of the forward above {WRONG:g}: a warning,
        or a note where a part of the model was not read, which may be what the difference comes from.""",
    source="""Exact mathematics: differences of step h err by h², and by rounding over h; the probe takes its
        own error off, and torch.autograd.gradcheck is the same test.""",
    remedy="""Where it is meant (quantisation, gradient scaling), ignore the finding with --ignore NS304. Else
        compare the named part with torch.autograd.gradcheck in float64, and look for detach(),
        torch.no_grad() and custom autograd.Functions in it.""",
)
def wrong_derivative(case: Case) -> Iterator[Hit]:
    errors = case.finite("derivative/relative-error")
    sites = case.in_depth(site for site, value in errors.items() if value > WRONG)
    if not sites:
        return
    worst = max(sites, key=lambda site: errors[site])
    message = (
        f"The derivative of {len(sites)} of {len(errors)} parts is not that of their forward; "
        f"that of {worst or 'the whole model'} is off by {figure(100 * errors[worst])} %."
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
    return Hit(Severity.WARNING, sites, message, rows)
