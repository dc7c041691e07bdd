"""Sentences about the first wrong value."""

import math
from collections.abc import Sequence

from normscope.monitor.wrong.held import Held
from normscope.monitor.wrong.types import Range

KINDS = {"NaN": "a NaN", "infinity": "an infinity", "garbage": "a finite value above 1e18"}
HOLDS = {"NaN": "NaN", "infinity": "infinity", "garbage": "finite values above 1e18"}


def of_held(held: Held, evidence: str, is_updated: bool = False) -> str:
    """Say which tensor a step began with is wrong."""
    what = {
        "data": f"The batch's {held.name}",
        "parameter": f"Parameter or buffer {held.name}",
        "optimizer state": f"The optimizer's {held.name}",
    }[held.phase]
    when = "after the update" if is_updated else "before the forward"
    size = math.prod(held.range.shape)
    others = "1 other tensor is" if held.others == 1 else f"{held.others} other tensors are"
    more = f" {others} wrong as well." if held.others else ""
    first = f"{held.count} of its {size} entries, the first at {list(held.index)}"
    last = f" {evidence}" if evidence else ""
    return f"{what} holds {HOLDS[held.kind]} {when}: {first}.{more}{last}"


def of_op(
    *,
    kind: str,
    phase: str,
    op: str,
    site: str,
    source: str,
    cause: str,
    evidence: str,
    inputs: Sequence[Range],
) -> str:
    """Say which op made a wrong value."""
    where = f" in {site}" if site else ""
    line = f" ({source})" if source else ""
    during = "" if op.startswith("backward of") or phase == "forward" else f" in the {phase}"
    op = f"the {op}" if op.startswith("backward of") else op
    first = f"The first wrong value is {KINDS[kind]} that {op}{where} makes{during}{line}."
    why = f" Cause: {cause}" if cause else " Cause unknown"
    why += f" ({evidence})." if evidence else "."
    ranges = [each for each in inputs if each.shape or not math.isnan(each.low)][:4]
    given = f" Inputs: {'; '.join(map(range_in_words, ranges))}." if ranges else ""
    return first + why + given


def of_loss(kind: str, is_gradient: bool, outputs: Sequence[Range]) -> str:
    """Say that the loss is wrong though the model's outputs are good."""
    what = "the loss's gradient by the model's output" if is_gradient else "the loss"
    ranges = "; ".join(map(range_in_words, outputs[:4]))
    return f"The first wrong value is {KINDS[kind]} in {what}. The model's outputs are good: {ranges}."


def range_in_words(given: Range) -> str:
    """A range, as "weight (4, 8) float32 in [-1, 2]"."""
    name = f"{given.name} " if given.name else ""
    shape = f"{given.shape} " if given.shape else ""
    edges = "no finite value" if math.isnan(given.low) else f"[{given.low:.4g}, {given.high:.4g}]"
    bad = [(given.num_nan, "NaN"), (given.num_infinite, "infinite")]
    odd = "".join(f", {count} {what}" for count, what in bad if count)
    return f"{name}{shape}{given.dtype} in {edges}{odd}"
