"""Wheel and sdist: what they hold, their size and metadata, and that an installed wheel works.

`make dist` sets NORMSCOPE_DIST to the folder of the packages to be released; without it, they are built here.
"""

import email.message
import email.parser
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import normscope

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MOST_BYTES = 1_800_000  # source and a few texts; a wheel of 1.7 MB holds 4.3 MB of them
MOST_BYTES_OF_A_FILE = 100_000  # of data: kept figures of benchmarks are larger, templates are not
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
IN_THE_ROOT = {
    *("PKG-INFO", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", ".gitignore")
}
USE = """
import sys
from pathlib import Path

import normscope
from normscope.cli.main import run

assert Path(normscope.__file__).is_relative_to(sys.argv[1]), normscope.__file__
model = "nn:decoder,depth=1,width=16,heads=2"
for call in (
    ["schemes", "deepnorm"],
    ["explain", "NS101"],
    ["check", model, "--steps", "2", "--fail-on", "never", "--format", "html", "--output", "page.html"],
    ["check", model, "--steps", "0", "--fail-on", "never", "--format", "json", "--output", "report.json"],
    ["claims", "--list"],
):
    assert run(call) == 0, call
assert run(["bench"]) == 2
"""
"""Templates, tables and schemas are read when they are used: a wheel that lacks one imports all the same."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that holds one wheel and one sdist."""
    if given := os.environ.get("NORMSCOPE_DIST"):
        return ROOT / given
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    (path,) = dist.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def sdist(dist: Path) -> tarfile.TarFile:
    (path,) = dist.glob("*.tar.gz")
    return tarfile.open(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (path,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.parser.Parser().parsestr(wheel.read(path).decode("utf-8"))


def test_both_are_small(dist: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in dist.iterdir()}
    assert len(sizes) == 2
    assert max(sizes.values()) < MOST_BYTES, sizes


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"normscope", f"normscope-{normscope.__version__}.dist-info"}
    assert "normscope/py.typed" in wheel.namelist()


def test_the_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "src/normscope"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a checkout")
    tracked = {name.removeprefix("src/") for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    assert len(tracked) > 200
    assert tracked <= set(wheel.namelist())


def test_no_kept_figures_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    """Benchmarks compare against figures that were kept; nobody who installs normscope needs those."""
    data = {info.filename: info.file_size for info in wheel.infolist() if not info.filename.endswith(".py")}
    large = {name: size for name, size in data.items() if size > MOST_BYTES_OF_A_FILE}
    assert not large
    assert not [name for name in data if "truth" in name or name.endswith((".jsonl", ".png", ".sqlite"))]


def test_the_sdist_holds_the_source_and_no_tests_or_docs(sdist: tarfile.TarFile) -> None:
    names = [Path(*Path(name).parts[1:]) for name in sdist.getnames()]
    assert {name.parts[0] for name in names} - {"src"} <= IN_THE_ROOT
    assert {name.parts[1] for name in names if name.parts[0] == "src"} == {"normscope"}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"} <= set(map(str, names))


def test_metadata(metadata: email.message.Message) -> None:
    assert metadata["Name"] == "normscope"
    assert metadata["Version"] == normscope.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Description-Content-Type"] == "text/markdown"
    classifiers = metadata.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    named = re.findall(r"^Programming Language :: Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE)
    assert tuple(named) == VERSIONS


def test_dependencies_are_those_of_pyproject_and_have_no_upper_bound(metadata: email.message.Message) -> None:
    """A new torch must install beside an old normscope."""
    required = metadata.get_all("Requires-Dist") or []
    plain = [name for name in required if "extra ==" not in name]
    assert sorted(plain) == sorted(PROJECT["dependencies"])
    assert not [name for name in plain if "<" in name or "==" in name]
    assert "torch>=2.8" in plain


def test_the_extras_are_those_of_pyproject(metadata: email.message.Message) -> None:
    assert set(metadata.get_all("Provides-Extra") or []) == set(PROJECT["optional-dependencies"])


def test_an_installed_wheel_works(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    place = tmp_path / "site"
    wheel.extractall(place)  # as an installer does with a wheel of pure Python
    environment = os.environ | {"PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", USE, str(place)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("normscope: the installed package holds no benchmarks")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["schema"].startswith(
        "normscope."
    )
