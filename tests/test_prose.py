"""Prose that a program can judge: docstrings begin with what the thing is, and no text uses words of ours."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAGMENT = re.compile(r"(of|what|those|that|where|by|how)\b", re.IGNORECASE)
INSTEAD = {
    r"foretell|foretold": "predict",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"comes? of (it|them|this|that)\b": "results from",
    r"own say\b": "(say what differs)",
    r"\btold apart\b|\btell apart\b": "distinguish",
    r"are as they sound": "(a table)",
    r"below sight": "missed by this check",
    r"\bfound out\b": "detected",
    r"\bis for \S+( \S+)? to (say|tell)": "(name who decides)",
    r"\bnobody (types|says|reads)": "(say who does it)",
    r"looks? well\b": "raises no alarm",
}
"""Words of ours → the field's words."""


def texts() -> Iterator[Path]:
    """Files that people read as prose: pages, sources, templates, data with sentences."""
    yield from ROOT.glob("*.md")
    for folder, endings in (
        ("docs", ("md",)),
        ("src", ("py", "html", "md", "toml")),
        ("benchmarks", ("py",)),
    ):
        for ending in endings:
            yield from (ROOT / folder).rglob(f"*.{ending}")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of a source: of modules, classes, functions, and of constants."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, documented):
            for child in node.body:
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                    yield child.lineno, str(child.value.value)


def unclear(text: str) -> list[str]:
    """The words of a text that have a better one."""
    return [found.group() for pattern in INSTEAD for found in re.finditer(pattern, text, re.IGNORECASE)]


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "docs"])
def test_no_docstring_begins_with_a_fragment(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {text.splitlines()[0]}"
        for path in (ROOT / folder).rglob("*.py")
        for line, text in docstrings(path)
        if FRAGMENT.match(text.strip())
    ]
    assert found == []


def test_texts_use_the_words_of_the_field() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number} {words}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (words := unclear(line))
    ]
    assert found == [], "; ".join(f"{ours} → {better}" for ours, better in INSTEAD.items())


def test_the_judge_notices(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        '"""A module."""\n\nX = 1\n"""Of what X is."""\n\n\ndef f():\n    """What f does."""\n', "utf-8"
    )
    assert [line for line, text in docstrings(source) if FRAGMENT.match(text)] == [4, 8]
    assert unclear("It foretells what can be mended.") == ["foretell", "mended"]
    assert unclear("Amendments recommend a mending-free fix") == ["mending"]
