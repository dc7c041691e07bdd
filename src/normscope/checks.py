"""Rules for the values that users give, with the advice for an invalid one."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from normscope.errors import UsageError, suggest


@dataclass(frozen=True)
class Rule:
    """Requirement on the values of one name.

    Attributes:
        is_met: whether a value is valid.
        expected: description of a valid value.
        do: what to do about an invalid value.
        optional: whether None is valid too.
    """

    is_met: Callable[[Any], bool]
    expected: str
    do: str | Callable[[Any], str]
    optional: bool = False

    def require(self, name: str, value: Any) -> None:
        """Raise UsageError if `value`, given for `name`, is invalid."""
        if (self.optional and value is None) or self.is_met(value):
            return
        do = self.do if isinstance(self.do, str) else self.do(value)
        raise UsageError(f"{name} {value!r}", self.expected, do)


def number(
    is_met: Callable[[float], bool], expected: str, do: str, *, whole: bool = False, optional: bool = False
) -> Rule:
    """A finite number (with `whole`, an integer) that meets a condition."""
    kinds = int if whole else int | float

    def is_right(value: Any) -> bool:
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        return is_number and math.isfinite(value) and is_met(value)

    return Rule(is_right, expected, do, optional)


def count(least: int, expected: str, do: str, *, optional: bool = False) -> Rule:
    """A whole number of at least `least`."""
    return number(lambda value: value >= least, expected, do, whole=True, optional=optional)


def one_of(choices: tuple[str, ...]) -> Rule:
    """One of some names."""

    def nearest(value: Any) -> str:
        return suggest(str(value), choices, "choose one of them")

    return Rule(lambda value: value in choices, " | ".join(choices), nearest)


def text(expected: str, do: str, *, optional: bool = False) -> Rule:
    """A string that is not empty."""
    return Rule(lambda value: isinstance(value, str) and value != "", expected, do, optional)


SEED = number(
    lambda value: 0 <= value < 2**63, "a whole number from 0, under 2^63", "change the seed", whole=True
)
