"""The loss to beat on the user's own batches: the entropy of their targets, or the best constant's loss."""

import dataclasses

from normscope.errors import BatchesError, describe
from normscope.forecast.baseline import best_constant
from normscope.forecast.targets import KnownEntropy, NoTargetsError, UnknownEntropyError, targets_entropy
from normscope.subjects import Subject
from normscope.subjects.memory import is_out_of_memory
from normscope.subjects.repeats import sequences_repeat
from normscope.subjects.targets import hides_targets
from normscope.subjects.without_input import LossesWithoutInput

BY_HEART = (
    "the ids look random and their sequences repeat: a run may only learn them by heart; to decide, give as "
    "many different sequences as a trial takes, its steps × the sequences of a step"
)


def with_baseline(subject: Subject, taken: int = 0) -> tuple[Subject, tuple[str, ...]]:
    """The subject with the loss to beat on the user's own batches, and notes for the report.

    It is the entropy of the targets, or the loss of the best constant output. The forecast compares losses
    with it. It costs two forwards. If it cannot be known, a note gives the reason, unless the loss has no
    targets. Ids that look random have none where their sequences repeat: the loss falls under their entropy
    in a run that learns them by heart.

    Args:
        taken: batches of the trial.

    Raises:
        BatchesError: a batch cannot be drawn.
    """
    if not lacks_baseline(subject):
        return subject, ()
    repeats = hides_targets(subject.batch) == "random" and sequences_repeat(subject.batches, taken)
    try:
        try:
            if repeats:
                raise NoTargetsError(BY_HEART)
            return _with_entropy(subject, targets_entropy(subject))
        except UnknownEntropyError as error:
            return subject, (f"the entropy of the targets is not known: {error.reason}",)
        except NoTargetsError:
            found = best_constant(subject)
            return dataclasses.replace(
                subject, best_constant=found.value, without_input=LossesWithoutInput(found.of_batch)
            ), ()
    except UnknownEntropyError as error:
        return subject, (f"the loss without the input is not known: {error.reason}",)
    except NoTargetsError:
        return subject, (BY_HEART,) if repeats else ()  # another loss has no such baseline
    except BatchesError:
        raise
    except Exception as error:  # the user's loss may raise anything; the trial says the same
        if is_out_of_memory(error):
            raise
        return subject, (f"the entropy of the targets is not known: {describe(error)}",)


def _with_entropy(subject: Subject, found: KnownEntropy) -> tuple[Subject, tuple[str, ...]]:
    """The subject with the entropy of its targets, and notes on label smoothing and on a sum over targets."""
    notes = []
    if found.smoothing:
        notes.append(
            f"the loss has a label smoothing of {found.smoothing:.2g}: the entropy of its targets is "
            f"{found.value:.2f} nats, {found.plain:.2f} without it"
        )
    if found.unit != 1:
        notes.append(
            f"the loss is {found.unit:.4g} times the mean cross-entropy of its targets: the loss to beat is "
            f"{found.unit * found.value:.4g}, that many times their entropy of {found.value:.2f} nats"
        )
    known = dataclasses.replace(
        subject,
        unigram_entropy=found.value,
        loss_unit=found.unit,
        without_input=LossesWithoutInput(found.of_batch),
    )
    return known, tuple(notes)


def lacks_baseline(subject: Subject) -> bool:
    """Whether the subject has the user's own batches and a loss, of which no baseline is known."""
    return subject.baseline.loss is None and subject.has_own_batches and subject.loss_fn is not None
