"""The number of heads of an attention."""

from typing import Any

import torch

from normscope.compare.reasons.logits import read_logits
from normscope.compare.reasons.mixing import merged
from normscope.compare.reasons.operands import OPERANDS, operand_options, read_operand
from normscope.compare.reasons.scene import Half, Reason, Reasons, Scene, tell
from normscope.compare.types import Patch


def reasons(scene: Scene) -> Reasons:
    """Another number of heads."""
    both, projected = scene.both("logits"), scene.both(*OPERANDS)
    if both is None or scene.is_alike:
        return
    is_same = all(map(scene.is_same, OPERANDS))
    if (
        projected is not None
        and not is_same
        and all(x.shape == y.shape for x, y in zip(*projected, strict=True))
    ):
        return  # what the projections read or give differs: that comes first
    a, b = (int(logits.shape[1]) for (logits,) in both)
    patches = _patches(scene) if is_same else ()
    yield Reason("heads", "mixed", a, b, tell("The number of heads", a, b), patches)


def _patches(scene: Scene) -> tuple[Patch, ...]:
    """B's attention from its projections' outputs, as A makes it."""
    logits, merge = read_logits(scene.a), merged(scene.a)
    options: dict[str, Any] = {}
    for before, after in OPERANDS.items():
        found = read_operand(scene.a, before, after)
        if found is None:
            return ()
        options[after] = operand_options(found, _kv_heads(scene.a, before, after))
    if logits is None or merge is None or merge[1] is not None:
        return ()
    parts = {"by": logits.times, "visible": logits.visible, "bias": logits.bias, "cap": logits.cap}
    return scene.b.patch("mixed", "attention", tuple(OPERANDS), merge=merge[0], logits=parts, **options)


def _kv_heads(half: Half, before: str, after: str) -> int:
    x, y = (half.steps.get(name, torch.empty(1)) for name in (before, after))
    return int(x.shape[-1] // y.shape[-1])
