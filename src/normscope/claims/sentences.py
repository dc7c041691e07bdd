"""Sentences of the texts, one a claim, in English and Chinese, and their places: `sentences.toml`."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from normscope.claims.sources import Source


@dataclass(frozen=True)
class Said:
    """Sentence of the texts that a claim tests, in English and Chinese, with its sources.

    Attributes:
        says: in English, as plainly as the text has it.
        zh: in Chinese, as the first source prints it; "" for a claim that no text makes (a test's).
        sources: where it is said.
    """

    says: str
    zh: str
    sources: tuple[Source, ...]


def said_of(id: str) -> Said:
    """The sentence of the claim `id`.

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
    """Tables of a TOML text, by claim; each has `says`, `zh` and `sources`, and no other key."""
    return {
        id: Said(**table | {"sources": tuple(Source(*place) for place in table["sources"])})
        for id, table in tomllib.loads(toml).items()
    }
