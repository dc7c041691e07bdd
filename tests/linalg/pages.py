"""Run the Python code of a page of docs/ and compare its output with the page."""

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"```python\n(.*?)```(.*?)(?=```python\n|\Z)", flags=re.DOTALL)
_SHOWN = re.compile(r"```text\n(.*?)```|^(\|.*?\|)$(?!\n\|)", flags=re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"[-+−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")

ROUND_OFF, HUGE = 1e-9, 1e9
"""Figures below and above these are round-off: the other one must only be outside too."""


@dataclass(frozen=True)
class Piece:
    """A block of code, its output, and the output that the page shows."""

    code: str
    printed: str
    shown: str


def run(page: str) -> list[Piece]:
    """All blocks of docs/`page`, in order, in one namespace."""
    text = (DOCS / page).read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "page"}
    pieces = []
    for code, after in _BLOCK.findall(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        shown = _SHOWN.search(after)
        pieces.append(Piece(code, printed.getvalue(), (shown[1] or shown[2]) if shown else ""))
    return pieces


def difference(printed: str, shown: str) -> str:
    """Differences of two texts beyond rounding: other words, or numbers more than 5 % apart; else empty."""
    lines = printed.strip().splitlines(), shown.strip().splitlines()
    if len(lines[0]) != len(lines[1]):
        return f"{len(lines[0])} lines printed, {len(lines[1])} shown"
    for one, other in zip(*lines, strict=True):
        words = [" ".join(_NUMBER.sub(" # ", line).split()) for line in (one, other)]
        numbers = [[float(x.replace("−", "-")) for x in _NUMBER.findall(line)] for line in (one, other)]
        if words[0] != words[1] or not all(map(_close, *numbers)):
            return f"printed: {one}\nshown:   {other}"
    return ""


def _close(one: float, other: float) -> bool:
    if min(abs(one), abs(other)) > HUGE or max(abs(one), abs(other)) < ROUND_OFF:
        return True
    return abs(one - other) <= 0.02 + 0.05 * abs(other)
