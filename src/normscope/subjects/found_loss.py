"""Choice of a loss for a subject whose user gave none."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from normscope.subjects.assemble import looking
from normscope.subjects.feed import mapped
from normscope.subjects.guess import vocabulary_of
from normscope.subjects.loss import Ids, NextToken, is_causal, logits_of, output_loss, own_loss, time_axis_of
from normscope.subjects.subject import LABEL_NAMES, Batch, Subject, call_model

TIME_FIRST = "ids are fed as (T, B), because the model expects time first"


def with_found_loss(subject: Subject) -> Subject:
    """Give `subject` the model's own loss, else next-token loss if it is meaningful, else none.

    Next-token loss needs logits (B, T, V) over the vocabulary of the ids, and a causal model: a model that
    sees later tokens would only learn to copy them.
    """
    with looking(subject.model):
        output = subject.forward()
    places = _places_of_ids(subject)
    if _is_meant(own_loss(output), output, subject.batch):
        return _with_own_loss(subject, places)
    for ids, vocabulary in places:
        if logits_of(output, vocabulary) is None:
            continue
        with looking(subject.model):
            axis = time_axis_of(subject.model, subject.batch, ids)
            ids = dataclasses.replace(ids, time_axis=1 if axis is None else axis)
            causal = is_causal(subject.model, subject.batch, ids)
        if axis is None or not causal:
            return without_loss(subject, "next-token loss is meaningless because tokens see later ones")
        if ids.read(subject.batch).shape[axis] < 2:
            return without_loss(subject, "a sequence of one token has no next token")
        if axis == 0 and ids.key is None:
            fed_time_first(subject)
        subject.loss_fn = NextToken(ids)
        return subject
    return without_loss(
        subject, "the model gives neither a loss nor logits (B, T, V) over the vocabulary of its ids"
    )


def _is_meant(loss: Tensor | None, output: Any, batch: Batch) -> bool:
    """True if a scalar is the batch's loss: it is named so, is the only output, or the batch has labels.

    The auxiliary loss in (logits, auxiliary loss) of a mixture of experts without labels is not.
    """
    if loss is None or loss is output or not isinstance(output, tuple | list) or hasattr(output, "loss"):
        return loss is not None
    if isinstance(batch, Mapping):
        return any(name in batch for name in LABEL_NAMES)
    return isinstance(batch, tuple) and len(batch) > 1


def _with_own_loss(subject: Subject, places: list[tuple[Ids, int]]) -> Subject:
    """Use the model's own loss, unless normscope made the labels and the model sees later tokens."""
    ours = isinstance(subject.batch, Mapping) and subject.unigram_entropy is not None
    if ours and places:
        with looking(subject.model):
            has_logits = logits_of(call_model(subject.model, subject.batch)) is not None
            if has_logits and not is_causal(subject.model, subject.batch, places[0][0]):
                return without_loss(subject, "next-token loss is meaningless because tokens see later ones")
    subject.loss_fn = output_loss
    return subject


def _places_of_ids(subject: Subject) -> list[tuple[Ids, int]]:
    """Places in the batch that hold ids (·, ·) for a table, each with the table's number of rows."""
    batch, found = subject.batch, []
    entries: Iterable[tuple[int | str | None, Any]] = [(None, batch)]
    if not isinstance(batch, Tensor):
        entries = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    for key, value in entries:
        if isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point():
            vocabulary = vocabulary_of(subject.model, subject.batch, value)
            if vocabulary is not None:
                found.append((Ids(key), vocabulary))
    return found


def fed_time_first(subject: Subject) -> bool:
    """Feed normscope's ids as (T, B), to a model that expects time first; False for a user's batch."""
    if subject.unigram_entropy is None or not isinstance(subject.batch, Tensor):
        return False

    def transposed(batch: Batch) -> Tensor:
        assert isinstance(batch, Tensor)
        return batch.T.contiguous()

    subject.batches, subject.batch = mapped(transposed, subject.batches), transposed(subject.batch)
    subject.without_input = None  # it reads targets with the sequence first
    subject.notes = (*subject.notes, TIME_FIRST)
    return True


def without_loss(subject: Subject, why: str) -> Subject:
    """Remove the loss of `subject` and note the reason."""
    subject.loss_fn = subject.unigram_entropy = subject.without_input = None
    subject.notes = (*subject.notes, f"no loss: {why}")
    return subject
