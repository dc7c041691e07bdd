"""Targets of any cross-entropy, found by its gradient, and the entropy of their frequencies.

The gradient of a cross-entropy in a row of logits is w·(softmax − target). Its one negative entry is the
target, wherever the labels are stored and however they are shifted or masked; with label smoothing, it is the
lowest entry.

Shapes: N rows of logits, V classes or vocabulary.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normscope.anatomy import measuring
from normscope.forecast.batch_entropy import SampledCrossEntropy
from normscope.forecast.entropy import GROUPS, estimate
from normscope.forecast.evaluator import same
from normscope.forecast.smoothing import SCATTER, smoothed_entropy, smoothing_of, smoothing_without_loss
from normscope.subjects import Batch, Subject, untouched
from normscope.subjects.stored import Stored, stored
from normscope.subjects.targets import hides_targets
from normscope.train import endless

NUMBERS_OF_BATCHES = (16, 64, 256, 512)
"""Numbers of batches whose targets are counted, until the entropy is known to `LARGEST_ERROR`."""
MOST_TARGETS = 2**20
MOST_LOGITS = 2**20
"""Logits that are read to find label smoothing; of more, those of rows at even distances."""
LARGEST_ERROR, ROUGH_ERROR = 0.05, 0.15
"""Errors of the entropy, in nats, at which no more batches are read, and above which it stays unknown.

The first is half of the margin that means "trains". The second is under a tenth of the distance from the
first loss to the entropy, which the pace is measured on: 1.5 nats or more for a vocabulary of thousands.
"""
TOLERANCE = 0.05
"""Largest difference in nats between the loss and the mean cross-entropy of the targets that were found,
besides the rounding of the loss."""

SAME_UNIT = 0.01
"""Largest difference between two batches, as a share, in the multiple of the mean that the loss is.

It moves the loss to beat by about `TOLERANCE`.
"""

NOT_OF_OUTPUTS = "the loss does not depend on the last linear map's outputs"
NO_CROSS_ENTROPY = "the loss is not a cross-entropy of the last linear map's outputs"

NOT_STORED = "the targets are not stored in the batches"


class NoTargetsError(Exception):
    """Targets cannot be found, for this `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class UnknownEntropyError(NoTargetsError):
    """Targets were found, but the entropy of the text that they are from cannot be known."""


@dataclass(frozen=True)
class Rows:
    """Rows of logits (N, V) that have a target, the gradient of the loss in them, and the loss.

    `dtype` is the coarser of the types of the logits and of the loss.
    """

    logits: Tensor
    gradient: Tensor
    loss: float
    dtype: torch.dtype = torch.float32

    @property
    def targets(self) -> Tensor:
        """Target of each row, (N,).

        Raises:
            NoTargetsError: a row has not exactly one entry with a negative gradient, without label smoothing.
        """
        if bool(((self.gradient < 0).sum(1) != 1).any()) and not self.smoothing:
            raise NoTargetsError(NO_CROSS_ENTROPY)
        return self.gradient.argmin(1)

    @functools.cached_property
    def smoothing(self) -> float:
        """Share of label smoothing; 0 without."""
        if not len(self.logits):
            return 0.0
        if self._shown_smoothing is not None:
            return self._shown_smoothing
        if not self.loss > 0:
            return 0.0
        return smoothing_of(self.logits, self.gradient, self.gradient.argmin(1), self.loss)

    @functools.cached_property
    def _shown_smoothing(self) -> float | None:
        """The share that the gradient alone shows; None if it does not. The loss may have other terms."""
        every = -(-self.logits.numel() // MOST_LOGITS)
        return smoothing_without_loss(self.logits[::every], self.gradient[::every].to(self.dtype))

    @property
    def factor(self) -> float | None:
        """Number of times that the gradient is that of the mean cross-entropy.

        None if it differs between rows, or if only the loss could tell the smoothing.
        """
        if self.smoothing and self._shown_smoothing is None:
            return None
        shares = self.logits.softmax(1).gather(1, self.targets[:, None])[:, 0]
        missed = 1 - self.smoothing * (1 - 1 / self.logits.shape[1]) - shares
        pulls = -len(shares) * self.gradient.gather(1, self.targets[:, None])[:, 0]
        factor = float(pulls.sum() / missed.sum())
        is_even = bool(((pulls - factor * missed).abs() <= SCATTER * abs(factor)).all())
        return factor if is_even else None

    @property
    def cross_entropy(self) -> float:
        """Mean cross-entropy of the targets in nats, with the smoothing."""
        found = nn.functional.cross_entropy(self.logits, self.targets, label_smoothing=self.smoothing)
        return float(found)


class KnownEntropy(NamedTuple):
    """Entropy of the targets' frequencies in nats, with and without label smoothing, and its share.

    The loss is `unit` times their mean cross-entropy. `of_batch` gives the loss to beat of one batch.
    """

    value: float
    plain: float
    smoothing: float
    of_batch: Callable[[Batch], float | None]
    unit: float = 1.0


def find_head(subject: Subject) -> nn.Linear:
    """The linear map that makes the logits: the last one that runs before the loss.

    Raises:
        NoTargetsError: there is none, or it is used several times.
    """
    with _linear_calls(subject.model) as called, torch.no_grad():
        subject.loss()
    return _last(called)


@contextlib.contextmanager
def _linear_calls(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """The linear maps that run inside, in their order."""
    called: list[nn.Linear] = []
    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                hooks.enter_context(module.register_forward_hook(lambda head, *_: called.append(head)))
        yield called


def _last(called: Sequence[nn.Linear]) -> nn.Linear:
    if not called:
        raise NoTargetsError("no nn.Linear makes the logits")
    if sum(module is called[-1] for module in called) > 1:
        raise NoTargetsError("the last linear map is used more than once")
    return called[-1]


def rows_of_head(subject: Subject, head: nn.Linear, batch: Batch) -> Rows:
    """Rows of the outputs of `head`, which are a leaf: nothing below them is differentiated.

    Raises:
        NoTargetsError: the loss does not depend on them.
    """
    leaves: list[Tensor] = []
    dtypes: list[torch.dtype] = []

    def cut(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().float().requires_grad_())
        dtypes.append(output.dtype)
        return leaves[-1].to(output.dtype)

    with untouched(subject.model) as model, head.register_forward_hook(cut), torch.enable_grad():
        model.requires_grad_(False)
        loss = subject.loss(batch)
        return _rows(loss, leaves, dtypes)


def rows_of_output(subject: Subject, batch: Batch) -> Rows:
    """Rows of the one tensor of the model's output that the loss reads, which is a leaf.

    Raises:
        NoTargetsError: the loss reads none, or several.
    """
    assert subject.loss_fn is not None
    with torch.no_grad():
        output = subject.forward(batch)
    leaves: list[Tensor] = []
    dtypes: list[torch.dtype] = []

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
            return value
        leaves.append(value.detach().float().requires_grad_())
        dtypes.append(value.dtype)
        return leaves[-1].to(value.dtype)

    with torch.enable_grad():
        return _rows(subject.loss_fn(pytree.tree_map(cut, output), batch), leaves, dtypes)


def _rows(loss: Tensor, leaves: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> Rows:
    if not loss.requires_grad:
        raise NoTargetsError(NOT_OF_OUTPUTS)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    read = [found for found in zip(leaves, gradients, dtypes, strict=True) if found[1] is not None]
    if len(read) != 1:
        raise NoTargetsError("the loss reads several outputs" if read else NOT_OF_OUTPUTS)
    ((leaf, gradient, dtype),) = read
    width = leaf.shape[-1]
    logits_NV, gradient_NV = leaf.detach().reshape(-1, width), gradient.reshape(-1, width)
    counted = gradient_NV.any(1)
    coarser = max(dtype, loss.dtype, key=lambda each: torch.finfo(each).eps)
    return Rows(logits_NV[counted], gradient_NV[counted], float(loss.detach()), coarser)


def targets_entropy(subject: Subject) -> KnownEntropy:
    """Entropy of the targets' frequencies in the data from which a user's batches come.

    The gradient of the loss gives the targets of two batches, and so their place in a batch. The other
    batches are only read.

    Raises:
        NoTargetsError: the loss is no cross-entropy.
        UnknownEntropyError: the targets are not in the batches, the loss is neither their mean nor always the
            same multiple of it, or they are too few to know the entropy to `ROUGH_ERROR`; of ids that look
            random, to `LARGEST_ERROR`, because a loss under it shows that they are not.
    """
    largest = LARGEST_ERROR if hides_targets(subject.batch) == "random" else ROUGH_ERROR
    batches = list(itertools.islice(endless(subject.batches), 2))
    with measuring(subject.model):
        rows = _rows_of(subject, batches[: 1 if same(*batches) else 2])
        places = [_place(batch, found) for batch, found in zip(batches, rows, strict=False)]
    if len({(place.index, place.shift, place.left_out) for place in places}) > 1:
        raise UnknownEntropyError(NOT_STORED)
    place = max(places, key=lambda each: each.ignored)  # only one of the batches may hold padding
    if any(each.unit != 1 for each in places):
        _require_one_unit(subject, place, places)
    for batches in _samples(subject, place):
        found = [row for rows in batches for row in rows]
        if len(found) < GROUPS:
            said = f"the batches hold {len(found)} sequences, and {GROUPS} are needed"
            continue
        result = estimate(found)
        if result.error <= LARGEST_ERROR:
            break
        count, error = sum(map(len, found)), f"{result.error:.3f} nats"
        said = f"{count} targets show it only to {error}, and {largest:g} are needed"
    if len(found) < GROUPS or result.error > largest:
        raise UnknownEntropyError(said)
    entropy, share = float(result.value), place.smoothing
    counts = np.bincount(np.concatenate(found), minlength=place.width)
    value = smoothed_entropy(counts, entropy, share) if share else entropy
    value *= place.factor
    of_batch = SampledCrossEntropy.of(place, place.unit * value, batches)
    return KnownEntropy(value, place.factor * entropy, share, of_batch, place.unit)


def _require_one_unit(subject: Subject, place: Stored, places: Sequence[Stored]) -> None:
    """Compare the loss as a multiple of the mean in the first batches with that where most targets differ.

    Raises:
        UnknownEntropyError: it differs, as for a sum over targets whose number differs.
    """
    first, number, furthest = place.count(subject.batch), place.count(subject.batch), subject.batch
    for index, batch in enumerate(itertools.islice(endless(subject.batches), NUMBERS_OF_BATCHES[1])):
        if index and same(batch, subject.batch):
            break
        count = place.count(batch)
        if count and abs(count - first) > abs(number - first):
            number, furthest = count, batch
    with measuring(subject.model):
        other = _place(furthest, next(_rows_of(subject, [furthest]))).unit
    least, most = min(each := [other, *(place.unit for place in places)]), max(each)
    if most > (1 + SAME_UNIT) * least:
        raise UnknownEntropyError(
            f"the loss is {least:.3g} times the mean cross-entropy in one batch and {most:.3g} times in "
            f"another, as a sum over {min(first, number)} and {max(first, number)} targets is: divide it by "
            "their number"
        )


def mean_cross_entropy(subject: Subject, batch: Batch) -> float | None:
    """Mean cross-entropy in nats of the targets of a batch; None if the loss is no cross-entropy."""
    try:
        with measuring(subject.model):
            rows = next(_rows_of(subject, [batch]))
        return rows.cross_entropy if len(rows.targets) else None
    except NoTargetsError:
        return None


def _samples(subject: Subject, place: Stored) -> Iterator[list[list[np.ndarray]]]:
    """The sequences of targets in each of the first batches: `NUMBERS_OF_BATCHES` of them, then all."""
    found: list[list[np.ndarray]] = []
    num = 0
    for number, batch in enumerate(itertools.islice(endless(subject.batches), NUMBERS_OF_BATCHES[-1])):
        if number and same(batch, subject.batch):
            break  # from here on the batches repeat
        if number in NUMBERS_OF_BATCHES:
            yield found
        found.append(place.sequences(batch))
        num += sum(map(len, found[-1]))
        if num >= MOST_TARGETS:
            break
    yield found


def _rows_of(subject: Subject, batches: Sequence[Batch]) -> Iterator[Rows]:
    """Rows of the output for each batch; of the head, at one more forward, where the loss reads no output."""
    head: nn.Linear | None = None
    for batch in batches:
        if head is None:
            with _linear_calls(subject.model) as called:
                try:
                    yield rows_of_output(subject, batch)
                    continue
                except NoTargetsError:
                    head = _last(called)
        yield rows_of_head(subject, head, batch)


def _place(batch: Batch, rows: Rows) -> Stored:
    """Place of the targets in a batch; NoTargetsError if it has none or the loss is not their mean.

    The sum may also be divided by the number of all labels, though the first one of each sequence is no
    target: the Trainer of transformers does so.
    """
    targets = rows.targets
    if not len(targets):
        raise NoTargetsError(NOT_OF_OUTPUTS)
    expected = rows.cross_entropy
    # The log-probabilities and their mean are rounded by half of eps each; sums in that type add less than
    # TOLERANCE (measured: 1.4 eps in all).
    rounding = torch.finfo(rows.dtype).eps * abs(expected)
    place = stored(batch, targets)
    factors = [1.0] if place is None else [1.0, len(targets) / place.number(batch)]
    fits = [each for each in factors if abs(rows.loss - each * expected) <= TOLERANCE + rounding]
    unit = 1.0 if fits else rows.factor
    if unit is None or (not fits and abs(rows.loss - unit * expected) > unit * (TOLERANCE + rounding)):
        raise UnknownEntropyError(f"the loss is {rows.loss:.3g}, and the mean cross-entropy {expected:.3g}")
    if place is None:
        raise UnknownEntropyError(NOT_STORED)
    factor = fits[0] if fits else 1.0
    return dataclasses.replace(
        place, smoothing=rows.smoothing, width=rows.logits.shape[1], factor=factor, unit=unit
    )
