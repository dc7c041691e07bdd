"""Sentences on a comparison that all outputs share: the verdict, places folded over layers, values."""

import re
from collections.abc import Sequence
from typing import Literal

from normscope.compare.types import Compared, Diff, Difference, Part
from normscope.report.sites import compress

Outcome = Literal["same", "different", "not compared"]

NONE = "none"
LONGEST = 60
"""Characters of a value from which on it is cut."""
_OPENING = re.compile(r"(The|An?|In|At|Its|It|There|No|Every|All|Both|Each|Only|Weights|Blocks?) ")
"""First words that lose their capital letter within a sentence; anything else may be a name."""


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
        return "The same model" if part_of(diff, Part.FUNCTION) == "whole" else "No difference was found"
    return "Not the same function" if diff.of(Part.FUNCTION) else "Not the same model"


def lead(diff: Diff) -> str:
    """The verdict in one sentence."""
    return f"{headline(diff)}: {reason(diff)}"


def reason(diff: Diff) -> str:
    """Why the verdict is so: the end of a sentence, with its full stop."""
    function = next((each for each in diff.parts if each.part is Part.FUNCTION), None)
    if outcome(diff) == "not compared":
        whys = list(dict.fromkeys(why for each in diff.parts for why in each.why))
        return ended(within("; ".join(whys[:2]) or "no part was asked for"))
    if not diff.differences:
        return ended(_agreement(diff, function))
    if first := first_parting(diff):
        return ended(_parting(diff, first))
    differing = [each for each in diff.parts if diff.of(each.part)]
    counts = listed([f"{each.part} ({len(diff.of(each.part))})" for each in differing])
    verb = "differs" if len(differing) == 1 else "differ"
    known = function is not None and function.how == "whole"
    said = f"{within(function.said.rstrip('.'))}, but " if known and function and function.said else ""
    return ended(f"{said}{counts} {verb}")


def _agreement(diff: Diff, function: Compared | None) -> str:
    """The parts that agree, the function's figure, and the parts that were left out."""
    agreeing = [str(each.part) for each in diff.parts if each.how != "not"]
    words = f"{listed(agreeing)} {'agrees' if len(agreeing) == 1 else 'agree'}"
    if function is not None and function.how != "not" and function.said:
        words += f"; {within(function.said.rstrip('.'))}"
    partly = [str(each.part) for each in diff.parts if each.how == "partly"]
    missing = [str(each.part) for each in diff.parts if each.how == "not"]
    for names, how in ((partly, "compared only partly"), (missing, "not compared")):
        if names:
            words += f"; {listed(names)} {'was' if len(names) == 1 else 'were'} {how}"
    return words


def _parting(diff: Diff, first: Difference) -> str:
    place = where(diff, first)
    said = within(first.message.rstrip("."))
    return (
        f"they part at {place}: {said}"
        if first.confirmed is None
        else f"they part at {place}, because {said}"
    )


def first_parting(diff: Diff) -> Difference | None:
    """The place where the functions part; None where they do not, or were not compared."""
    found = diff.of(Part.FUNCTION)
    return next((each for each in found if each.is_first), found[0] if found else None)


def part_of(diff: Diff, part: Part) -> str:
    """How far a part was compared; "not" where it is not listed."""
    return next((each.how for each in diff.parts if each.part is part), "not")


def ended(words: str) -> str:
    """`words` with a full stop."""
    return words if words[-1:] in (".", "!", "?") else words + "."


def within(words: str) -> str:
    """A sentence as the end of another one: an opening article loses its capital letter."""
    return words[0].lower() + words[1:] if _OPENING.match(words) else words


def listed(words: Sequence[str]) -> str:
    """ "structure, start and recipe"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def where(diff: Diff, difference: Difference) -> str:
    """The places of a difference, folded: "blocks 0–11, attention" or the sites themselves."""
    return compress(a if a is not None else b or "" for a, b in difference.sites) or "the whole model"
