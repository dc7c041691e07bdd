"""`Claim`: what a source says, in a form that can be tested; `@claim` puts it into `CLAIMS`.

A claim is one function. It measures and returns `Evidence`; `judge` computes the verdict from that.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
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
    def conditional(self) -> list[str]:
        """Names of the parts with a condition of ours to be confirmed, "" for the claim's own sentence."""
        return [name for name, part in {"": self.sentence, **self.parts}.items() if part.condition]

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
    *,
    smallest: float | Mapping[str, float] = MappingProxyType({}),
    has_long: bool = False,
    said: Said | None = None,
) -> "Callable[[Measure], Measure]":
    """Make the function under it the claim `id` of `sentences.toml`, or of `said`, which no text makes.

    Args:
        id: such as A7.
        smallest: the smallest effect that counts, of the claim's own sentence, or by part with "" for that.
        has_long: whether it has a long form.
        said: instead of a table of the file.

    Raises:
        ValueError: no `said`, and no table `id` in `sentences.toml`.
    """
    table = said or said_of(id)
    least = smallest if isinstance(smallest, Mapping) else {"": smallest}

    def enter(measure: "Measure") -> "Measure":
        assert id not in CLAIMS, f"two claims {id}"
        assert table.sources, f"claim {id} has no source"
        assert least.keys() <= {"", *table.parts}, f"smallest effects of no part of {id}"
        changed = {
            "sentence": replace(table.sentence, smallest=least.get("")),
            "parts": {name: replace(part, smallest=least.get(name)) for name, part in table.parts.items()},
        }
        CLAIMS[id] = Claim(**vars(table) | changed, id=id, has_long=has_long, measure=measure)
        return measure

    return enter
