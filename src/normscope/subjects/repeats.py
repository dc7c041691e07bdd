"""Batches that come again: a trial that repeats the user's shows only that they can be learnt by heart."""

import itertools

from normscope.subjects.feed import fingerprint, tensors_in
from normscope.subjects.subject import Batches, Subject


def period_of(subject: Subject, most: int) -> int | None:
    """Number of the user's batches after which they repeat; None if they do not within `most`.

    None too for batches that are not the user's.

    Raises:
        BatchesError: a batch within `most` cannot be drawn.
    """
    return repeated_after(subject.batches, most) if subject.has_own_batches else None


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
