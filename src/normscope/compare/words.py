"""Sentences on a comparison that all outputs share: the verdict, and values in words."""

import dataclasses
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from normscope.compare.facts import FACTS, in_words, sentence
from normscope.compare.places import WHOLE, Rows, sites_of
from normscope.compare.types import Compared, Diff, Difference, Part
from normscope.compare.walked import figure_of
from normscope.rules import figure

Outcome = Literal["same", "different", "not compared"]
T = TypeVar("T")

LONGEST = 80
"""Characters of a value from which on it is cut."""
MOST_VALUES = 6
"""Different values of a list that are shown in full."""
CONFIRMED = {True: "confirmed", False: "not confirmed", None: ""}
"""A reason that was tried is confirmed where undoing it makes the difference vanish."""
_WORD = re.compile(r"[A-Z][a-z]+ ")
"""A first word that loses its capital letter within a sentence; "A", "GELU" and "LayerNorm" are names."""


def outcome(diff: Diff) -> Outcome:
    """ "different" with a difference, "not compared" where no part was compared, else "same"."""
    if diff.differences:
        return "different"
    return "same" if any(each.how != "not" for each in diff.parts) else "not compared"


def headline(diff: Diff) -> str:
    """The verdict in a few words."""
    if outcome(diff) == "not compared":
        return "Nothing was compared"
    if not diff.differences:
        function = _compared(diff, Part.FUNCTION)
        return "The same model" if function and function.how == "whole" else "No difference was found"
    if not diff.of(Part.FUNCTION):
        return "Not the same model"
    return "Not the same gradients" if _values_agree(diff) else "Not the same function"


def _values_agree(diff: Diff) -> bool:
    """Whether only the gradients of the two functions differ."""
    largest, tolerance = figure_of(diff, "largest"), figure_of(diff, "tolerance")
    return largest is not None and tolerance is not None and largest <= tolerance


def lead(diff: Diff) -> str:
    """The verdict in one sentence."""
    return f"{headline(diff)}: {reason(diff)}"


def reason(diff: Diff) -> str:
    """Why the verdict is so: the end of a sentence, with its full stop."""
    if outcome(diff) == "not compared":
        whys = list(dict.fromkeys(why for each in diff.parts for why in each.why))
        return ended(within("; ".join(whys[:2]) or "no part was asked for"))
    if not diff.differences:
        return ended(_agreement(diff))
    first = first_parting(diff)
    return ended(_parting(diff, first) if first else _differing(diff))


def _agreement(diff: Diff) -> str:
    """ "structure and start agree; the same function to 3e-12; recipe was not compared"."""
    function = _compared(diff, Part.FUNCTION)
    result = within(function.said.rstrip(".")) if function and function.how != "not" else ""
    agreeing = [
        str(each.part) for each in diff.parts if each.how != "not" and not (result and each is function)
    ]
    words = [f"{listed(agreeing)} {'agrees' if len(agreeing) == 1 else 'agree'}"] if agreeing else []
    return "; ".join([*words, *filter(None, [result]), *_left_out(diff)])


def _left_out(diff: Diff) -> list[str]:
    found = []
    for how, words in (("partly", "compared only partly"), ("not", "not compared")):
        left = [str(each.part) for each in diff.parts if each.how == how]
        if names := [part for part in left if part != Part.VERDICT]:  # it takes --check: seldom asked for
            found.append(f"{listed(names)} {'was' if len(names) == 1 else 'were'} {words}")
    return found


def _parting(diff: Diff, first: Difference) -> str:
    site = dataclasses.replace(first, sites=first.sites[:1])
    place, sites = Rows(diff.rows).fold(site), sites_of(site)
    exact = f" ({sites})" if sites not in (place, WHOLE) else ""
    how = {True: ", because", False: "; a likely reason, not confirmed:", None: ":"}[first.confirmed]
    where = f" in {place}{exact}" if place != WHOLE else ""
    words = ended(f"they part{where}{how} {within(first.message)}")
    lacks = [each.message for each in diff.of(Part.STRUCTURE) if each.name in ("stack", "blocks", "branch")]
    return words if " lacks " in first.message else " ".join([words, *lacks[:2]])


def _differing(diff: Diff) -> str:
    counts = {each.part: len(diff.of(each.part)) for each in diff.parts if diff.of(each.part)}
    verb = "differs" if len(counts) == 1 else "differ"
    words = f"{listed([f'{part} ({num})' for part, num in counts.items()])} {verb}"
    if len(diff.differences) == 1:
        words += f": {within(diff.differences[0].message.rstrip('.'))}"
    function = _compared(diff, Part.FUNCTION)
    if function and function.how != "not" and function.said:
        return f"{within(function.said.rstrip('.'))}, but {words}"
    return "; ".join([words, *_left_out(diff)])


def first_parting(diff: Diff) -> Difference | None:
    """The place where the functions part; None where they do not, or were not compared."""
    return next(iter(in_order(diff, Part.FUNCTION)), None)


def in_order(diff: Diff, part: Part) -> list[Difference]:
    """The differences of a part, the first parting first."""
    return sorted(diff.of(part), key=lambda each: not each.is_first)


def confirmed(each: Difference) -> str:
    """ "confirmed" where undoing it made the difference vanish; "" where that was not tried."""
    return CONFIRMED[each.confirmed]


def not_compared(diff: Diff) -> list[tuple[list[str], str]]:
    """Parts that are not whole and why, "not compared: it is a report."; one item for the same reason."""
    found: dict[str, list[str]] = {}
    for each in diff.parts:
        if each.how != "whole":
            partly = "compared partly" if diff.of(each.part) else "no difference, compared partly"
            how = "not compared" if each.how == "not" else partly
            why = f"{how}: {'; '.join(each.why) or 'no reason was given'}"
            found.setdefault(ended(why), []).append(str(each.part))
    return [(parts, why) for why, parts in found.items()]


def result(diff: Diff, each: Compared) -> str:
    """The result of a part in a few words: "3 differences", "no difference; the same function to 3e-12"."""
    if each.how == "not":
        return "not compared"
    num = len(diff.of(each.part))
    partly = ", compared partly" if each.how == "partly" else ""
    if not num:
        said = within(each.said.rstrip("."))
        return f"no difference{partly}" + (f"; {said}" if said not in ("", f"the same {each.part}") else "")
    size = _size(diff) if each.part is Part.FUNCTION else ""
    return f"{num} difference{'s' if num > 1 else ''}{partly}{size}"


def _size(diff: Diff) -> str:
    """ "; they differ by up to 0.3 on the residual stream", or their gradients do."""
    who, name = ("the gradients", "largest_gradient") if _values_agree(diff) else ("they", "largest")
    largest = figure_of(diff, name)
    return "" if largest is None else f"; {who} differ by up to {figure(largest, 2)} on the residual stream"


def _compared(diff: Diff, part: Part) -> Compared | None:
    return next((each for each in diff.parts if each.part is part), None)


def ended(words: str) -> str:
    """`words` with a full stop."""
    return words if words[-1:] in (".", "!", "?") else words + "."


def within(words: str) -> str:
    """A sentence as a part of another one."""
    return words[0].lower() + words[1:] if _WORD.match(words) else words


def listed(words: Sequence[str]) -> str:
    """ "structure, start and recipe"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def values(difference: Difference) -> tuple[str, str] | None:
    """Both values in words, with as many digits as show that they differ; None where there are none."""
    a, b = difference.a, difference.b
    if a is None and b is None:
        return None
    if isinstance(a, Mapping) and isinstance(b, Mapping):  # the keys that differ
        keys = [key for key in {**a, **b} if key not in a or key not in b or a[key] != b[key]]
        a, b = ({key: each[key] for key in keys if key in each} for each in (a, b))
    fact = difference.name.replace("-", "_")
    shown = spelled(a, fact), spelled(b, fact)
    if shown[0] == shown[1]:
        shown = spelled(a, fact, exactly=True), spelled(b, fact, exactly=True)
    return _cut(shown[0]), _cut(shown[1])


def spelled(value: Any, fact: str = "", *, exactly: bool = False) -> str:
    """A value in words: "1e-05", "gains 0.1, biases 0", or those of the fact."""
    if isinstance(value, float) and (exactly or fact not in FACTS):
        return repr(value) if exactly else figure(value, 4)
    if isinstance(value, Mapping):
        named = (f"{key} {spelled(each, exactly=exactly)}" for key, each in value.items())
        return ", ".join(named) or "none"
    if isinstance(value, list | tuple) and value:
        shown = list(dict.fromkeys(spelled(each, exactly=exactly) for each in value))
        if len(shown) > MOST_VALUES:
            return f"{shown[0]}, {shown[1]}, … {shown[-1]} ({len(value)} values)"
        return shown[0] if len(shown) == 1 else ", ".join(spelled(each, exactly=exactly) for each in value)
    if isinstance(value, bool) and fact not in FACTS:
        return "yes" if value else "no"
    return " ".join(in_words(fact, value).split())


def says_values_only(each: Difference) -> bool:
    """Whether the message says no more than the name of a fact and the two values."""
    fact = each.name.replace("-", "_")
    return fact in FACTS and each.message == sentence(fact, each.a, each.b)


def _cut(words: str) -> str:
    return words if len(words) <= LONGEST else words[: LONGEST - 1] + "…"


def clean(value: T) -> T:
    """`value` with every string in it fit for people: no control characters, none that turn the direction."""
    if isinstance(value, str) and type(value) is str:
        return "".join(map(_clean, value))  # type: ignore[return-value]
    if isinstance(value, Mapping):
        return {clean(key): clean(each) for key, each in value.items()}  # type: ignore[return-value]
    if isinstance(value, list | tuple):
        return tuple(map(clean, value))  # type: ignore[return-value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {each.name: clean(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value


def _clean(character: str) -> str:
    if character in "\n\t\r":
        return " "
    return "?" if unicodedata.category(character) in ("Cc", "Cf", "Cs") else character
