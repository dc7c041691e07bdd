"""`Claim`: what a source says, in a form that can be tested; `@claim` puts it into `CLAIMS`.

A claim is one function. It measures and returns `Evidence`; `judge` computes the verdict from that.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from normscope.claims.sentences import Kind, Said, Sentence, said_of

if TYPE_CHECKING:
    from normscope.claims.evidence import Evidence
    from normscope.claims.setup import Setup

    Measure = Callable[[Setup], Evidence]

__all__ = ["CLAIMS", "Claim", "Kind", "Sentence", "claim"]


@dataclass(frozen=True, kw_only=True)
class Claim(Said):
    """One row of the table: what is said, and the function that measures it.

    Attributes:
        id: such as A7; its letter is the group.
        has_long: whether it has a long form.
        measure: the function.
    """

    id: str
    has_long: bool = False
    measure: "Measure" = field(repr=False)

    @property
    def group(self) -> str:
        """A, B or C."""
        return self.id[0]

    @property
    def number(self) -> int:
        """Number within the group."""
        return int(self.id[1:])

    @property
    def sentences(self) -> dict[str, Sentence]:
        """The claim's own sentence, under "", and its parts."""
        return {"": self.sentence, **self.parts}

    @property
    def conditional(self) -> list[str]:
        """Names of the sentences with a condition of ours to be confirmed."""
        return [name for name, sentence in self.sentences.items() if sentence.condition]

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


def claim(id: str, *, has_long: bool = False, said: Said | None = None) -> "Callable[[Measure], Measure]":
    """Make the function under it the claim `id` of `sentences.toml`, or of `said`, which no text makes.

    Args:
        id: such as A7.
        has_long: whether it has a long form.
        said: instead of a table of the file.

    Raises:
        ValueError: no `said`, and no table `id` in `sentences.toml`.
    """
    table = said or said_of(id)

    def enter(measure: "Measure") -> "Measure":
        assert id not in CLAIMS, f"two claims {id}"
        assert table.sources, f"claim {id} has no source"
        CLAIMS[id] = Claim(**vars(table), id=id, has_long=has_long, measure=measure)
        return measure

    return enter
