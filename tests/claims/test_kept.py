"""Long results that are kept with the package, shown beside the short ones."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from normscope.claims import CLAIMS, Claim, Setup, kept, measure_claim
from normscope.claims.kept import kept_long, machine_words
from normscope.claims.page import render_page
from normscope.claims.words import in_full, kept_words, to_json

SHORT, LONG = Setup(seeds=(0, 1)), Setup(seeds=(0, 1, 2), long=True)
COMMAND = "normscope claims --long --format json"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package's folder as far as `kept` sees it; `long.json` is not in it."""
    monkeypatch.setattr(kept, "PATH", tmp_path / "claims-long.json")
    kept.kept_document.cache_clear()
    yield tmp_path
    kept.kept_document.cache_clear()


@pytest.fixture
def long_result(folder: Path, odd: dict[str, Claim]) -> Path:
    """`long.json` as the command writes it, of Z1 and of Z4, which could not be measured."""
    tested = [measure_claim(odd[id], LONG) for id in ("Z1", "Z4")]
    path = kept.PATH
    path.write_text(to_json(tested, LONG, COMMAND, 100.0), encoding="utf-8")
    return path


def test_nothing_is_kept_where_there_is_no_file(folder: Path, odd: dict[str, Claim]) -> None:
    assert kept_long(odd["Z1"]) is None


def test_a_kept_result_says_what_when_where_and_how(long_result: Path, odd: dict[str, Claim]) -> None:
    found = kept_long(odd["Z1"])
    assert found is not None
    assert found.is_current
    assert found.command == COMMAND
    assert kept_words(found) == "holds: largest <error>: 1.5 (0.5 … 2.5)"
    assert kept_long(odd["Z2"]) is None, "has none"
    assert kept_long(odd["Z4"]) is None, "could not be measured"


def test_it_stands_in_json_in_full_on_the_page_and_in_markdown(
    long_result: Path, odd: dict[str, Claim]
) -> None:
    tested = [measure_claim(odd["Z1"], SHORT)]
    shown = json.loads(to_json(tested, SHORT, "normscope claims", 1.0))["claims"][0]["kept_long"]
    assert shown["verdict"] == "holds"
    assert shown["command"] == COMMAND
    assert shown["current"] is True
    assert shown.keys() >= {"figure", "condition", "date", "machine", "seconds"}
    for text in (
        "\n".join(in_full(tested[0])),
        render_page("claims.html", tested, SHORT, "", 1.0),
        render_page("claims.md", tested, SHORT, "", 1.0),
    ):
        assert "1.5 (0.5 … 2.5)" in text
        assert COMMAND in text


def test_a_long_run_does_not_show_an_older_one(long_result: Path, odd: dict[str, Claim]) -> None:
    tested = [measure_claim(odd["Z1"], LONG)]
    assert json.loads(to_json(tested, LONG, "", 1.0))["claims"][0]["kept_long"] is None
    assert COMMAND not in "\n".join(in_full(tested[0]))


def test_a_result_of_other_code_says_so(long_result: Path, odd: dict[str, Claim]) -> None:
    given = json.loads(long_result.read_text(encoding="utf-8"))
    given["claims"][0]["digest"] = "0" * 16
    long_result.write_text(json.dumps(given), encoding="utf-8")
    found = kept_long(odd["Z1"])
    assert found is not None
    assert not found.is_current
    assert kept_words(found).endswith("(measured by an earlier version of the code)")


def test_a_machine_in_words() -> None:
    machine = {
        "processor": "AMD EPYC",
        "cores": "2",
        "python": "3.11.7",
        "torch": "2.13.0+cpu",
        "cuda": "none",
    }
    assert machine_words(machine) == "AMD EPYC, 2 cores, Python 3.11.7, torch 2.13.0"
    gpu = machine | {"cores": "1", "cuda": "NVIDIA H200"}
    assert machine_words(gpu) == "AMD EPYC, 1 core, Python 3.11.7, torch 2.13.0, NVIDIA H200"


def test_what_the_package_keeps_is_of_claims_that_have_a_long_form() -> None:
    for result in kept.kept_document().get("claims", ()):
        assert result["long"]
        assert CLAIMS[result["id"]].has_long
