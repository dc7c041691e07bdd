"""Losses of a model's outputs, and tests of whether next-token loss is meaningful.

Shapes: B sequences, T tokens, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.nn.output import IGNORED
from normscope.subjects.subject import Batch, call_model


def own_loss(output: Any) -> Tensor | None:
    """The loss in a model's output: `.loss`, a scalar output, or the only scalar of a tuple."""
    found = [c for c in _parts(output, "loss") if isinstance(c, Tensor) and c.is_floating_point()]
    scalars = [candidate for candidate in found if candidate.numel() == 1]
    return scalars[0] if len(scalars) == 1 else None


def _parts(output: Any, name: str) -> list[Any]:
    """The part of an output called `name`, else all parts in order."""
    named = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    if named is not None:
        return [named]
    return list(output) if isinstance(output, tuple | list) else [output]


def output_loss(output: Any, batch: Batch) -> Tensor:
    """The loss that the model itself computed from the labels in its batch."""
    loss = own_loss(output)
    assert loss is not None, "the model gave a loss when it was loaded, but not now"
    return loss.reshape(())


def logits_of(output: Any, vocabulary: int | None = None) -> Tensor | None:
    """The first floating-point tensor (·, ·, V) of an output; `vocabulary` requires that V."""
    parts = _parts(output, "logits")
    if isinstance(output, Mapping) and not isinstance(parts[0], Tensor):
        parts = list(output.values())
    for candidate in parts:
        if isinstance(candidate, Tensor) and candidate.ndim == 3 and candidate.is_floating_point():
            fits = vocabulary is None or candidate.shape[-1] == vocabulary
            return candidate if fits else None
    return None


@dataclass(frozen=True)
class Ids:
    """Place of the token ids in a batch: (B, T) or, with `time_axis` 0, (T, B).

    Attributes:
        key: None if the batch is the tensor itself, else an index of the tuple or a name of the mapping.
    """

    key: int | str | None
    time_axis: int = 1

    def read(self, batch: Any) -> Tensor:
        """The ids of `batch`."""
        return batch if self.key is None else batch[self.key]

    def write(self, batch: Any, ids: Tensor) -> Batch:
        """`batch` with other ids."""
        if self.key is None:
            return ids
        if isinstance(batch, Mapping):
            return {**batch, self.key: ids}
        return tuple(ids if index == self.key else value for index, value in enumerate(batch))


@dataclass(frozen=True)
class NextToken:
    """Mean cross-entropy in nats of the logits at t and the id at t + 1."""

    ids: Ids

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        logits, ids = logits_of(output), self.ids.read(batch)
        assert logits is not None
        axis, steps = self.ids.time_axis, ids.shape[self.ids.time_axis]
        return cross_entropy(logits.narrow(axis, 0, steps - 1), ids.narrow(axis, 1, steps - 1))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the positions whose label is not −100. (·, ·, V), (·, ·) → scalar, in float32 at least."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(dtype), labels.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def time_axis_of(model: nn.Module, batch: Batch, ids: Ids) -> int | None:
    """Time axis of the ids: 1 if rows do not affect one another, 0 if columns do not.

    None if both mix, or the output has no features for each token. `model` must be in eval mode.
    """
    for axis in (1, 0):
        if _leaves_alone(model, batch, ids, axis=1 - axis, changed=0, kept=slice(1, None)):
            return axis
    return None


@torch.no_grad()
def is_causal(model: nn.Module, batch: Batch, ids: Ids) -> bool:
    """True if a change of the last token changes no earlier output. `model` must be in eval mode."""
    return _leaves_alone(model, batch, ids, axis=ids.time_axis, changed=-1, kept=slice(0, -1))


def _leaves_alone(model: nn.Module, batch: Batch, ids: Ids, *, axis: int, changed: int, kept: slice) -> bool:
    """True if other ids at `changed` along `axis` do not change the output at `kept`."""
    given = ids.read(batch)
    before = logits_of(call_model(model, batch))
    if before is None or before.shape[:2] != given.shape:
        return False
    other = given.clone()
    other.select(axis, changed).copy_(_another(given.select(axis, changed)))
    after = logits_of(call_model(model, ids.write(batch, other)))
    if after is None or after.shape != before.shape:
        return False
    index = (slice(None),) * axis + (kept,)
    largest = before[before.isfinite()].abs().amax() if before.isfinite().any() else before.new_zeros(())
    tolerance = 16 * torch.finfo(before.dtype).eps * float(largest)
    # NaN in both outputs is not a change.
    return torch.allclose(before[index], after[index], rtol=0.0, atol=tolerance, equal_nan=True)


def _another(ids: Tensor) -> Tensor:
    """Replace each id by the next larger one in use, and the largest by the smallest."""
    top, bottom = int(ids.max()), int(ids.min())
    if top == bottom:
        return torch.full_like(ids, top - 1 if top else 1)
    return torch.where(ids == top, bottom, ids + 1)


@torch.no_grad()
def shifts_labels(output: Any, labels: Tensor) -> bool | None:
    """True if the model's loss compares logits at t with the label at t + 1; False: at t; None: neither."""
    loss, logits = own_loss(output), logits_of(output)
    if loss is None or logits is None or logits.shape[:2] != labels.shape:
        return None
    aligned = float(cross_entropy(logits, labels))
    shifted = float(cross_entropy(logits[:, :-1], labels[:, 1:]))
    off_aligned, off_shifted = abs(float(loss) - aligned), abs(float(loss) - shifted)
    # At initialisation all logits are similar, so both candidates are close: take the nearer one.
    if off_aligned == off_shifted or not min(off_aligned, off_shifted) <= 1e-3 * abs(float(loss)):
        return None
    return off_shifted < off_aligned
