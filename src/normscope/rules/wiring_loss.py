"""NS712 and NS713: the targets of the loss, and its precision."""

from collections.abc import Iterator

from normscope.rules.finding import Severity
from normscope.rules.rule import Case, Hit, figure, rule
from normscope.rules.wiring_flow import SEEN

MATCH = 0.9
"""Share of targets in one relation to the inputs from which that is the task."""


@rule(
    "NS712",
    summary="The labels are not the task: the inputs themselves, shifted twice, all ignored, or out of range.",
    why="""A causal model whose target at t is its own input at t learns the identity: the loss falls to 0 and
        nothing is learnt. Where both the data and the model shift the labels, the target is the id after the
        next one. Labels that are all ignored give no gradient, and the mean over none of them is NaN.""",
    threshold=f"""An error where at least {MATCH:g} of the targets equal the input at their own place, fewer equal
        the next one, and outputs do not see later ids; where every label is ignored; and where a label is V or
        above. A warning where at least {MATCH:g} equal the input two places on and fewer the next one.""",
    source="""Exact: the targets are read from the gradient of the loss by the logits, w·(softmax − target), so
        that every shift and mask counts; transformers' documentation (models shift the labels themselves).""",
    remedy="""Shift once: cross_entropy(logits[:, :-1], ids[:, 1:]), or labels=input_ids for a model of
        transformers, which shifts inside. Check what the collator sets to -100.""",
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
        message = f"{figure(100 * same)} % of the targets are the input at their own place, in a causal model."
        yield _hit(case, Severity.ERROR, message, "targets-same", "later-tokens")
    elif after >= MATCH:
        message = f"{figure(100 * after)} % of the targets are the input two places on: shifted twice."
        yield _hit(case, Severity.WARNING, message, "targets-after-next", "targets-next")


def _hit(case: Case, severity: Severity, message: str, *quantities: str) -> Hit:
    return Hit(severity, (), message, case.rows([""], *(f"wiring/{name}" for name in quantities)))
