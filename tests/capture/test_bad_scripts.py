"""`check -- COMMAND` with commands that cannot be used, scripts that do odd things, and signals.

Every process costs seconds of processor time for `import torch`, so several oddities share one script.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from normscope.capture import launch
from normscope.capture.folder import Folder, Settings

ODD = Path(__file__).parent / "scripts" / "odd.py"
Shell = Callable[[Sequence[str], Path], subprocess.CompletedProcess[str]]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are listed by /proc")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with `odd.py`; TMPDIR is another one, short enough for sockets (107 characters)."""
    shutil.copy(ODD, tmp_path)
    temporary = tempfile.mkdtemp(prefix="odd-", dir="/tmp")
    monkeypatch.setenv("TMPDIR", temporary)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # PyTorch keeps this one
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield tmp_path
    shutil.rmtree(temporary)


def require_nothing_left() -> None:
    """Fail if a process of the script runs, or a temporary file is there."""
    mark = os.fsencode(f"TMPDIR={os.environ['TMPDIR']}")
    left = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes().split(b"\0"):
                left.append((path / "cmdline").read_bytes())
        except OSError:
            continue
    assert left == []
    assert os.listdir(os.environ["TMPDIR"]) == []


def checked(shell: Shell, here: Path, *words: str) -> tuple[int, str, dict[str, Any]]:
    """Exit status, stderr and report of a check that leaves nothing behind."""
    done = shell(["normscope", "check", "--format", "json", "--budget", "fast", *words], here)
    require_nothing_left()
    return done.returncode, done.stderr, json.loads(done.stdout) if done.stdout else {}


# Words after `normscope check` → what the one line must contain.
REFUSED = [
    ("--", ("without a command", "python train.py")),
    ("-- nosuch --lr 3", ('"nosuch" (not found)',)),
    ("-- ./plain.sh", ("not executable", "python ./plain.sh")),
    ("-- ./binary", ("./binary", "Exec format error")),
    ("-- .", ("a folder",)),
    ("-- missing.py", ('"missing.py" (not found)',)),
    ("-- python -u -X dev missing.py", ('"missing.py" (not found)',)),
    ("-- python -u", ("without a script",)),
    ("-- python -I odd.py", ("python -I", "leave out -I")),
    ("-- python -uE -W ignore -m odd", ("python -E", "leave out -E")),
    ("nn:decoder -- python odd.py", ('MODEL "nn:decoder" and `python odd.py`', "leave one out")),
    ("python odd.py", ('"odd.py" after MODEL "python"', "write --")),
    ("--lr 0.1 -- python odd.py sleeps", ("--lr", "the script's own setting", "`python odd.py sleeps`")),
    ("--steps 0 -- python odd.py sleeps", ("--steps 0", "1 or more")),
    ("--output nosuch/report.md -- python odd.py sleeps", ("nosuch/report.md", "create nosuch")),
]
# The same for commands that are started, but whose processes never import PyTorch.
UNTRAINED = [
    ("-- ls", ("`ls`, which ended with exit status 0", "no Python", "start it with python")),
    ("-- sh -c 'exit 3'", ("exit status 3", "no Python")),
    ("-- sh -c 'kill -9 $$'", ("was ended by SIGKILL",)),
    ("-- sh -c 'python -I -c 0'", ("no Python that loads normscope's hook", "-I, -E and -S")),
    ("-- python -c 0", ("exit status 0 and has not imported PyTorch",)),
    ("-- python -m nosuch", ("exit status 1",)),
    ("-- odd.py early", ("failed with ValueError: no data found before", "--traceback shows where")),
]


@pytest.mark.parametrize(("words", "expected"), REFUSED + UNTRAINED)
def test_a_command_without_training_is_refused_in_one_line(
    words: str, expected: Sequence[str], here: Path, shell: Shell
) -> None:
    (here / "plain.sh").write_text("exit 3\n")
    (here / "binary").write_bytes(b"\x7fELF")
    (here / "binary").chmod(0o700)
    done = shell(["normscope", "check", *shlex.split(words)], here)
    *started, line = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert line.startswith("normscope: ")
    for part in expected:
        assert part in line
    assert (words, expected) in UNTRAINED or started == []
    assert "Traceback" not in done.stderr
    require_nothing_left()


def test_a_script_without_steps_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PATIENCE_SECONDS", 0.1)
    said: list[str] = []
    words = ["python", "-c", "import time; time.sleep(1)"]
    outcome = launch.captured(words, Settings("it"), tell=said.append)
    assert "has not imported PyTorch" in outcome.reason
    assert len(said) == 2
    assert "in 0 s so far; Ctrl-C ends the script" in said[1]


def test_the_scripts_traceback_is_shown_if_asked_for(here: Path, shell: Shell) -> None:
    words = ["normscope", "check", "--quiet-script", "--traceback", "--", "python", "odd.py", "early"]
    done = shell(words, here)
    assert done.returncode == 2
    assert 'raise ValueError("no data' in done.stderr
    assert "--traceback" not in done.stderr.splitlines()[-1]


@LINUX
@pytest.mark.parametrize(
    ("seconds", "reason"),
    [(60.0, "ended with exit status 3 after 3 of 300 steps"), (0.1, "was ended by SIGTERM after 3 of 300")],
)
def test_a_script_that_ends_slowly_is_waited_for(
    seconds: float, reason: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clean-up takes 3 s after the report is there; then it ends with exit status 3."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(launch, "ENDING_SECONDS", seconds)
    monkeypatch.chdir(here)
    said: list[str] = []
    settings = Settings("it", steps=2, rates=(1e-3,), budget="fast")
    outcome = launch.captured(["python", "odd.py", "lingers,exits", "3"], settings, tell=said.append)
    assert outcome.report is not None
    assert outcome.report.ladder is not None
    assert not outcome.is_whole
    assert reason in outcome.reason
    assert any("waiting for the script's exit status" in line for line in said)
    require_nothing_left()


@LINUX
def test_the_exit_status_is_that_of_a_script_that_ends_between_two_looks(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other processes that have ended are reaped; the script is not, because its status would be lost."""
    script = launch._Script(Folder(here))
    script.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with monkeypatch.context() as patch:
        patch.setattr(script.process, "poll", lambda: None)  # it still ran at the look
        while f") Z {os.getpid()} " not in Path(f"/proc/{script.process.pid}/stat").read_text():
            time.sleep(0.01)
        script._is_running()
    assert script.process.wait() == 3


# Oddities → what stderr has to say, the verdict, and the steps that were seen.
SHORT = [
    ("ends 3", "ended with exit status 0 after 3 of 20 steps", "--steps 3", 3),
    ("raises 7", "failed with RuntimeError: the disk is full after 7 of 20 steps", "", 7),
    ("os-exit 6", "ended with exit status 5 after 6 of 20 steps", "", 5),
]


@pytest.mark.parametrize(("words", "line", "more", "seen"), SHORT)
def test_a_script_that_ends_early_is_no_healthy_one(
    words: str, line: str, more: str, seen: int, here: Path, shell: Shell
) -> None:
    status, said, report = checked(shell, here, "--", "python", "odd.py", *words.split())
    assert status == 2
    assert line in said
    assert more in said
    assert "Traceback" not in said
    assert report["verdict"] == "interrupted"
    assert report["forecast"]["outcome"] == "not measured"
    assert report["forecast"]["curve"][-1]["step"] == seen
    assert len(report["anatomy"]["blocks"]) == 2


def test_findings_of_a_script_that_ends_early_decide_the_exit_status(here: Path, shell: Shell) -> None:
    words = ("--fail-on", "warning", "--", "python", "odd.py", "copies,excepthook", "2")
    status, said, report = checked(shell, here, *words)
    assert report["verdict"] == "at risk"
    assert status == 1
    assert "my own hook: the disk\nis full" in said
    assert "ended with exit status 1 after 2 of 20 steps" in said


WHOLE = [
    "catches,workers,prints,ignores",
    "thread,forks,clears",
    pytest.param("daemon,excepthook", marks=LINUX),
    pytest.param("child", marks=LINUX),
    pytest.param("forks-then-trains", marks=[LINUX, pytest.mark.slow]),
    pytest.param("forks-first,workers", marks=[LINUX, pytest.mark.slow]),
]


@pytest.mark.parametrize("odd", WHOLE)
def test_a_script_takes_its_steps_and_is_ended_with_all_of_its_processes(
    odd: str, here: Path, shell: Shell
) -> None:
    command = ["./shell.sh"] if odd == "child" else ["python", "odd.py", odd]
    (here / "shell.sh").write_text(f"#!/bin/sh\npython odd.py {odd}\necho gone on >&2\n")
    (here / "shell.sh").chmod(0o700)
    status, said, report = checked(shell, here, "--", *command)
    assert status == 0, said
    assert report["verdict"] == "healthy"
    assert report["forecast"]["steps"] == 20
    for never in ("Traceback", "gone on", "the parent must not go on", "my own hook", "caught"):
        assert never not in said


NO_STEPS = [
    ("never", ("exit status 0 before an optimizer step", "optimizer.step()")),
    ("toy", ("SGD took 100 steps", "no module", "optimizer of a model's parameters")),
    ("by-hand", ("no torch.optim.Optimizer in 100 backwards from Model", "use torch.optim.SGD")),
    ("bug", ("KeyError: 'a bug'", "(in watcher.py, line", "a bug in normscope")),
]


@pytest.mark.parametrize(("odd", "expected"), NO_STEPS)
def test_a_script_without_steps_of_a_model_ends_with_one_line(
    odd: str, expected: Sequence[str], here: Path, shell: Shell
) -> None:
    status, said, report = checked(shell, here, "--", "python", "odd.py", odd)
    assert (status, report) == (2, {})
    for part in expected:
        assert part in said.splitlines()[-1]
    assert "Traceback" not in said


def test_a_python_without_normscope_is_told(
    here: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for PyTorch is imported, and normscope cannot be; the script's own sitecustomize is run."""
    for name, content in (
        ("torch", "print('imported')"),
        ("normscope", "raise ImportError('no module')"),
        ("sitecustomize", "print('my own site')"),
    ):
        (here / "other" / name).mkdir(parents=True)
        (here / "other" / name / "__init__.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", str(here / "other"))
    status, said, _ = checked(shell, here, "--", "python", "odd.py", "plain")
    assert status == 2
    assert "cannot import normscope (ImportError: no module)" in said
    assert "install normscope there" in said
    assert "my own site" in said


def test_defaults_of_a_project_that_are_not_the_scripts_are_passed_over(here: Path, shell: Shell) -> None:
    (here / "pyproject.toml").write_text(
        "[tool.normscope]\nlr = 0.5\nsteps = 4\nformat = 'markdown'\nquiet-script = true\n"
    )
    command = "normscope check --steps 4 --budget fast --ignore NS103 -- python odd.py copies,prints"
    done = shell([each for each in shlex.split(command) if each not in ("--steps", "4")], here)
    assert done.returncode == 0
    assert "AdamW at 0.001, 4 steps" in done.stdout
    assert f"$ {command}" in done.stdout
    assert "xxx" not in done.stderr


@pytest.mark.parametrize("made", ["no folder", "full"])
def test_a_temporary_folder_that_cannot_be_written(
    made: str, here: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normscope.capture import folder, launch

    def refuse(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    if made == "full":
        monkeypatch.setattr(folder, "write_text", refuse)
    else:
        monkeypatch.setattr(launch.tempfile, "mkdtemp", refuse)
    status, said, _ = checked(shell, here, "--", "python", "odd.py", "sleeps")
    assert status == 2
    line = said.splitlines()[-1]
    assert "temporary files" in line
    assert "No space left on device" in line
    assert "set TMPDIR" in line


# Signals. They need normscope in a process of its own.


def begun(
    here: Path, odd: str, until: str, steps: int = 20, budget: str = "fast", **more: Any
) -> "subprocess.Popen[str]":
    """A check of `odd.py odd`, which has written a line that contains `until` to stderr."""
    words = ["check", "--format", "json", "--budget", budget, "--steps", str(steps), "--", "python", "odd.py"]
    words.append(odd)
    process = subprocess.Popen(
        [sys.executable, "-m", "normscope", *words],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if until in line:
            return process
    raise AssertionError(f"no line with {until!r}")


@LINUX
@pytest.mark.parametrize(
    ("number", "status", "word"),
    [
        (signal.SIGINT, 130, "interrupted; nothing was measured yet"),
        (signal.SIGTERM, 143, "ended by SIGTERM"),
        (signal.SIGHUP, 129, "ended by SIGHUP"),
    ],
)
def test_signals_before_the_training_end_the_script(
    number: signal.Signals, status: int, word: str, here: Path
) -> None:
    before = signal.signal(
        number, signal.SIG_DFL
    )  # a suite under nohup ignores SIGHUP, and so would its children
    try:
        process = begun(here, "sleeps", "asleep")
    finally:
        signal.signal(number, before)
    for _ in range(2):
        process.send_signal(number)
    output, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert word in said
    assert output == ""
    assert "Traceback" not in said
    require_nothing_left()


@LINUX
@pytest.mark.parametrize(
    ("until", "odd"),
    [("measuring", "plain"), ("step 5", "ignores,stdin,stops"), ("step 5", "terminates,stops")],
)
def test_ctrl_c_shows_what_was_measured(until: str, odd: str, here: Path) -> None:
    budget = "standard" if until == "measuring" else "fast"  # so that it still measures when the signal comes
    with open(ODD) as lines:
        process = begun(here, odd, until, budget=budget, stdin=lines)
    process.send_signal(signal.SIGINT)
    output, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    report = json.loads(output)
    assert report["verdict"] == "interrupted"
    assert "the report has the measurements so far" in said
    if until == "step 5":
        assert report["forecast"]["curve"][-1]["step"] >= 5
        assert report["forecast"]["reason"] == "only 5 of 20 steps were seen"
        assert not any("the script ended" in note for note in report["notes"])
    require_nothing_left()


@LINUX
def test_a_script_whose_normscope_was_killed_ends_at_its_next_step(here: Path) -> None:
    process = begun(here, "catches,slow", "step 5", steps=1000)
    process.kill()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            require_nothing_left()
        except AssertionError:
            time.sleep(0.05)
        else:
            break
    process.communicate(timeout=60)
    require_nothing_left()
