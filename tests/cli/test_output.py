"""Terminals of any encoding, and files that cannot be written."""

import io
import json
import os
import sys
from pathlib import Path

import pytest

from normscope.cli import check
from normscope.cli.main import app, run
from normscope.cli.output import emit, format_for, is_of_output, require_writable, spell_out
from normscope.errors import UsageError

SMALL = ["nn:decoder,depth=1,width=16,heads=2", "--batch-size", "2", "--seq-len", "16"]
QUICK = ["check", *SMALL, "--steps", "1", "--budget", "fast"]
COMMANDS = [info.name for info in app.registered_commands]
CALLS = [
    *(["--help"], *([command, "--help"] for command in COMMANDS)),
    *(["schemes"], ["schemes", "--format", "markdown"], ["claims", "--list"], ["anatomy", *SMALL]),
    *(["explain", "NS101"], ["explain", "NS401"], ["check", "hf:gtp2"]),
]
FULL = "/dev/full"
needs_full = pytest.mark.skipif(not Path(FULL).exists(), reason="no file that is always full")


def terminal(monkeypatch: pytest.MonkeyPatch, encoding: str) -> io.BytesIO:
    """Set stdout to a terminal of this encoding and return its bytes; stderr is another one."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True))
    return written


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_every_command_speaks_in_any_encoding(
    call: list[str], encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = terminal(monkeypatch, encoding)
    wanted = 2 if "hf:gtp2" in call else 0
    assert run(call) == wanted
    assert (len(written.getvalue().decode(encoding)) > 40) == (wanted == 0)


def test_letters_are_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    written = terminal(monkeypatch, "ascii")
    spell_out()
    print("σ_max → 1e-3 … √2 é 中 \udcff", end="")
    assert written.getvalue() == b"sigma_max -> 1e-3 ... sqrt2 e ? ?"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_json_keeps_every_character(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = terminal(monkeypatch, encoding)
    spell_out()
    document = {"schema": "normscope.bench/1", "bench": "σé中", "rows": [{"σé中": "…\n"}]}
    emit(json.dumps(document, ensure_ascii=False), None)
    assert json.loads(written.getvalue().decode(encoding)) == document


def test_a_page_is_utf_8_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    written = terminal(monkeypatch, "cp1252")
    spell_out()
    emit('\n<!doctype html><meta charset="utf-8">σ→é', None)
    assert written.getvalue().decode("utf-8").endswith("σ→é")


# Formats ----------------------------------------------------------------------------------------------


def beginning(path: Path) -> str:
    """The format of a file, by its content."""
    text = path.read_text(encoding="utf-8").lstrip()
    return {"<": "html", "{": "json", "[": "json", "#": "markdown"}.get(text[0], "text")


@pytest.mark.parametrize(
    ("call", "endings"),
    [
        (["check", *SMALL, "--steps", "0", "--budget", "fast"], "txt json html HTM md"),
        (["anatomy", *SMALL], "txt json"),
        (["schemes"], "txt json md"),
        (["doctor"], "txt json"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_ending_of_the_file_sets_the_format(call: list[str], endings: str, tmp_path: Path) -> None:
    formats = {"md": "markdown", "txt": "text", "HTM": "html"}
    for ending in endings.split():
        path = tmp_path / f"result.{ending}"
        run([*call, "-o", str(path)])
        assert beginning(path) == formats.get(ending, ending)
    for name in ("result.v2.txt", "result"):
        run([*call, "-o", str(tmp_path / name), "--format", "json"])
        assert beginning(tmp_path / name) == "json", "such a name says no format"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            ["check", "m", "--format", "json", "-o", "r.html"],
            "r.html with --format json: expected a name that ends in .json",
        ),
        (
            ["check", "m", "-o", "r.png"],
            "r.png: expected a name that ends in .txt or .json or .html or .md; change the",
        ),
        (
            ["anatomy", "m", "-o", "r.html"],
            "r.html: expected a name that ends in .txt or .json; change the name.",
        ),
        (
            ["schemes", "--format", "text", "-o", "r.md"],
            "r.md with --format text: expected a name that ends in .txt",
        ),
        (["doctor", "-o", "r.md"], "--output r.md: expected"),
        (["claims", "A1", "--format", "markdown-zh", "-o", "r.html"], "expected a name that ends in .md"),
        (["demo", "-o", "r.json"], "--output r.json: expected a name that ends in .html; change the name."),
        (
            ["map", "--lrs", "1e-3", "-o", "m.md"],
            "--output m.md: expected a name that ends in .html or .json",
        ),
        (["map", "--lrs", "1e-3", "--png", "n.html"], "--png n.html: expected a name that ends in .png"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_name_that_contradicts_the_format_is_refused_before_the_work(
    call: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for work in (
        "subjects.load",
        "subjects.load_to_read",
        "doctor.diagnose",
        "claims.run_claims",
        "maps.run.settings",
    ):
        monkeypatch.setattr(f"normscope.{work}", lambda *given, **more: pytest.fail("the work was begun"))
    assert run(call) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_both_pages_in_markdown_may_end_in_md() -> None:
    formats = ["text", "markdown", "markdown-zh"]
    assert format_for(Path("a.md"), formats) == "markdown"
    assert format_for(Path("a.md"), formats, "markdown-zh") == "markdown-zh"


def test_the_file_goes_before_the_projects_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text('[tool.normscope]\nformat = "json"\n')
    for name, format in (("r.html", "html"), ("r", "json")):
        run(["check", *SMALL, "--steps", "0", "--budget", "fast", "-o", name])
        assert beginning(Path(name)) == format


# Files ------------------------------------------------------------------------------------------------


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_is(tmp_path: Path) -> None:
    there, absent = tmp_path / "there", tmp_path / "absent"
    there.write_text("kept")
    for path in (there, absent, None):
        require_writable(path)
    assert there.read_text() == "kept"
    assert not absent.exists()


@pytest.mark.parametrize("name", [".", "no/such/folder.txt", "x" * 300, "file/below"])
def test_a_path_that_cannot_be_written_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file, not a folder")
    with pytest.raises(UsageError, match=r"-o .*expected a file"):
        require_writable(tmp_path / name, "-o")


@pytest.mark.parametrize(
    "call",
    [
        ["check", *SMALL],
        ["anatomy", *SMALL],
        ["map", "--lrs", "1e-3"],
        ["map", "--lrs", "1e-3", "--png", "p.png"],
    ],
    ids=" ".join,
)
def test_a_path_that_cannot_be_opened_is_noticed_before_the_work(
    call: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, mode: str = "r", *more, **others):
        if "a" in mode:
            raise PermissionError(13, "Permission denied")
        return opened(path, mode, *more, **others)

    opened = Path.open
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "open", refuse)
    for work in ("normscope.subjects.load", "normscope.subjects.load_to_read", "normscope.maps.run.settings"):
        monkeypatch.setattr(work, lambda *given, **more: pytest.fail("the work was begun"))
    assert run([*call, *([] if "--png" in call else ["-o", "page"])]) == 2
    err = capsys.readouterr().err
    assert "(Permission denied): expected a file that can be written" in err
    assert err.count("\n") == 1


@needs_full
@pytest.mark.parametrize("format", ["text", "json", "html"])
def test_a_report_that_cannot_be_written_is_shown(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*QUICK, "--format", format, "-o", FULL]) == 2
    out, err = capsys.readouterr()
    assert "No space left" in err
    assert err.count("\n") == 1
    if format == "json":
        assert json.loads(out)["schema"] == "normscope.report/1"
    else:
        assert out.split()[0] == "healthy,"  # the trial is undecided


@needs_full
def test_a_reading_that_cannot_be_written_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for call in (["anatomy", *SMALL], ["schemes", "pre"]):
        assert run([*call, "-o", FULL]) == 2
        out, err = capsys.readouterr()
        assert "pre" in out
        assert "No space left" in err


@needs_full
@pytest.mark.parametrize(
    "call", [["schemes"], ["--help"], ["anatomy", *SMALL, "--format", "json"]], ids=" ".join
)
@pytest.mark.parametrize("buffering", [1, -1], ids=["by lines", "at the end"])
def test_a_stdout_that_is_full_is_no_bug_of_ours(
    call: list[str], buffering: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(FULL, "w", buffering) as full:  # closing it must not fail: Python does so at exit
        monkeypatch.setattr(sys, "stdout", full)
        assert run(call) == 2
    err = capsys.readouterr().err
    assert err.startswith("normscope: stdout (No space left on device): expected an output that can be")
    assert err.count("\n") == 1


def test_a_reader_that_has_gone_is_no_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # Typer wraps it
    with open(writing, "w", 1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run(["schemes"]) == 2, "1 would mean a finding"
    assert capsys.readouterr().err.startswith("normscope: stdout (Broken pipe): expected an output")


def test_a_closed_stdout_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert run(["anatomy", *SMALL, "--format", "json"]) == 0


def test_a_full_disk_elsewhere_names_the_file() -> None:
    assert is_of_output(OSError(28, "No space left on device"))
    assert not is_of_output(OSError(28, "No space left on device", "cache.json"))
    assert not is_of_output(OSError(2, "No such file or directory"))


def test_a_path_that_breaks_later_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is gone when the report is ready."""
    folder = tmp_path / "gone"
    folder.mkdir()
    show = check.show

    def late(*given) -> None:
        folder.rmdir()
        show(*given)

    monkeypatch.setattr(check, "show", late)
    assert run([*QUICK, "-o", str(folder / "report.txt")]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("healthy")
    assert "see stdout" in err
