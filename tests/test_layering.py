"""The rooms are layered: a room imports from rooms above it in this list, never from one below."""

import ast
from pathlib import Path

import pytest

import normscope

ROOMS = [
    *("errors", "option_values", "atomic", "database", "checks", "interrupts", "timing", "collecting"),
    *("schemas", "notebook", "doctor", "starter", "completion"),
    *("linalg", "kernels", "nn", "subjects", "anatomy"),
    "fusing",
    *("train", "planning", "probes"),
    *(
        "forecast",
        "rules",
        "report",
        "recording",
        "pipeline",
        "capture",
        "maps",
        "monitor",
        "compare",
        "testing",
        "claims",
        "demo",
        "cli",
    ),
]
PACKAGE = Path(normscope.__file__).parent
DOORS = {"__init__.py", "__main__.py"}  # the two ways in stand above all rooms
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in DOORS)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(source: str) -> set[str]:
    """Rooms of ours that a source imports, anywhere in it."""
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [node.module or ""]
            if node.module == "normscope":
                names = [f"normscope.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("normscope.")}
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_room_imports_from_below(path: Path) -> None:
    room = room_of(path)
    below = {
        other
        for other in imported_rooms(path.read_text()) - {"__version__"}
        if ROOMS.index(other) > ROOMS.index(room)
    }
    assert not below, f"{room} may not import from {sorted(below)}"


def test_every_file_stands_in_a_known_room() -> None:
    assert {room_of(path) for path in FILES} <= set(ROOMS)


def test_the_reader_of_imports_sees_both_forms() -> None:
    assert imported_rooms("import normscope.cli\ndef f():\n    from normscope import maps") == {"cli", "maps"}
