"""Batches that come again: a trial that repeats the user's shows only that they can be learnt by heart."""

import itertools
import math

from normscope.subjects.feed import fingerprint, tensors_in
from normscope.subjects.subject import Batch, Batches, Subject

SINGLE = "a single batch is repeated"
"""Note on a subject that was given one batch."""
LAST = 10
"""Batches at the end of a trial whose sequences are looked for in those before; they make its mean loss."""
FEW = 0.25
"""Share of these sequences that may have come before: a few learnt by heart hardly change the mean loss."""


def period_of(subject: Subject, most: int) -> int | None:
    """Number of the user's batches after which they repeat; None if they do not within `most`.

    None too for batches that are not the user's.

    Raises:
        BatchesError: a batch within `most` cannot be drawn.
    """
    return repeated_after(subject.batches, most) if subject.has_own_batches else None


def steps_without_repeat(subject: Subject, most: int, accumulation: int) -> float:
    """Steps of `accumulation` batches that a trial takes before the user's repeat; infinite from `most` on.

    A script's own steps count as steps, though the last one of an epoch may have fewer batches: a copy, all
    of whose steps have as many, takes the first batches again in its last few steps only.

    Raises:
        BatchesError: a batch cannot be drawn.
    """
    period = period_of(subject, most * accumulation)
    return math.inf if period is None else max(period / accumulation, subject.recorded_steps)


def repeated_after(batches: Batches, most: int) -> int | None:
    """Number of batches after which the first one comes again; None if it does not within `most`.

    None too for batches without tensors, which cannot be told from one another.
    """
    first = ""
    num = 0
    for num, batch in enumerate(itertools.islice(batches(), most), start=1):
        if not tensors_in(batch):
            return None
        if num > 1 and fingerprint([batch]) == first:
            return num - 1
        first = first or fingerprint([batch])
    return num if num < most else None


def sequences_repeat(batches: Batches, num: int) -> bool:
    """Whether the sequences of the last of `num` batches came before, so that they may be known by heart.

    Epochs in another order repeat the sequences, and no batch.

    Raises:
        BatchesError: a batch within `num` cannot be drawn.
    """
    seen: set[str] = set()
    found: list[bool] = []
    for number, batch in enumerate(itertools.islice(batches(), num)):
        rows = _sequences(batch)
        if number >= num - LAST:
            found += [row in seen for row in rows]
        seen.update(rows)
    return sum(found) > FEW * len(found)


def _sequences(batch: Batch) -> list[str]:
    """A hash of each sequence that the model reads."""
    tensors = [tensor.detach().cpu() for tensor in tensors_in(batch)[:1]]  # one copy, not one for each row
    return [fingerprint([row]) for tensor in tensors for row in (tensor if tensor.ndim > 1 else tensor[None])]
