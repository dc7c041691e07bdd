"""Targets of the batch's loss, how they relate to the inputs, and the first loss.

    wiring/targets              targets that count in the loss
    wiring/targets-same         share of them that equal the input at their own place
    wiring/targets-next         share that equals the next input
    wiring/targets-after-next   share that equals the input after the next one
    wiring/labels-ignored       share of the batch's labels that are negative, or 1 where no target counts
    wiring/labels-out-of-range  labels that are no class: V or above
    wiring/first-loss           mean cross-entropy of the targets, nats
    wiring/guess                ln V, the loss of a uniform guess, nats
    wiring/unit-head            d, nats: the largest logit of a unit-variance head on a normalised stream

The gradient of a cross-entropy in a row of logits is w·(softmax − target). Its most negative entry is the
target, wherever the labels are stored and however they are shifted or masked.

Shapes: N rows of logits, V classes, B sequences, T tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.probes.measurement import Measurement, not_measured
from normscope.probes.wiring.forward import Forward
from normscope.probes.wiring.inputs import Input

NO_CROSS_ENTROPY = "the loss is not a cross-entropy of the model's logits"
RELATIONS = {"targets-same": 0, "targets-next": 1, "targets-after-next": 2}
_ONE_TARGET = 0.5
"""Least share of a row's negative gradient that its target holds."""


@dataclass(frozen=True)
class Targets:
    """Targets found through a loss.

    Attributes:
        logits: the logits (…, V) that the loss was taken of.
        ids: the target of every row (…), -1 where the row does not count.
        gradient: ∂loss/∂logits (…, V).
    """

    logits: Tensor
    ids: Tensor
    gradient: Tensor

    def cross_entropy(self) -> float:
        """Mean cross-entropy of the rows that count, in float32 at least."""
        kept = self.ids >= 0
        rows = self.logits.detach()[kept]
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return float(torch.nn.functional.cross_entropy(rows, self.ids[kept]))


def find_targets(forward: Forward) -> Targets | str:
    """The targets of a forward's loss, or why they are not known."""
    if forward.loss is None:
        return "no loss is known"
    if not forward.loss.requires_grad:
        return "the loss has no gradient"
    for logits in forward.outputs:
        if not logits.requires_grad or logits.shape[-1] < 2:
            continue
        (gradient,) = torch.autograd.grad(forward.loss, logits, retain_graph=True, allow_unused=True)
        if gradient is not None:
            ids = targets_in(gradient)
            if ids is not None:
                return Targets(logits.detach(), ids, gradient)
    return NO_CROSS_ENTROPY


def targets_in(gradient: Tensor) -> Tensor | None:
    """The target of each row of the gradient of a cross-entropy; -1 for a row of zeros; None for others."""
    least, ids = gradient.min(-1)
    # Sums of whole rows make no copy of the gradient, which is as large as the logits.
    magnitude, total = torch.linalg.vector_norm(gradient, 1, -1), gradient.sum(-1)
    negative = (total - magnitude) / 2
    counted = magnitude > 0
    if not bool(magnitude.isfinite().all()) or bool((least > _ONE_TARGET * negative)[counted].any()):
        return None
    if bool((least[counted] >= 0).any()):
        return None
    return ids.where(counted, -1)


def in_places(targets: Tensor, ids: Tensor) -> Tensor | None:
    """Targets as (B, T) beside ids (B, T); None where the shapes do not allow it.

    A loss of logits[:, :-1] flattened to (B·(T − 1), V) is filled up with a last column that does not count.
    """
    rows, length = ids.shape
    if targets.shape == ids.shape:
        return targets
    if targets.numel() == ids.numel():
        return targets.reshape(ids.shape)
    if targets.numel() == rows * (length - 1):
        return torch.nn.functional.pad(targets.reshape(rows, length - 1), (0, 1), value=-1)
    return None


def relation(targets_BT: Tensor, ids_BT: Tensor, shift: int) -> float:
    """Share of the counted targets that equal the input `shift` places on, up to the end of the row."""
    if ids_BT.shape[1] <= shift:
        return 0.0
    kept = ids_BT.shape[1] - shift
    here, there = targets_BT[:, :kept], ids_BT[:, shift:]
    counted = here >= 0
    return float((here == there)[counted].double().mean()) if counted.any() else 0.0


def target_rows(
    targets: Targets | str, inputs: list[Input], places: tuple[Tensor, Tensor] | None
) -> Iterator[Measurement]:
    """Relation of the targets to the inputs; `places` are the targets and the ids, both (B, T)."""
    yield from _label_rows(targets, inputs)
    if isinstance(targets, str):
        yield not_measured("wiring/targets", "", targets)
        return
    yield Measurement("wiring/targets", "", float((targets.ids >= 0).sum()))
    for name, shift in RELATIONS.items():
        if places is None:
            yield not_measured(f"wiring/{name}", "", "no ids of the batch lie beside the logits")
        else:
            yield Measurement(f"wiring/{name}", "", relation(*places, shift))


def _label_rows(targets: Targets | str, inputs: list[Input]) -> Iterator[Measurement]:
    labels = [i.tensor for i in inputs if i.kind == "labels" and not i.tensor.is_floating_point()]
    labels = [tensor for tensor in labels if tensor.dtype != torch.bool and tensor.numel()]
    if len(labels) != 1:
        return
    ignored = float((labels[0] < 0).double().mean())  # -100, or an ignore_index of -1; no class is negative
    if isinstance(targets, str):
        yield Measurement("wiring/labels-ignored", "", ignored)
        return
    num_classes = targets.logits.shape[-1]
    if not bool((targets.ids >= 0).any()):
        ignored = 1.0
    yield Measurement("wiring/labels-ignored", "", ignored)
    yield Measurement("wiring/labels-out-of-range", "", float((labels[0] >= num_classes).sum()))


def first_loss_rows(targets: Targets | str, width: int | None) -> Iterator[Measurement]:
    """The first loss beside what a uniform guess gives."""
    if isinstance(targets, str) or not bool((targets.ids >= 0).any()):
        reason = targets if isinstance(targets, str) else "no target counts"
        yield not_measured("wiring/first-loss", "", reason, "nats")
        return
    num_classes = targets.logits.shape[-1]
    yield Measurement("wiring/first-loss", "", targets.cross_entropy(), "nats")
    yield Measurement("wiring/guess", "", math.log(num_classes), "nats", "ln V")
    if width:
        yield Measurement("wiring/unit-head", "", float(width), "nats", "d, by Cauchy-Schwarz")
