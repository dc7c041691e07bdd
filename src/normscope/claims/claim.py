"""`Claim`: what a source says, in a form that can be put to the test; `@claim` puts it into `CLAIMS`.

A claim is one function. It measures and returns `Evidence`; the verdict is computed from that, by `judge`,
and is written nowhere.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from normscope.claims.sources import Source

if TYPE_CHECKING:
    from normscope.claims.evidence import Evidence
    from normscope.claims.look import Look


class Kind(StrEnum):
    """What it takes to refute a sentence."""

    LAW = "law"
    """Said of all cases: one that it is not true of refutes it."""
    TENDENCY = "tendency"
    """Said of what mostly happens: each seed is judged alone, and most of them decide."""


@dataclass(frozen=True)
class Sentence:
    """A sentence that can be true or not.

    Attributes:
        says: in English, as plainly as the source has it.
        condition: under which it is claimed, or under which it is found to hold; "" for none.
    """

    says: str
    condition: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of the table.

    Attributes:
        id: such as A7; its letter is the group.
        sources: where it is said.
        sentence: what is said.
        hypothesis: what is measured, and what figure the sentence asks for.
        kind: whether one counter-example refutes it.
        parts: sentences that belong to it and get verdicts of their own, by name.
        alone: whether nothing else may run beside it (it takes times or memory).
        has_long: whether it has a long form.
        measure: the function.
    """

    id: str
    sources: tuple[Source, ...]
    sentence: Sentence
    hypothesis: str
    kind: Kind = Kind.LAW
    parts: Mapping[str, Sentence] = field(default_factory=lambda: MappingProxyType({}))
    alone: bool = False
    has_long: bool = False
    measure: "Callable[[Look], Evidence]" = field(repr=False)

    @property
    def group(self) -> str:
        """A, B or C."""
        return self.id[0]

    @property
    def number(self) -> int:
        """Within the group."""
        return int(self.id[1:])

    @property
    def code(self) -> str:
        """The source of the function that measures."""
        return inspect.getsource(self.measure)

    @property
    def file(self) -> str:
        """The file of that function, within the package."""
        return self.measure.__module__.replace(".", "/") + ".py"


CLAIMS: dict[str, Claim] = {}
"""Every claim by its id; filled as the modules of the room are imported, see `registry`."""


def claim(
    id: str,
    *sources: Source,
    says: str,
    hypothesis: str,
    condition: str = "",
    kind: Kind = Kind.LAW,
    parts: Mapping[str, Sentence] | None = None,
    alone: bool = False,
    has_long: bool = False,
) -> "Callable[[Callable[[Look], Evidence]], Callable[[Look], Evidence]]":
    """Make the function under it the claim `id`; see `Claim` for the rest."""

    def enter(measure: "Callable[[Look], Evidence]") -> "Callable[[Look], Evidence]":
        assert id not in CLAIMS, f"two claims {id}"
        assert sources, f"claim {id} has no source"
        CLAIMS[id] = Claim(
            id=id,
            sources=sources,
            sentence=Sentence(says, condition),
            hypothesis=hypothesis,
            kind=kind,
            parts=MappingProxyType(dict(parts or {})),
            alone=alone,
            has_long=has_long,
            measure=measure,
        )
        return measure

    return enter
