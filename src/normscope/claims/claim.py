"""`Claim`: what a source says, in a form that can be tested; `@claim` puts it into `CLAIMS`.

A claim is one function. It measures and returns `Evidence`; `judge` computes the verdict from that.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from normscope.claims.sentences import Said, said_of
from normscope.claims.sources import Source

if TYPE_CHECKING:
    from normscope.claims.evidence import Evidence
    from normscope.claims.setup import Setup


class Kind(StrEnum):
    """Evidence that refutes a sentence."""

    LAW = "law"
    """Claimed for all cases: one counter-example refutes it."""
    TENDENCY = "tendency"
    """Claimed for what mostly happens: the seeds must agree, or the effect's interval must decide."""


@dataclass(frozen=True)
class Sentence:
    """A sentence that can be true or not.

    Attributes:
        says: in English, as plainly as the source has it.
        condition: one that we found and the text does not have; "" for none. It counts only where unused
            seeds confirm it.
        hypothesis: the text's own, a part of the sentence: cases outside it do not count. "" for none.
        smallest: the smallest effect that counts. Where it is given, each case's value is the effect in the
            sentence's favour, and a cell (the cases of one `where`) is judged by the 95 % interval of the
            mean over seeds.
    """

    says: str
    condition: str = ""
    hypothesis: str = ""
    smallest: float | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of the table.

    Attributes:
        id: such as A7; its letter is the group.
        sources: where it is said.
        sentence: what is said.
        says_zh: the sentence in Chinese, as the first source has it; "" for a claim that no text makes.
        asks: what is measured, and what figure the sentence asks for.
        kind: whether one counter-example refutes it.
        parts: sentences that belong to it and get verdicts of their own, by name.
        alone: whether nothing else may run beside it (it takes times or memory).
        has_long: whether it has a long form.
        measure: the function.
    """

    id: str
    sources: tuple[Source, ...]
    sentence: Sentence
    says_zh: str = ""
    asks: str
    kind: Kind = Kind.LAW
    parts: Mapping[str, Sentence] = field(default_factory=lambda: MappingProxyType({}))
    alone: bool = False
    has_long: bool = False
    measure: "Callable[[Setup], Evidence]" = field(repr=False)

    @property
    def group(self) -> str:
        """A, B or C."""
        return self.id[0]

    @property
    def number(self) -> int:
        """Number within the group."""
        return int(self.id[1:])

    @property
    def has_condition(self) -> bool:
        """True where a condition of ours has to be confirmed."""
        return any(sentence.condition for sentence in (self.sentence, *self.parts.values()))

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
    asks: str,
    condition: str = "",
    hypothesis: str = "",
    smallest: float | None = None,
    kind: Kind = Kind.LAW,
    parts: Mapping[str, str | Sentence] | None = None,
    alone: bool = False,
    has_long: bool = False,
    said: Said | None = None,
) -> "Callable[[Callable[[Setup], Evidence]], Callable[[Setup], Evidence]]":
    """Make the function under it the claim `id`; see `Claim` and `Sentence` for the rest.

    A part without a condition, hypothesis or smallest effect is given as text alone. The sentence and its
    sources are those of `sentences.toml`, or `said` for a claim that no text makes.

    Raises:
        ValueError: no `said`, and no table `id` in `sentences.toml`.
    """
    words = said or said_of(id)
    sentences = {
        name: part if isinstance(part, Sentence) else Sentence(part) for name, part in (parts or {}).items()
    }

    def enter(measure: "Callable[[Setup], Evidence]") -> "Callable[[Setup], Evidence]":
        assert id not in CLAIMS, f"two claims {id}"
        assert words.sources, f"claim {id} has no source"
        CLAIMS[id] = Claim(
            id=id,
            sources=words.sources,
            sentence=Sentence(words.says, condition, hypothesis, smallest),
            says_zh=words.zh,
            asks=asks,
            kind=kind,
            parts=MappingProxyType(sentences),
            alone=alone,
            has_long=has_long,
            measure=measure,
        )
        return measure

    return enter
