"""The five texts whose claims are tested, and where in them a claim stands."""

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Text:
    """One of the sources: its number, its own title, and a description in English."""

    id: str
    title: str
    english: str


_TEXTS = tomllib.loads((files("normscope.claims") / "texts.toml").read_text(encoding="utf-8"))
TEXTS: dict[str, Text] = {id: Text(id, **table) for id, table in _TEXTS.items()}


@dataclass(frozen=True)
class Source:
    """A place in a text.

    Attributes:
        text: its number, a key of `TEXTS`.
        where: theorem, equation or section, as the text counts them: "Theorem 2.2", "§5.3.2", "(13)–(14)".
        words: the claim's own words, a phrase to find it by.
    """

    text: str
    where: str
    words: str = ""

    @property
    def anchor(self) -> str:
        """Anchor of the place on a page: 000-theorem-2-2; Chinese headings keep their letters."""
        return f"{self.text}-" + re.sub(r"[^0-9a-z\u4e00-\u9fff]+", "-", self.where.lower()).strip("-")
