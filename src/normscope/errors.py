"""Errors for users: what was given, what was expected, what to do."""

import difflib
from collections.abc import Iterable

_LONGEST_QUOTE = 300


class NormscopeError(Exception):
    """Base class of normscope's errors."""


class UsageError(NormscopeError, ValueError):
    """The call or the model cannot be used; the command line prints it as one line and exits 2.

    Args:
        given: what the user gave, quoted if it is a value.
        expected: what is accepted.
        do: what the user can do.
    """

    def __init__(self, given: str, expected: str, do: str) -> None:
        self.given, self.expected, self.do = given, expected, do
        super().__init__(" ".join(f"{given}: expected {expected}; {do}.".split()))


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most similar to `name`, or None if none is similar.

    A choice that `name` begins with is preferred: "prenorm" means "pre", though "deepnorm" is as similar.
    """
    by_lower = {choice.lower(): choice for choice in choices}
    begun = [choice for choice in by_lower if len(choice) > 2 and name.lower().startswith(choice)]
    if begun:
        return by_lower[max(begun, key=len)]
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def suggest(name: str, choices: Iterable[str], otherwise: str) -> str:
    """Advice for a mistyped `name`: the nearest of `choices`, or `otherwise` if none is near."""
    best = nearest(name, choices)
    return otherwise if best is None else f'the nearest name is "{best}"'


def describe(error: BaseException) -> str:
    """`Type: message` of an exception on one line, shortened to about 300 characters."""
    message = " ".join(str(error).split())
    if len(message) > _LONGEST_QUOTE:
        message = message[:_LONGEST_QUOTE] + "…"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
