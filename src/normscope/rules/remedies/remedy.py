"""Remedy: a repair of a failing run, as data and as a function on a Subject; and helpers of remedies."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, Branch, Projection, named_modules, named_parameters
from normscope.subjects import Subject
from normscope.train import Recipe

Changed = tuple[Subject, Recipe]
OfRun = Callable[[Recipe], Recipe]
OfModel = Callable[[Subject, Anatomy], Subject]


class NotApplicable(Exception):
    """This remedy changes nothing here, or cannot be applied, for this `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Remedy:
    """One remedy.

    Attributes:
        name: stable name, "warm-up".
        summary: description of its change.
        code: the code or option that a user writes.
        cost: description of its cost to the run.
        source: the paper or measurement it comes from.
        reach: 0 where it changes the run's settings, 1 the starting weights, 2 the model itself.
        apply: function that returns the changed subject and settings. A changed model is a copy. Raises
            `NotApplicable`.
    """

    name: str
    summary: str
    code: str
    cost: str
    source: str
    reach: int
    apply: Callable[[Subject, Anatomy, Recipe], Changed]


REMEDIES: dict[str, Remedy] = {}
"""Every remedy by its name, entered by the decorators below."""


def run_remedy(name: str, **texts: str) -> Callable[[OfRun], OfRun]:
    """Enter the decorated function, from settings to settings, into `REMEDIES`, with its texts."""

    def enter(change: OfRun) -> OfRun:
        _enter(name, 0, texts, lambda subject, anatomy, config: (subject, change(config)))
        return change

    return enter


def model_remedy(name: str, *, reach: int, **texts: str) -> Callable[[OfModel], OfModel]:
    """Enter the decorated function, from a subject to a changed copy, into `REMEDIES`, with its texts.

    It is not applicable to a subject that it has already changed.
    """
    mark = f"changed by the remedy {name}"

    def enter(change: OfModel) -> OfModel:
        def once(subject: Subject, anatomy: Anatomy, config: Recipe) -> Changed:
            if mark in subject.notes:
                raise NotApplicable("it has been applied already")
            changed = change(subject, anatomy)
            return dataclasses.replace(changed, notes=(*changed.notes, mark)), config

        _enter(name, reach, texts, once)
        return change

    return enter


def _enter(
    name: str, reach: int, texts: dict[str, str], apply: Callable[[Subject, Anatomy, Recipe], Changed]
) -> None:
    assert name not in REMEDIES, f"{name} is taken"
    lines = {field: " ".join(text.split()) for field, text in texts.items()}
    REMEDIES[name] = Remedy(name, **lines, reach=reach, apply=apply)


def with_copy(subject: Subject) -> Subject:
    """The subject with a copy of its model, without gradients, that may be changed."""
    try:
        twin = copy.deepcopy(subject.model)
    except (TypeError, RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
        raise NotApplicable(f"the model cannot be copied ({type(error).__name__})") from error
    twin.zero_grad(set_to_none=True)
    return dataclasses.replace(subject, model=twin)


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by the name that an anatomy uses."""
    return dict(named_modules(model))


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter by the name that an anatomy uses."""
    return dict(named_parameters(model, remove_duplicate=False))


def holder(model: nn.Module, parameter: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and its name there."""
    path, _, name = parameter.rpartition(".")
    return modules_of(model)[path], name


def put_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at `path`."""
    above, _, name = path.rpartition(".")
    setattr(modules_of(model)[above], name, module)


def projections(
    branches: tuple[Branch, ...], *roles: str, whole: bool = True
) -> Iterator[tuple[Branch, Projection]]:
    """The projections with one of `roles`; `whole` leaves out those that also have another role."""
    for branch in branches:
        for projection in branch.projections:
            wanted = set(projection.roles) & set(roles)
            if wanted and (not whole or wanted == set(projection.roles)):
                yield branch, projection


def require_blocks(anatomy: Anatomy) -> None:
    """Raise `NotApplicable` where no block was read."""
    if not anatomy.branches:
        raise NotApplicable("no block of the model was read")


@torch.no_grad()
def multiply(tensor: Tensor, factor: float) -> None:
    """Multiply a tensor in place, also one that requires a gradient."""
    tensor.mul_(factor)
