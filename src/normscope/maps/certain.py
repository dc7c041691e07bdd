"""Conditions under which a run is certain to fail, so that its remaining steps can be skipped.

There are two: a loss that is not finite, and a last hidden state whose tokens are all equal.
"""

from torch import nn

from normscope.anatomy import Anatomy, read_anatomy
from normscope.errors import NormscopeError
from normscope.forecast.evaluator import Evaluator
from normscope.subjects import Subject

EVERY = 25  # steps between two checks; one costs about a third of a step
ALIKE = 1e-10  # token diversity of the last hidden state; float32 distinguishes tokens to about 1e-14


def diversity(subject: Subject, anatomy: Anatomy | None, model: nn.Module) -> float | None:
    """Token diversity of `model`'s last hidden state on the subject's batch; None if it cannot be read."""
    if anatomy is None or not anatomy.stacks:
        return None
    _, found = Evaluator.of(subject, anatomy, model).state()
    return list(found.values())[-1] if found else None


def all_alike(diversity: float | None, alike: float = ALIKE) -> str | None:
    """The reason why a run with this token diversity is certain to fail; None if it is not."""
    if diversity is None or not diversity <= alike:  # nan: the loss will show it
        return None
    return f"token diversity {diversity:.1e}: every token looks the same"


def anatomy_of(subject: Subject) -> Anatomy | None:
    """Anatomy of all models of the subject's shape; None if it cannot be read."""
    try:
        return read_anatomy(subject)
    except NormscopeError:
        return None  # such models are trained to the end
