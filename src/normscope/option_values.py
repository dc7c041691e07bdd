"""Values of options, read and refused without PyTorch, whose import takes seconds."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from normscope.errors import UsageError, suggest

T = TypeVar("T")
MOST_CELLS = 100_000
"""Most values of a range, and most cells of a map."""
_LARGEST = 2**63 - 1  # SQLite's largest integer
FORMATS = ("int8", "int4", "fp8")
"""Formats that weights and activations can be rounded to."""
LADDER_STEPS = 36
"""Fewest steps of a rung of a ladder of learning rates: a pace over 10 of 20 steps is less certain."""
REFINED_STEPS = 140
"""Steps over which the best rates are tried again, unless said otherwise; see docs/forecast-rates.md."""


def rates(text: str, option: str = "--lrs", most: int = MOST_CELLS) -> list[float]:
    """Learning rates from `1e-4,3e-4`, or from `1e-4:3e-2:8`: eight from 1e-4 to 3e-2 on a log scale.

    Rates of a range are rounded to three digits, so that ranges that share a rate share its cells.

    Args:
        most: largest number of rates of a range.

    Raises:
        UsageError: the text has another form, or a rate is not positive.
    """
    found: list[float] = []
    for part in words(option, text):
        first, *rest = part.split(":")
        if not rest:
            found.append(_positive(option, first, text))
            continue
        if len(rest) != 2:
            raise UsageError(f'{option} "{text}"', "a range FIRST:LAST:COUNT", "write 1e-4:3e-2:8")
        low, high = (_positive(option, word, text) for word in (first, rest[0]))
        count = _count(option, rest[1], text, 2, most)
        found += [float(f"{low * (high / low) ** (i / (count - 1)):.3g}") for i in range(count)]
    return found


def counts(option: str, text: str, least: int = 0) -> list[int]:
    """Whole numbers from a text with commas.

    Raises:
        UsageError: a part is not a whole number, or is below `least`.
    """
    return [_count(option, part, text, least) for part in words(option, text)]


def seeds(text: str) -> list[int]:
    """Seeds from a text: `3` gives 0, 1 and 2; `0,7` gives 0 and 7."""
    found = counts("--seeds", text)
    if "," in text:
        return found
    if not 1 <= found[0] <= MOST_CELLS:
        expected = f"the number of seeds, up to {MOST_CELLS}, or seeds with commas"
        raise UsageError(f'--seeds "{text}"', expected, f"give 1 or more, or write {found[0]},")
    return list(range(found[0]))


def words(option: str, text: str) -> list[str]:
    """Words from a text with commas; UsageError if there are none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError(f'{option} "{text}"', "values with commas", "give at least one, or leave it out")
    return parts


def _positive(option: str, word: str, text: str) -> float:
    rate = _number(float, word)
    if rate is None or not 0 < rate < float("inf"):
        raise UsageError(f'learning rate "{word}" of {option} "{text}"', "a positive number", "try 3e-4")
    return rate


def _count(option: str, word: str, text: str, least: int, most: int = _LARGEST) -> int:
    count = _number(int, word)
    if count is None or not least <= count <= most:
        expected = f"a whole number from {least}" + (f" to {most}" if most < _LARGEST else "")
        raise UsageError(f'"{word}" of {option} "{text}"', expected, "change it")
    return count


def _number(kind: Callable[[str], T], word: str) -> T | None:
    try:
        return kind(word)
    except ValueError:
        return None


def parse_formats(given: str | Iterable[str]) -> tuple[str, ...]:
    """The formats of "int8,fp8" or of a list of names, each once, in the order of `FORMATS`; "" has none.

    Raises:
        UsageError: a name is unknown.
    """
    names = (given.split(",") if given else []) if isinstance(given, str) else list(given)
    names = [str(name).strip() for name in names]
    expected = f"some of {', '.join(FORMATS)}, with commas between them"
    for name in names:
        if name not in FORMATS:
            do = suggest(name, FORMATS, "choose one of these")
            raise UsageError(f'format "{name}" of quantise', expected, do)
    return tuple(name for name in FORMATS if name in names)


def require_longer(refine: int | None, steps: int, *, tries_rates: bool) -> None:
    """Raise UsageError if a second trial of the best rates is not longer than the first of `steps`."""
    first = max(steps, LADDER_STEPS)
    if refine and not tries_rates:
        raise UsageError(f"refine={refine}", "learning rates to try", "add forecast_rates")
    if refine and refine <= first:
        what, wanted = f"{refine} steps to refine over", f"more than the {first} of the first trials"
        raise UsageError(what, wanted, f"use {REFINED_STEPS}")
