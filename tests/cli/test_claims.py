"""`normscope claims`: choice of claims, forms and exit status."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from normscope.claims import Setup, measure_claim, run_claims
from normscope.claims.cache import Cache, default_folder
from normscope.claims.registry import chosen
from normscope.claims.result import ClaimResult as Outcome
from normscope.cli import claims as cli_claims
from normscope.cli.main import run

ONE = Setup(seeds=(0,))
FORMATS = ("text", "json", "html", "markdown")


@pytest.fixture(scope="module")
def tested() -> Outcome:
    """Claim A1, with one seed."""
    return measure_claim(chosen(["A1"])[0], ONE)


@pytest.fixture
def known(tested: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """The same claim again, from the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Cache(default_folder()).write(tested, ONE)
    return tested


def test_json_has_what_is_asked_for(known: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["claims", "a1", "A1", "--seeds", "1", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    (claim,) = json.loads(out)["claims"]
    assert claim["id"] == "A1"
    assert claim["verdict"] == "holds"
    assert claim["figure"]["value"] < 1e-10
    assert claim["condition"] is None
    assert claim["seconds"] > 0
    assert claim["cached"] is True


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_goes_to_a_file(
    format: str, known: Outcome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out"
    assert run(["claims", "A1", "--seeds", "1", "--format", format, "-o", str(path)]) == 0
    assert capsys.readouterr().out == ""
    text = path.read_text(encoding="utf-8")
    assert "A1" in text
    assert "holds" in text
    assert text.endswith("\n")


def test_markdown_of_ids_is_only_the_table(known: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["claims", "A1", "--seeds", "1", "--format", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("| [A1](docs/claims.md#a1) | ")


def test_the_list_needs_no_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["claims", "A", "--list"]) == 0
    assert capsys.readouterr().out.startswith("A1   The Jacobian of LayerNorm")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["A0"], 'claim "A0"'),
        (["A1", "--long"], "--long with A1"),
        (["A1", "--seeds", "0"], "--seeds"),
        (["A1", "--jobs", "0"], "--jobs"),
        (["A1", "--format", "pdf"], "--format"),
        (["A1", "-o", "/not/there/x.json"], "--output"),
        (["A1", "--text", "/not/there.txt"], "not found"),
    ],
)
def test_what_cannot_be_done_is_one_line_before_the_work(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["claims", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("size", "words"), [(0, "empty"), (100, "100 bytes")])
def test_a_text_that_cannot_be_trained_on_is_refused(
    size: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a" * size)
    assert run(["claims", "A1", "--text", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_ctrl_c_shows_what_is_ready_and_exits_130(
    known: Outcome, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **options: object) -> list[Outcome]:
        options["on_ready"](known)  # type: ignore[operator]
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    monkeypatch.setattr("normscope.claims.run_claims", interrupted)
    assert run(["claims", "A1", "--seeds", "1", "--format", "json"]) == 130
    out, err = capsys.readouterr()
    assert [claim["id"] for claim in json.loads(out)["claims"]] == ["A1"]
    assert err == "normscope: interrupted after 1 of 1 claims\n"


def test_a_claim_that_broke_exits_1(
    known: Outcome, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object, **options: object) -> None:
        import dataclasses

        options["on_ready"](dataclasses.replace(known, error="it broke"))  # type: ignore[operator]

    monkeypatch.setattr("normscope.claims.run_claims", broken)
    assert run(["claims", "A1"]) == 1


def test_a_cache_that_cannot_be_written_is_one_line_of_warning(
    tested: Outcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("normscope.claims.worker.Worker.measure", lambda worker, claim: tested)
    assert run(["claims", "A1", "--seeds", "1"]) == 0
    out, err = capsys.readouterr()
    assert "holds" in out
    assert err.count("\n") == 1
    assert "nothing is kept" in err


def test_the_bar_says_what_runs_and_how_many_are_done() -> None:
    told: list[tuple[str, int, int]] = []
    show = cli_claims._counted(lambda *words: told.append(words))
    show("A7 B3", 12, 75)
    show("", 75, 75)
    assert told == [("12 of 75 done, A7 B3 running", 12, 75), ("75 of 75 done", 75, 75)]


def test_what_is_known_needs_neither_matplotlib_nor_a_worker(tmp_path: Path) -> None:
    """Runs in a new process, because this one has imported everything."""
    script = (
        "import sys\n"
        "from normscope.claims import Setup, chosen, measure_claim\n"
        "from normscope.claims.cache import Cache, default_folder\n"
        "setup = Setup(seeds=(0,))\n"
        "Cache(default_folder()).write(measure_claim(chosen(['A1'])[0], setup), setup)\n"
        "from normscope.cli.main import run\n"
        "status = run(['claims', 'A1', '--seeds', '1', '--format', 'json'])\n"
        "heavy = {'matplotlib', 'jinja2', 'transformers', 'ray', 'sklearn'} & set(sys.modules)\n"
        "print(status, sorted(heavy), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stderr == "0 []\n"
    assert json.loads(done.stdout)["claims"][0]["cached"] is True


def test_a_claim_that_counts_bytes_prints_nothing_on_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (result,) = run_claims(chosen(["C30"]), ONE, cache=tmp_path)
    assert result.error is None
    assert capfd.readouterr().err == "", "torch's profiler reports its stages there"


def test_run_claims_of_nothing_is_nothing(tmp_path: Path) -> None:
    assert run_claims([], ONE, cache=tmp_path) == []
