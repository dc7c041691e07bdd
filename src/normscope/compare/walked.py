"""The walk through both models: relative differences of the tensors, as the outputs show them."""

from dataclasses import dataclass
from typing import Any

from normscope.compare.types import Diff, Part


@dataclass(frozen=True)
class Walked:
    """A tensor of the walk.

    Attributes:
        a, b: its site in each side.
        name: its name at the site, such as "q" or "sum".
        relative, gradient: relative difference of the two values, and of the two gradients; None where it was
            not taken.
    """

    a: str | None
    b: str | None
    name: str
    relative: float | None
    gradient: float | None


def walk_of(diff: Diff) -> list[Walked]:
    """The tensors in the order of the forward pass; empty without a walk."""
    return [
        Walked(
            each.get("a"),
            each.get("b"),
            str(each.get("name") or ""),
            _number(each.get("relative")),
            _number(each.get("gradient")),
        )
        for each in _figure(diff, "walk") or ()
    ]


def tolerance_of(diff: Diff) -> float | None:
    """Relative difference up to which two tensors are one; None without a walk."""
    return figure_of(diff, "tolerance")


def figure_of(diff: Diff, name: str) -> float | None:
    """A figure of the function part; None where it has none of that name."""
    return _number(_figure(diff, name))


def _figure(diff: Diff, name: str) -> Any:
    return next((each.figures.get(name) for each in diff.parts if each.part is Part.FUNCTION), None)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
