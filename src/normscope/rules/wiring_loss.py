"""NS712 and NS713: the targets of the loss, and its precision."""

from collections.abc import Iterator

from normscope.rules.finding import Severity
from normscope.rules.rule import Case, Hit, figure, rule
from normscope.rules.wiring_flow import SEEN

MATCH = 0.9
"""Share of targets in one relation to the inputs from which that is the task."""


@rule(
    "NS712",
    summary="The labels are the inputs themselves, shifted twice, all ignored, or out of range.",
    why="""A causal model whose target at t is its own input at t learns the identity: the loss falls to 0
        and nothing is learnt. Where both the data and the model shift the labels, the target is the id
        after the next one. Labels that are all ignored give no gradient, and the mean over none of them
        is NaN.""",
    threshold=f"""An error where at least {MATCH:g} of the targets equal the input at their own place,
        fewer equal the next one, and outputs do not see later ids; where every label is ignored; and
        where a label is V or above. A warning where at least {MATCH:g} equal the input two places on and
        fewer the next one.""",
    source="""Exact: the targets are read from the gradient of the loss by the logits, w·(softmax −
        target), so that every shift and mask counts; transformers' documentation (models shift the labels
        themselves).""",
    remedy="""Shift once: cross_entropy(logits[:, :-1], ids[:, 1:]), or labels=input_ids for a model of
        transformers, which shifts inside. Check what the collator sets to -100. A target two
        ahead may be intended.""",
)
def labels(case: Case) -> Iterator[Hit]:
    figures = {
        name: case.finite(f"wiring/{name}").get("")
        for name in ("targets-same", "targets-next", "targets-after-next", "labels-ignored")
    }
    beyond = case.finite("wiring/labels-out-of-range").get("", 0.0)
    if figures["labels-ignored"] == 1.0:
        yield _hit(case, Severity.ERROR, "Every label of the batch is ignored.", "labels-ignored")
    if beyond:
        message = f"{figure(beyond)} labels are V or above, which is no class."
        yield _hit(case, Severity.ERROR, message, "labels-out-of-range")
    same, next_, after = (figures[f"targets-{name}"] or 0.0 for name in ("same", "next", "after-next"))
    seen = case.finite("wiring/later-tokens")
    is_causal = bool(seen) and max(seen.values()) <= SEEN
    if next_ >= MATCH or not is_causal:
        return
    if same >= MATCH:
        message = (
            f"{figure(100 * same)} % of the targets are the input at their own place, in a causal model."
        )
        yield _hit(case, Severity.ERROR, message, "targets-same", "later-tokens")
    elif after >= MATCH:
        message = (
            f"{figure(100 * after)} % of the targets are the input two places on: shifted twice, "
            "or intended (a target two ahead)."
        )
        yield _hit(case, Severity.WARNING, message, "targets-after-next", "targets-next")


def _hit(case: Case, severity: Severity, message: str, *quantities: str) -> Hit:
    return Hit(severity, (), message, case.rows([""], *(f"wiring/{name}" for name in quantities)))


LOSS_ERROR = 0.01
"""Error of the loss in nats, a tenth of the margin by which a run counts as trained."""
GRADIENT_ERROR = 0.05
"""Relative error of the gradient by the logits."""


@rule(
    "NS713",
    summary="The loss is computed in half precision over the vocabulary.",
    why="""log p of one token of 50 000 is near −11, where bfloat16's numbers are 1/16 apart: the loss is
        known to 0.03 nats, and each probability e^(log p) is wrong by 3 %. Small improvements are then
        invisible, and the gradient of the logits does not sum to zero.""",
    threshold=f"""A softmax, a log-softmax or a log-sum-exp over the vocabulary runs in float16 or
        bfloat16: a note, and a warning where the loss differs, or may by the rounding of its own value,
        by over {LOSS_ERROR:g} nats from float32 on the same logits, or its gradient by over
        {GRADIENT_ERROR:g}. Measured for half-precision weights
        and for a run with autocast.""",
    source="""IEEE 754 (spacing of bfloat16 and float16), exact: recomputed in float32 on the same logits;
        Micikevicius et al. 2018, arXiv:1710.03740, section 3.""",
    remedy="""F.cross_entropy(logits.float(), targets), outside of any half-precision region.""",
)
def low_precision_loss(case: Case) -> Iterator[Hit]:
    gradient = case.finite("wiring/loss-gradient-error").get("")
    row = case.table.find("wiring/loss-gradient-error")
    if gradient is None or row is None:
        return
    error = case.finite("wiring/loss-error").get("")
    grave = gradient > GRADIENT_ERROR or (error or 0.0) > LOSS_ERROR
    ops = row.how.partition("; ")[2]
    by = "" if error is None else f" the loss is off by up to {figure(error)} nats and"
    message = f"{ops or 'Half precision'}:{by} the gradient by {figure(100 * gradient)} %, against float32."
    severity = Severity.WARNING if grave else Severity.NOTE
    yield _hit(case, severity, message, "loss-error", "loss-gradient-error")
