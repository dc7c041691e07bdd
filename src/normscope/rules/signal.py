"""NS2xx: findings of the forward pass."""

from collections.abc import Iterator

from normscope.forecast import Forecast
from normscope.rules.figures import decline, diversity_kept, growth, upper_half
from normscope.rules.finding import Severity
from normscope.rules.rule import Case, Hit, figure, note_or_warning, rule
from normscope.rules.trial import trial_hit

GROWTH = 8.0
"""Factor by which the RMS of the stream may grow over the upper half. Pre-LN: √2; copies: 2; no norm: 100."""
UNIFORM = 1e-4
"""Share of its token diversity that a stack must keep at initialisation."""
DECLINE = 0.01
"""Update-to-stream ratio under which the upper quarter's branches hardly write to the stream any more …"""
DECLINE_FALL = 0.1
"""… if it is also this much smaller than in the lower half (LayerScale is small everywhere, and fine)."""
ENTROPY = 0.05
"""Attention entropy, as a share of that of uniform attention, under which an attention is saturated."""
SPREAD = 1.0
"""Spread above which a softmax of Gaussian logits condenses on a few keys …"""
CONDENSED = 2.0
"""… and above which Σp² = 1 − 1/spread passes ½: one key outweighs all others together."""
_HALF, _QUARTER = 4, 8  # fewest blocks for which a half, a quarter of a stack means anything


@rule(
    "NS201",
    summary="The residual stream grows from block to block faster than independent additions make it grow.",
    why="""Adding L independent normalised branches makes the variance grow like L, so the RMS over the upper
        half grows by √2; adding the same direction every time makes it grow by 2. Faster growth means that a
        branch's output grows with its input, x ← x + F(x) with F not normalised. The stream is then
        multiplied by L factors above one, and so is the gradient on its way down.""",
    threshold=f"""RMS at the last block over RMS at half depth above {GROWTH:g}, in stacks of {_HALF} blocks
        or more that were read as a whole.""",
    source="""Xiong et al. 2020, arXiv:2002.04745, Lemma 2 (linear variance); the figures in
        docs/thresholds.md.""",
    remedy="""Normalise the branches' input (Pre-LN) or output (Peri-LN); or start the branches small: output
        projections × 1/√(2L) as GPT-2, or a learnt scale that starts at zero (ReZero).""",
    remedies=("pre-ln", "branch-scale", "small-init"),
)
def stream_growth(case: Case) -> Iterator[Hit]:
    rms = case.finite("stream/rms")
    for stack in case.anatomy.stacks:
        grown = growth(case, stack) if stack.complete and len(stack.blocks) >= _HALF else None
        if grown is None or grown <= GROWTH:
            continue
        half, last = upper_half(stack)
        message = (
            f"The RMS of {stack.name}'s stream grows {figure(grown)} times over its upper half, "
            f"from {figure(rms[half])} to {figure(rms[last])}; Pre-LN grows 1.4 times."
        )
        yield Hit(Severity.WARNING, (half, last), message, case.rows((half, last), "stream/rms"))


@rule(
    "NS202",
    summary="All tokens of a sequence end up at the same point.",
    why="""Token diversity ‖H − h̄‖²/‖H‖² is the share of the stream in which tokens differ. When it is lost,
        attention averages equal values whatever its weights, so queries and keys get no gradient. The head
        gives every token the same answer, and the loss stays at the entropy of the token frequencies. Below
        1e-12 the differences are float32 round-off and no longer carry the input.""",
    threshold=f"""A warning where a stack at initialisation keeps less than {UNIFORM:g} of the diversity at
        its entry; an error where the forecast's trial collapses (judged by a diversity in which positions
        count at most half, and by whether batches agree on separating the tokens again; the rule is in
        docs/forecast-rule.md).""",
    source="""Dong et al. 2021, arXiv:2103.03404 (rank collapse); Noci et al. 2022, arXiv:2206.03126
        (gradients of q and k); docs/verdicts.md: a Post-LN model of 12 layers had a diversity of 9.1e-5
        after 20 steps where it trained, and of 9.4e-8 where it did not.""",
    remedy="""Put the norms inside the branches with one norm at the end (norm_first=True,
        norm=nn.LayerNorm(d)), divide the learning rate by 3 to 10, or warm up; beyond 12 Post-LN blocks scale
        the skip as DeepNorm does.""",
    remedies=(
        "pre-ln",
        "deepnorm",
        "small-init",
        "branch-scale",
        "output-bias",
        "warm-up",
        "lower-rate",
        "much-lower-rate",
        "far-lower-rate",
    ),
)
def tokens_collapse(case: Case) -> Iterator[Hit]:
    forecast = case.forecast
    if forecast is not None and forecast.outcome == "collapses":
        yield trial_hit(Severity.ERROR, forecast, _remedy(case, forecast))
        return
    diversity = case.finite("stream/diversity")
    for stack in case.anatomy.stacks:
        kept = diversity_kept(case, stack)
        if kept is None or kept >= UNIFORM:
            continue
        entry, end = f"{stack.name}.input", f"{stack.name}.hidden"
        fall = f"falls from {figure(diversity[entry])} to {figure(diversity[end])} through {stack.name}"
        rows = case.rows((entry, end), "stream/diversity")
        yield Hit(Severity.WARNING, (stack.blocks[-1].site,), f"Token diversity {fall}.", rows)


def _remedy(case: Case, forecast: Forecast) -> str:
    """The remedy with a learning rate to try; it moves norms only where some sit on the stream."""
    rate = f"lower the learning rate (try {forecast.lr / 10:g}) or warm up"
    if not any(branch.placement == "post" for branch in case.anatomy.branches):
        return f"Start the branches smaller (output projections × 1/√(2L)), or {rate}."
    return (
        "Put the norms inside the branches with one norm at the end (norm_first=True, norm=nn.LayerNorm(d)); "
        f"or {rate}; beyond 12 Post-LN blocks scale the skip as DeepNorm does."
    )


@rule(
    "NS203",
    summary="A branch adds nothing to the stream and no step can change that.",
    why="""A branch whose output projection starts at zero is fine: the projection's own gradient is not zero,
        and after one step the branch contributes. Where the output and every gradient are zero (a zero gain
        in front of a zero projection, a frozen zero, dead ReLUs), the branch's parameters never change, and
        it only costs compute.""",
    threshold="""The branch's output is exactly zero and none of its parameters gets a non-zero gradient. A
        warning; an error where that holds for every branch of a model that was read as a whole.""",
    source="Exact, no threshold; zero initialisations that do learn: ReZero, arXiv:2003.04887.",
    remedy="""Make only one factor of the product zero (the output projection or the gain, not both) and check
        requires_grad; for dead ReLUs take a smaller bias or GELU.""",
)
def dead_branch(case: Case) -> Iterator[Hit]:
    zero, rms = case.finite("branch/zero-output"), case.finite("branch/rms")
    stuck = [site for site, value in case.finite("branch/trainable").items() if value == 0.0]
    sites = case.in_depth(site for site in stuck if zero.get(site) == 1.0 or rms.get(site) == 0.0)
    if not sites:
        return
    total = len(case.anatomy.branches)
    rows = case.rows(sites, "branch/zero-output", "branch/trainable")
    message = f"{len(sites)} of {total} branches output zeros and get no gradient."
    every = len(sites) == total and all(stack.complete for stack in case.anatomy.stacks)
    yield Hit(Severity.ERROR if every else Severity.WARNING, sites, message, rows)


@rule(
    "NS204",
    summary="Deeper branches write less to the stream; the deepest ones hardly change it.",
    why="""In Pre-LN every branch adds a term of fixed size to a stream that grows like √l, so its share falls
        like 1/√l and the deep blocks come close to the identity. In a stream that grows faster (large
        embeddings, exponential growth) the deep blocks hardly matter: they cost compute, receive gradients
        scaled by their share, and can be removed with little loss.""",
    threshold=f"""Median update-to-stream ratio of the upper quarter under {DECLINE:g} and under
        {DECLINE_FALL:g} of that of the lower half, in stacks of {_QUARTER} blocks or more that were read as a
        whole.""",
    source="""Sun et al. 2025 (The Curse of Depth), arXiv:2502.05795; Pre-LN's 1/√(2l) is 0.07 at 96 blocks,
        seven times above the threshold; the figures in docs/thresholds.md.""",
    remedy="""Normalise the branches' output too (Peri-LN), divide each norm's output by √l (LayerNorm
        Scaling), or scale the stream down at its entry (embeddings).""",
)
def branch_decline(case: Case) -> Iterator[Hit]:
    for stack in case.anatomy.stacks:
        medians = decline(case, stack) if stack.complete and len(stack.blocks) >= _QUARTER else None
        if medians is None:
            continue
        low, high = medians
        if high < DECLINE and high < DECLINE_FALL * low:
            message = (
                f"Branches of {stack.name} add {figure(low)} of the stream's RMS in its lower half and "
                f"{figure(high)} in its upper quarter (medians)."
            )
            upper = stack.blocks[len(stack.blocks) - len(stack.blocks) // 4 :]
            sites = tuple(branch.site for block in upper for branch in block.branches)
            yield Hit(Severity.WARNING, sites, message, case.rows(sites, "branch/update-ratio"))


@rule(
    "NS205",
    summary="Attention gives nearly all weight to one key: its softmax is saturated.",
    why="""The softmax's Jacobian is diag(p) − ppᵀ: where p is one-hot it is zero, and neither queries nor
        keys get a gradient that could move the choice. Large logits do this, from large q and k weights or
        from a missing 1/√d_h, and they grow during training where nothing bounds them.""",
    threshold=f"""Mean entropy under {ENTROPY:g} of that of uniform attention over the visible keys. A note in
        one branch, a warning where it holds for half of a model's attention or more.""",
    source="""Zhai et al. 2023 (σReparam, entropy collapse), arXiv:2303.06296; the figures in
        docs/thresholds.md.""",
    remedy="""Divide the logits by √d_h, start W_Q and W_K smaller, normalise q and k (QK-norm), or soft-cap
        the logits.""",
    remedies=("qk-norm", "small-init"),
)
def attention_saturated(case: Case) -> Iterator[Hit]:
    entropy = case.finite("attention/entropy")
    sites = case.in_depth(site for site, value in entropy.items() if value < ENTROPY)
    if not sites:
        return
    logits = case.finite("attention/max-logit")
    message = f"{len(sites)} of {len(entropy)} attentions have lost their entropy"
    message += f" (down to {figure(min(entropy[s] for s in sites))} of uniform attention's"
    if largest := [logits[s] for s in sites if s in logits]:
        message += f", logits up to {figure(max(largest))}"
    rows = case.rows(sites, "attention/entropy", "attention/max-logit")
    grave = 2 * len(sites) >= len(entropy)
    yield Hit(note_or_warning(grave), sites, message + ").", rows)


@rule(
    "NS206",
    summary="Attention logits are spread so widely that a few keys take the weight: 1/√d_h may be missing.",
    why="""Queries and keys of unit size in d_h dimensions have logits of deviation √d_h; dividing by √d_h
        brings it to 1. The softmax of n Gaussian logits of deviation s shares its weight among many keys
        while s < √(2 log n). Above that a few keys get it, whatever n: the sum of squared probabilities
        tends to 1 − √(2 log n)/s, so from twice the limit on one key outweighs all others together. At the
        start these keys are random: the average over keys is lost, and the gradient goes to the logits that
        happen to be largest.""",
    threshold=f"""Deviation of a query's logits over √(2 log n), n the keys it sees, mean over queries: a note
        above {SPREAD:g}; a warning where it is above {CONDENSED:g} in half of a model's attention or
        more.""",
    source="""Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1 (the factor 1/√d_h); Derrida 1981, Phys.
        Rev. B 24, 2613 (the random-energy model condenses at √(2 log n); its participation ratio); our runs
        in docs/thresholds.md.""",
    remedy="""Divide the logits by √d_h (the default of scaled_dot_product_attention), or fold the factor into
        the start of W_Q as T5 does. Where the factor is present, start W_Q and W_K smaller or normalise q and
        k (QK-norm).""",
    remedies=("qk-norm", "small-init"),
)
def unscaled_attention(case: Case) -> Iterator[Hit]:
    spread = case.finite("attention/logit-spread")
    sites = case.in_depth(site for site, value in spread.items() if value > SPREAD)
    if not sites:
        return
    message = f"The logits of {len(sites)} of {len(spread)} attentions are spread too widely"
    most = figure(max(spread[s] for s in sites))
    message += f" (up to {most} times the spread at which a few keys take all the weight)."
    grave = 2 * sum(value > CONDENSED for value in spread.values()) >= len(spread)
    rows = case.rows(sites, "attention/logit-spread")
    yield Hit(note_or_warning(grave), sites, message, rows)
