"""Conditions under which a run is certain to fail, so that its remaining steps can be skipped.

There are two: a loss that is not finite, and a last hidden state whose tokens are all alike. How often the
second was wrong, on runs that went on to the end, is in docs/maps.md.
"""

from torch import nn

from normscope.anatomy import Anatomy, read_anatomy
from normscope.errors import NormscopeError
from normscope.forecast.evaluator import Evaluator
from normscope.subjects import Subject

EVERY = 25  # steps between two looks; one costs about a third of a step
ALIKE = 1e-10  # token diversity of the last hidden state; float32 tells tokens apart to about 1e-14


def diversity(subject: Subject, anatomy: Anatomy | None, model: nn.Module) -> float | None:
    """Token diversity of `model`'s last hidden state on the subject's batch; None where none is read."""
    if anatomy is None or not anatomy.stacks:
        return None
    _, found = Evaluator(subject, anatomy, model).state()
    return list(found.values())[-1] if found else None


def all_alike(diversity: float | None, alike: float = ALIKE) -> str | None:
    """Why a run with this token diversity is certain to fail, None where it is not."""
    if diversity is None or not diversity <= alike:  # not a number: left to the loss
        return None
    return f"token diversity {diversity:.1e}: every token looks the same"


def anatomy_of(subject: Subject) -> Anatomy | None:
    """Anatomy of all models of the subject's shape; None where it cannot be read."""
    try:
        return read_anatomy(subject)
    except NormscopeError:
        return None  # what cannot be read is trained to the end
