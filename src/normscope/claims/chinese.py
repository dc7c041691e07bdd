"""The claims in Chinese: the sentences of the sources, and the page's own words, from `chinese.toml`."""

import functools
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


@functools.cache
def chinese() -> Mapping[str, Any]:
    """All of `chinese.toml`: `says` by claim, and `words` of the page."""
    return tomllib.loads((files("normscope.claims") / "chinese.toml").read_text(encoding="utf-8"))


def says_zh(id: str) -> str:
    """The Chinese sentence of a claim, "" for one that no source has (a test's)."""
    said: Mapping[str, str] = chinese()["says"]
    return said.get(id, "")
