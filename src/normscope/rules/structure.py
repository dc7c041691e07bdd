"""NS1xx: findings of the anatomy alone. Structure is a risk and no proof, so they are at most warnings."""

from collections.abc import Iterator
from statistics import median

from normscope.anatomy import Branch, Stack
from normscope.rules.finding import Severity
from normscope.rules.rule import Case, Hit, figure, note_or_warning, rule

POST_LN_NOTE = 6
"""Fewest Post-LN blocks for a note. Six still train at the usual learning rates without warm-up."""
POST_LN_WARNING = 16
"""Fewest Post-LN blocks for a warning. At plain initialisation, warm-up alone no longer rescues them."""
SMALL_UPDATE = 0.5
"""Median update-to-stream ratio under which a Post-LN stack counts as initialised small."""
UNIT = 2.0
"""Factor within which the size of a stream counts as that of a normalised one."""
KEPT = 1.1
"""Factor within which a stack counts as handing on the size of the stream that it was given."""
_MOST_REASONS = 3
POST_LN_REMEDIES = frozenset({"deepnorm", "admin", "b2t", "keel", "residual-dual", "hybridnorm"})


@rule(
    "NS101",
    summary="A deep stack normalises the stream after every add (Post-LN) and nothing makes up for it.",
    why="""With x ← N(x + F(x)) every block multiplies the gradient by the norm's Jacobian (1/σ)(I − 11ᵀ/d −
        ẑẑᵀ/d), and no path from the loss to a lower block goes around it. One step of size η then moves the
        output by an amount that grows with depth. Adam's first steps at the full learning rate push all
        tokens to one point, where neither queries nor keys receive a gradient.""",
    threshold=f"""A note from {POST_LN_NOTE} Post-LN blocks on, a warning from {POST_LN_WARNING}, in stacks
        without a scaled skip (α > 1 or learnt), B2T, KEEL or ResiDual, and without a small initialisation
        (median update-to-stream ratio under {SMALL_UPDATE:g}: BERT's N(0, 0.02)).""",
    source="""Xiong et al. 2020, arXiv:2002.04745 (gradients at initialisation, warm-up); Wang et al. 2022
        (DeepNet), arXiv:2203.00555, Theorem 4.2; our runs from Xavier weights: with a warm-up 12
        blocks train on 5 of 5 seeds at 5e-4, on 1 at 1e-3 and on 0 at 3e-3, 24 blocks on none (claim B5).""",
    remedy="""Move the norm into the branch and end the stack with a norm (in PyTorch norm_first=True and
        norm=nn.LayerNorm(d)); or keep Post-LN and scale it as DeepNorm does: α = (2L)^¼ on the skip, β =
        (8L)^-¼ on the value, output and feed-forward weights. At 12 blocks or fewer a long warm-up can be
        enough, though not on every seed.""",
    remedies=("pre-ln", "deepnorm", "small-init", "warm-up"),
)
def post_ln_deep(case: Case) -> Iterator[Hit]:
    ratios = case.finite("branch/update-ratio")
    for stack in case.anatomy.stacks:
        deep = [block for block in stack.blocks if any(map(_plain_post, block.branches))]
        if len(deep) < POST_LN_NOTE:
            continue
        branches = [b.site for block in deep for b in block.branches if _plain_post(b) and b.site in ratios]
        ratio = median(ratios[site] for site in branches) if branches else None
        small = ratio is not None and ratio < SMALL_UPDATE
        severe = len(deep) >= POST_LN_WARNING and not small
        message = f"{len(deep)} blocks of {stack.name} are Post-LN without a scale on the skip."
        if ratio is not None:
            message += f" Their branches add {figure(ratio)} of the stream's RMS (median)."
        yield Hit(
            note_or_warning(severe),
            tuple(block.site for block in deep),
            message,
            case.rows(branches, "branch/update-ratio"),
        )


def _plain_post(branch: Branch) -> bool:
    """True where the branch is Post-LN with neither a named remedy nor a scale that is one."""
    if branch.placement != "post" or branch.scheme in POST_LN_REMEDIES:
        return False
    if "learnt" in (branch.stream_scale, branch.branch_scale):
        return False
    alpha = branch.stream_scale if isinstance(branch.stream_scale, float | int) else 1.0
    beta = branch.branch_scale if isinstance(branch.branch_scale, float | int) else 1.0
    return abs(alpha) <= abs(beta)


@rule(
    "NS102",
    summary="A stack whose stream is never normalised hands it on without a final norm.",
    why="""Where norms sit inside the branches the stream itself only ever grows: at initialisation its
        variance is 1 plus about one unit for every branch. Without a norm after the last block the head reads
        values whose scale depends on depth and changes while training, and with it the effective learning
        rate of the head.""",
    threshold=f"""A stack that was read as a whole, ends in Pre-LN, res-post or Peri-LN branches and has no
        norm after its last block. A note where the stream is the model's output and no weight reads it,
        where the RMS of its last state lies between 1/{UNIT:g} and {UNIT:g} (a norm would hardly change
        it), or within ×{KEPT:g} of the RMS of its input (the blocks add little at the start).
        Silent where nothing but linear maps lies between the stream and a norm (the neck of a vision
        backbone): the norm then hides the stream's size.""",
    source="""Xiong et al. 2020, arXiv:2002.04745, Lemma 2 and section 3; every published Pre-LN language
        model has one; our runs of 2 blocks, whose stream ends at 1.65, in docs/thresholds.md.""",
    remedy="""Put a norm after the last block: nn.TransformerEncoder(layer, L, norm=nn.LayerNorm(d)), or x =
        self.final_norm(x) before the head.""",
    remedies=("final-norm",),
)
def missing_final_norm(case: Case) -> Iterator[Hit]:
    rms = case.finite("stream/rms")
    for stack in case.anatomy.stacks:
        normed = stack.final_norm is not None or stack.read_by == "norm"
        if not stack.complete or normed or not _open_stream(stack):
            continue
        last = stack.blocks[-1]
        message = (
            f"{stack.name} ends in {last.branches[-1].placement} blocks and has no norm after the last one."
        )
        if last.site in rms:
            message += f" Its output has RMS {figure(rms[last.site])}."
        if stack.read_by == "nothing":
            message += " No weight of the model reads it: normalise it in what does."
        end, start = rms.get(last.site), rms.get(f"{stack.name}.input")
        grave = (
            stack.read_by == "weights" and not _is_within(UNIT, end, 1.0) and not _is_within(KEPT, end, start)
        )
        rows = case.rows((f"{stack.name}.input", last.site), "stream/rms")
        yield Hit(note_or_warning(grave), (last.site,), message, rows)


def _is_within(factor: float, rms: float | None, other: float | None) -> bool:
    """Whether two sizes of a stream differ by at most `factor`; False where one was not measured."""
    return rms is not None and other is not None and other / factor <= rms <= other * factor


def _open_stream(stack: Stack) -> bool:
    """True where the last block returns a plain sum, with no norm on it and no gate that forgets (GTrXL)."""
    branches = stack.blocks[-1].branches if stack.blocks else ()
    return bool(branches) and all(
        branch.placement in ("pre", "res-post", "peri") and branch.join != "gate" for branch in branches
    )


@rule(
    "NS103",
    summary="Blocks start as copies of one another, bit for bit.",
    why="""Independent blocks add independent terms: the stream's RMS grows like √L. Copies add nearly the
        same direction every time, so it grows like L. The product of L equal Jacobians has the L-th power of
        one spectrum instead of an average over independent factors. nn.TransformerEncoder deep-copies the
        layer it is given.""",
    threshold="""Every parameter of a block equals that of the block before it, bit for bit, and is not shared
        with it. A note where the trial says that the run trains and is sure of it.""",
    source="""torch.nn.TransformerEncoder's documentation (all layers start with the same parameters); our
        measurement, Pre-LN, 12 blocks: copies grow 2.2 times over the upper half (independent ones: 1.5) and
        the upper quarter's branches add 0.08 of the stream (0.23).""",
    remedy="""Initialise again after the stack is built: for p in model.parameters(): if p.dim() > 1:
        nn.init.xavier_uniform_(p).""",
)
def identical_blocks(case: Case) -> Iterator[Hit]:
    same, trial = case.finite("weights/identical"), case.forecast
    is_harmless = trial is not None and trial.outcome == "trains" and trial.is_sure
    for stack in case.anatomy.stacks:
        copies = tuple(block.site for block in stack.blocks if same.get(block.site) == 1.0)
        if copies:
            count = f"{len(copies)} of {len(stack.blocks)} blocks of {stack.name}"
            message = f"{count} are copies of the block before them."
            if is_harmless:
                message += " The trial says that the run trains all the same."
            yield Hit(
                note_or_warning(not is_harmless), copies, message, case.rows(copies, "weights/identical")
            )


@rule(
    "NS104",
    summary="A part of the model could not be read, so it is not judged.",
    why="""The reading follows the dataflow and never guesses. A part that could not be read has no sites and
        no measurements; the verdict rests on the rest of the model and on the forecast.""",
    threshold="A note where a part was not read; a warning where no branch was read.",
    source="normscope's own reading; its reasons are in the report under anatomy, unread.",
    remedy="""Read the reasons; give a batch that runs the part in question, or express the opaque operator in
        PyTorch operators while checking. Rely on the forecast meanwhile.""",
)
def unread(case: Case) -> Iterator[Hit]:
    reasons, blocks = case.anatomy.unread, case.anatomy.blocks
    if not case.anatomy.branches:
        yield Hit(Severity.WARNING, (), _listed("No branch of the model could be read", reasons))
    elif reasons:
        yield Hit(Severity.NOTE, (), _listed(f"{len(blocks)} blocks were read; a part was not", reasons))


def _listed(head: str, reasons: tuple[str, ...]) -> str:
    more = f" (and {len(reasons) - _MOST_REASONS} more)" if len(reasons) > _MOST_REASONS else ""
    return f"{head}: {'; '.join(reasons[:_MOST_REASONS])}{more}." if reasons else f"{head}."
