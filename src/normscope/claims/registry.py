"""Every module of this room with a claim in it; importing this fills `CLAIMS`."""

from importlib import import_module
from pathlib import Path

from normscope.claims.claim import CLAIMS, Claim
from normscope.errors import UsageError, suggest

MODULES = tuple(
    file.stem for file in sorted(Path(__file__).parent.glob("*.py")) if "\n@claim(" in file.read_text("utf-8")
)
for _module in MODULES:
    import_module(f"normscope.claims.{_module}")


def in_order() -> list[Claim]:
    """All claims, A1 first."""
    return sorted(CLAIMS.values(), key=lambda claim: (claim.group, claim.number))


def chosen(words: list[str]) -> list[Claim]:
    """The claims that `words` name: an id (A7), a range (B3-B6), a group (C) or a text (000); all for none.

    Raises:
        UsageError: a word that names none.
    """
    found: dict[str, Claim] = {}
    for name in ",".join(words).split(",") if words else ():
        for claim in _named(name):
            found[claim.id] = claim
    return [claim for claim in in_order() if not words or claim.id in found]


def _named(word: str) -> list[Claim]:
    name = word.strip().upper().replace("–", "-")
    first, dash, last = name.partition("-")
    if dash and first in CLAIMS and last in CLAIMS and first[0] == last[0]:
        low, high = sorted((CLAIMS[first].number, CLAIMS[last].number))
        matching = [c for c in in_order() if c.group == first[0] and low <= c.number <= high]
    else:
        matching = [
            claim
            for claim in in_order()
            if name in (claim.id, claim.group) or name in (source.text for source in claim.sources)
        ]
    if not matching:
        raise UsageError(
            f'claim "{word}"',
            "an id (A7), a range (B3-B6), a group (A, B, C) or a text (000 … 004)",
            suggest(name, CLAIMS, "`normscope claims --list` shows them all"),
        )
    return matching
