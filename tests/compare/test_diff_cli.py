"""`normscope diff` on the command line: exit status, formats, options, Ctrl-C."""

import html
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from repository import repository

import normscope
from normscope.cli.main import run
from normscope.compare import Compared, Diff, Part
from normscope.compare import compare as room

PRE = "nn:decoder,scheme=pre,depth=2,width=16,heads=2,vocab=64,context=16"
POST = PRE.replace("pre", "post")
FED = ("--batch-size", "1", "--seq-len", "8")
STRUCTURE = ("--parts", "structure", *FED)


def test_a_difference_is_exit_1_and_none_is_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", PRE, POST, *STRUCTURE]) == 1
    assert "placement" in capsys.readouterr().out
    assert run(["diff", PRE, PRE, *STRUCTURE]) == 0
    out, err = capsys.readouterr()
    assert "No difference" in out
    assert err == ""


@pytest.mark.parametrize(
    ("fail_on", "status"), [("structure", 1), ("structure,recipe", 1), ("never", 0), ("recipe", 2)]
)
def test_fail_on_decides_by_part(fail_on: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["diff", PRE, POST, "--parts", "structure,recipe", "--fail-on", fail_on, *FED]
    assert run(given) == status
    assert ("--fail-on recipe, which was not compared" in capsys.readouterr().err) == (status == 2)


def test_to_fail_on_the_verdict_is_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noted(a: str, b: str, **options: object) -> Diff:
        seen.append(options["check"])
        return Diff(a, b, room.NOTHING, (Compared(Part.VERDICT, "whole"),), ())

    monkeypatch.setattr(normscope, "diff", noted, raising=False)
    for given in ([], ["--fail-on", "structure,verdict"], ["--check"]):
        run(["diff", PRE, POST, *given])
    assert seen == [False, True, True]


def test_nothing_that_was_compared_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", PRE, PRE, "--parts", "recipe", *FED]) == 2
    assert capsys.readouterr().err == "normscope: no part was compared; the reasons stand above\n"


@pytest.mark.parametrize("name", ["diff.json", "diff.html", "diff.md", "diff.txt"])
def test_the_ending_of_output_chooses_the_format(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    assert run(["diff", PRE, POST, *STRUCTURE, "-o", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert str(path) in err
    begin = {"diff.json": "{", "diff.html": "<!", "diff.md": "", "diff.txt": ""}[name]
    assert path.read_text().startswith(begin)
    assert "placement" in path.read_text()


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", PRE, POST, *STRUCTURE, "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "normscope.diff/1"
    assert (found["a"], found["b"]) == (PRE, POST)


def test_defaults_come_from_pyproject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.normscope]\nseq-len = 12\nlr = 0.1\n")
    monkeypatch.chdir(tmp_path)
    seen = {}

    def noted(a: str, b: str, **options: object) -> Diff:
        seen.update(options)
        return Diff(a, b, room.NOTHING, (Compared(Part.STRUCTURE, "whole"),), ())

    monkeypatch.setattr(normscope.compare, "diff", noted, raising=True)
    assert run(["diff", PRE, POST, "--batch-size", "3"]) == 0
    assert (seen["seq_len"], seen["batch_size"], seen["seed"]) == (12, 3, 0)


@pytest.mark.parametrize(
    "given",
    [
        [PRE],
        [PRE, "nn:decodr"],
        [PRE, "hf:no-such-type"],
        [PRE, "missing.json"],
        [PRE, "missing.py:build"],
        [PRE, "git:HEAD:missing.py:build"],
        [PRE, "git:nowhere:model.py:build"],
        [PRE, "git:HEAD:model.py:missing"],
        [PRE, "git:HEAD:model.py:build,wrong=1"],
        [PRE, POST, "--parts", "strucure"],
        [PRE, POST, "--fail-on", "error"],
        [PRE, POST, "--fail-on", "function", "--parts", "structure"],
        [PRE, POST, "--map", "missing.json"],
        [PRE, POST, "--rtol", "2"],
        [PRE, POST, "--dtype", "float31"],
        [PRE, POST, "--device", "gpu"],
        [PRE, POST, "-o", "no/such/folder/x.json"],
        [PRE, POST, "-o", "diff.png"],
        [PRE, ""],
        [PRE, "gpt2"],
    ],
    ids=lambda given: " ".join(given[1:]),
)
def test_what_cannot_be_used_is_one_line_and_exit_2(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(repository(tmp_path / "code"))
    assert run(["diff", *given]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert [line for line in err.splitlines() if not line.startswith("printed")] == [err.splitlines()[-1]]
    assert err.splitlines()[-1].startswith(("normscope: ", "Missing"))
    assert "Traceback" not in err


def test_a_factory_that_fails_in_its_process_shows_its_traceback_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = repository(tmp_path / "code")
    monkeypatch.chdir(folder)
    (folder / "model.py").write_text("from blocks import Missing\n\ndef build(): ...\n")
    assert run(["diff", PRE, "model.py:build"]) == 2
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1
    assert "cannot import name 'Missing'" in err
    assert run(["diff", PRE, "model.py:build", "--traceback"]) == 2
    assert "from blocks import Missing" in capfd.readouterr().err


def test_ctrl_c_shows_what_was_compared_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(run: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(room._PARTS, Part.FUNCTION, interrupted)
    monkeypatch.setitem(room._PARTS, Part.START, lambda run: room.Outcome(Compared(Part.START, "whole")))
    assert run(["diff", PRE, POST, *FED]) == 130
    out, err = capsys.readouterr()
    assert "placement" in out
    assert "interrupted before this part" in " ".join(out.split())
    assert err == "normscope: interrupted; what was compared so far is shown\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_processes_and_removes_the_files(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    folder = repository(tmp_path / "code")
    (folder / "slow.py").write_text(
        "import time\n\n\ndef build():\n    print('in the factory', flush=True)\n    time.sleep(60)\n"
    )
    from repository import git

    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "slow")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "normscope", "diff", "git:HEAD:slow.py:build", PRE]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    assert "in the factory" in process.stderr.readline()
    assert list(temporary.glob("normscope-git-*"))
    if number is signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert "Traceback" not in err
    assert not list(temporary.glob("normscope-git-*"))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _group(process.pid):
        time.sleep(0.1)
    assert not _group(process.pid)


def _group(number: int) -> bool:
    """Whether a process of the group still runs."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_map_with_an_unknown_name_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "map.json").write_text('{"no.such.weight": "head.weight"}')
    assert run(["diff", PRE, PRE, "--map", str(tmp_path / "map.json"), *FED]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "no.such.weight" in err
    assert err.count("\n") == 1


def test_a_part_that_fails_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(run: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setitem(room._PARTS, Part.RECIPE, failing)
    found = normscope.diff(PRE, POST, parts="structure,recipe", batch_size=1, seq_len=8)
    assert [each.how for each in found.parts] == ["whole", "not"]
    assert "a bug" in found.parts[1].why[0]
    with pytest.raises(ValueError, match="a bug"):
        normscope.diff(PRE, POST, parts="structure,recipe", batch_size=1, seq_len=8, reraise=True)


def test_the_command_that_is_shown_repeats_the_comparison(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    run(["diff", PRE, POST, *STRUCTURE, "--seed", "3", "-o", str(path)])
    words = ["normscope", "diff", PRE, POST, "--parts", "structure", "--batch-size", "1"]
    assert shlex.join(words) in html.unescape(re.sub("<.*?>", "", path.read_text()))
