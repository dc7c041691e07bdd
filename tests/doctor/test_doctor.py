"""normscope doctor: what is there, what is missing, and a status that says whether normscope can be used."""

import json
import re
import sys
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest
import torch

from normscope.cli.main import run
from normscope.doctor import diagnose, machine, packages, text_diagnosis
from normscope.doctor.packages import PACKAGES, look_up

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Versions to pretend; None for a package that is not there."""
    pretended: dict[str, str | None] = {}
    real = packages.version

    def version(name: str) -> str:
        found = pretended.get(name, "")
        if found is None:
            raise PackageNotFoundError(name)
        return found or real(name)

    monkeypatch.setattr(packages, "version", version)
    return pretended


def test_this_machine_has_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert f"torch         {torch.__version__}" in shown
    assert f"{torch.get_num_threads()} threads" in shown
    assert "No forecast was measured on a GPU" in shown
    assert shown.splitlines()[-1].startswith("Everything")


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--format", "json", "-o", str(tmp_path / "doctor.json")]) == 0
    assert capsys.readouterr().out == ""
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["schema"] == "normscope.doctor/1"
    assert found["problems"] == []
    assert [each["name"] for each in found["packages"]] == [each.name for each in PACKAGES]


def test_a_missing_optional_package_disables_something(
    installed: dict[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    installed |= {"ray": None, "pyarrow": "3.0"}
    assert run(["doctor"]) == 0
    shown = capsys.readouterr().out
    expected = (
        'ray           missing; without it: no normscope map --engine ray; pip install "normscope[ray]"'
    )
    assert expected in shown
    assert (
        "pyarrow       3.0, too old (expected 18 or newer); without it: no normscope map --parquet" in shown
    )
    assert shown.splitlines()[-1] == "Everything needed is there; without ray, pyarrow, see above."


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, "scipy missing; pip install"),
        ("1.9.3", "scipy 1.9.3, too old (expected 1.11 or newer); pip install"),
    ],
)
def test_a_needed_package_that_does_not_fit_is_a_problem(
    version: str | None, words: str, installed: dict[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    installed["scipy"] = version
    assert run(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert f'problem: {words} "scipy>=1.11"' in shown
    assert shown.splitlines()[-1] == "normscope cannot be used until the problems above are fixed."


def test_a_package_that_cannot_be_imported_is_broken() -> None:
    def broken(name: str) -> ModuleType:
        raise OSError(f"lib{name}.so: cannot open shared object file")

    torch_, transformers = PACKAGES[0], next(each for each in PACKAGES if each.extra)
    found = look_up(torch_, broken)
    assert (found["status"], found["reason"]) == (
        "broken", "OSError: libtorch.so: cannot open shared object file"
    )  # fmt: skip
    assert look_up(transformers, broken)["status"] == "ok", (
        "an optional one is not imported: it takes seconds"
    )


def test_without_torch_the_rest_is_still_shown(installed: dict[str, str | None]) -> None:
    installed |= {"torch": None, "matplotlib": None}
    diagnosis = diagnose()
    assert diagnosis["devices"] is None
    assert len(diagnosis["problems"]) == 2
    assert "terminal" in text_diagnosis(diagnosis)


def test_a_driver_that_breaks_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    diagnosis = diagnose()
    assert diagnosis["devices"] is None
    assert diagnosis["problems"] == [
        "devices cannot be read (RuntimeError: driver too old): check the drivers"
    ]


def test_accelerators_are_listed_with_what_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("Properties", (), {"name": "Big GPU", "total_memory": 80 * 2**30})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    shown = text_diagnosis(diagnose())
    assert shown.count("Big GPU, 80 GiB. No forecast was measured on a GPU") == 2
    assert "cuda:1" in shown


def test_asking_for_denormals_leaves_the_setting() -> None:
    tiny = torch.tensor(1e-40)
    machine.flush_denormal()
    assert float(tiny * 1) > 0


def test_temporary_files_that_cannot_be_written_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    diagnosis = diagnose()
    assert diagnosis["temporary"] is None
    assert diagnosis["problems"] == ["temporary files cannot be written: set TMPDIR to a folder that can be"]
    assert "temporary     no folder can be written" in text_diagnosis(diagnosis)


def test_an_old_terminal_spells_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    latin = type("Latin", (), {"encoding": "latin-1"})
    monkeypatch.setattr(sys, "stdout", latin())
    terminal = machine.terminal()
    monkeypatch.undo()
    assert terminal == {"encoding": "latin-1", "unicode": False}
    diagnosis = {**diagnose(), "terminal": terminal}
    assert "latin-1: signs that it lacks are spelled out" in text_diagnosis(diagnosis)


def test_the_packages_are_those_of_the_project() -> None:
    def stated(requirement: str) -> tuple[str, str]:
        name, _, minimum = requirement.partition(">=")
        return name, minimum

    needed, optional = ([each for each in PACKAGES if bool(each.extra) is flag] for flag in (False, True))
    assert {(each.name, each.minimum) for each in needed} == set(map(stated, PROJECT["dependencies"]))
    extras = PROJECT["optional-dependencies"]
    for each in optional:
        assert (each.name, each.minimum) in set(map(stated, extras[each.extra]))
    features = set(extras) - {"dev", "docs"}
    assert features == {each.extra for each in optional}, "every extra is diagnosed"


def test_the_page_shows_the_labels_of_the_command() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    example = page.partition("```text\n")[2].partition("```")[0]
    labels = set(re.findall(r"^  (\S+)", example, flags=re.MULTILINE)) - {"…"}
    assert labels <= set(re.findall(r"^  (\S+)", text_diagnosis(diagnose()), flags=re.MULTILINE))
