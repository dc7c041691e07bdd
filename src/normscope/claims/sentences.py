"""Sentences that the claims test, with their parts, places and criteria: `sentences.toml`."""

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from normscope.claims.plots import Line, Plot
from normscope.claims.sources import Source


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
        of: name of the population that the cases are ("real blocks"), so that "met in N of M" says something;
            "" where they are only a list of ours.
        condition_zh, hypothesis_zh: the condition and the hypothesis in Chinese, for the Chinese page.
    """

    says: str
    condition: str = ""
    hypothesis: str = ""
    smallest: float | None = None
    of: str = ""
    condition_zh: str = ""
    hypothesis_zh: str = ""


@dataclass(frozen=True, kw_only=True)
class Said:
    """A table of `sentences.toml`.

    Attributes:
        sources: where it is said.
        sentence: what is said.
        says_zh: the sentence in Chinese, as the first source has it; "" for a claim that no text makes.
        asks: what is measured, and what figure the sentence asks for.
        kind: whether one counter-example refutes it.
        parts: sentences that belong to it and get verdicts of their own, by name.
        plots: titles, axes and levels of its plots, as `Plot` takes them; see `plots`.
    """

    sources: tuple[Source, ...]
    sentence: Sentence
    says_zh: str = ""
    asks: str
    kind: Kind = Kind.LAW
    parts: Mapping[str, Sentence] = field(default_factory=lambda: MappingProxyType({}))
    plots: tuple[Mapping[str, Any], ...] = ()


def said_of(id: str) -> Said:
    """The table of the claim `id`.

    Raises:
        ValueError: the file has none.
    """
    if id not in sentences():
        raise ValueError(f"claim {id} has no sentence: add a table [{id}] to claims/sentences.toml")
    return sentences()[id]


@functools.cache
def sentences() -> Mapping[str, Said]:
    """All of `sentences.toml`, by claim."""
    return read_sentences((files("normscope.claims") / "sentences.toml").read_text(encoding="utf-8"))


def read_sentences(toml: str) -> dict[str, Said]:
    """Tables of a TOML text, by claim; a key that is missing or unknown is a TypeError."""
    return {id: _said(**table) for id, table in tomllib.loads(toml).items()}


def _said(
    *,
    says: str,
    zh: str,
    asks: str,
    sources: Sequence[Sequence[str]],
    kind: str = Kind.LAW,
    parts: Mapping[str, str | Mapping[str, Any]] = MappingProxyType({}),
    plots: Sequence[Mapping[str, Any]] = (),
    of: str = "",
    **own: Any,
) -> Said:
    """A table's values; a part is its text, or a table with its condition, hypothesis or smallest effect."""
    named = {name: {"says": part} if isinstance(part, str) else {**part} for name, part in parts.items()}
    return Said(
        sources=tuple(Source(*place) for place in sources),
        sentence=Sentence(says, of=of, **own),
        says_zh=zh,
        asks=asks,
        kind=Kind(kind),
        parts=MappingProxyType({name: Sentence(**({"of": of} | part)) for name, part in named.items()}),
        plots=tuple(plots),
    )


def plots(id: str, *lines: Sequence[Line]) -> list[Plot]:
    """Plots of the claim `id`, one for each list of lines, under the titles in `sentences.toml`."""
    return [Plot(lines=each, **words) for words, each in zip(said_of(id).plots, lines, strict=True)]
