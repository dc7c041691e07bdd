"""Batches that come again: a trial that repeats the user's shows only that they can be learnt by heart."""

import itertools

from normscope.subjects.feed import fingerprint, tensors_in
from normscope.subjects.memory import is_out_of_memory
from normscope.subjects.subject import Batches, Subject


def period_of(subject: Subject, most: int) -> int | None:
    """Number of the user's batches after which they repeat; None if they do not within `most`.

    None too for batches that are not the user's, and for those that raise an error: a trial that draws as
    many reports it.
    """
    if not subject.has_own_batches:
        return None
    try:
        return repeated_after(subject.batches, most)
    except Exception as error:  # batches may raise anything
        if is_out_of_memory(error):
            raise
        return None


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
