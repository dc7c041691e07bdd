"""A random third of the claims is confirmed without normscope: the draw, and that nothing is imported."""

import ast
import json
import random
import re
from pathlib import Path

import pytest

from normscope.claims import in_order

FOLDER = Path(__file__).parent / "independent"
FILES = sorted(FOLDER.glob("*.py"))
DRAWN = json.loads((FOLDER / "drawn.json").read_text(encoding="utf-8"))


def test_the_draw_is_random_and_of_all_claims() -> None:
    ids = sorted(claim.id for claim in in_order())
    assert DRAWN["drawn"] == sorted(random.Random(13).sample(ids, len(ids) // 3))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_there_imports_normscope(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert names
    assert not [name for name in names if name.partition(".")[0] in ("normscope", "importlib")]
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))


def test_every_drawn_claim_is_confirmed_or_listed_as_not() -> None:
    tested = {
        found.upper()
        for file in FILES
        for found in re.findall(r"^def test_([abc]\d+)_", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert set(DRAWN["drawn"]) - tested == set(DRAWN["not_confirmed"])
