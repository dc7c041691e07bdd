"""Factories in packages: relative imports, `src/` layouts, missing modules."""

import sys
from pathlib import Path

import pytest

from normscope.errors import UsageError
from normscope.subjects import load

BLOCKS = "from torch import nn\n\n\ndef made():\n    return nn.Linear(4, 4)\n"


def package(folder: Path, name: str, *, imports: str, init: bool = True) -> Path:
    """Write a package with `blocks.py`, and `model.py`, which imports it; return the latter."""
    (folder / name).mkdir(parents=True)
    if init:
        (folder / name / "__init__.py").touch()
    (folder / name / "blocks.py").write_text(BLOCKS)
    (folder / name / "model.py").write_text(f"{imports}\n\n\ndef build():\n    return made()\n")
    return folder / name / "model.py"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("folder", [".", "src", "a folder/src"])
@pytest.mark.parametrize("init", [True, False])
def test_a_file_of_a_package_may_have_relative_imports(
    tmp_path: Path, folder: str, init: bool, request: pytest.FixtureRequest
) -> None:
    name = f"relative_{abs(hash(request.node.name))}"
    path = package(tmp_path / folder, name, imports="from .blocks import made", init=init)
    assert load(f"{path.relative_to(tmp_path)}:build").model.in_features == 4


def test_a_file_of_a_package_may_import_the_package(tmp_path: Path) -> None:
    package(tmp_path / "src", "absolute_one", imports="from absolute_one.blocks import made")
    assert load("src/absolute_one/model.py:build").model.in_features == 4


def test_a_package_below_src_has_its_name(tmp_path: Path) -> None:
    package(tmp_path / "src", "below_src", imports="from .blocks import made")
    assert load("below_src.model:build").model.in_features == 4


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    package(tmp_path, "lacking", imports="from no_such_package import made")
    with pytest.raises(UsageError, match="install no_such_package or fix the import"):
        load("lacking/model.py:build")
