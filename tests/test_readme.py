"""The README is true: its commands run as printed, its Python too, its links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from normscope.cli import options
from normscope.probes import Budget

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)[^\n]*\n(.*?)```", README, flags=re.DOTALL)
CONSOLE = "\n".join(body for language, body in BLOCKS if language == "console")
# Command → the line shown under it. make installs and runs this very suite: tried by hand in a fresh clone.
COMMANDS = {
    command: shown
    for command, shown in re.findall(r"^\$ (.+)\n(?=(.*)$)", CONSOLE, flags=re.MULTILINE)
    if not command.startswith("make")
}
# The others run in the process of the tests: what a start of Python adds is the same for all.
IN_PROCESSES_OF_THEIR_OWN = ("normscope schemes deepnorm",)
EXPECTED = {"will fail": 1, "at risk": 0, "healthy": 0}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the README shows."""
    folder = tmp_path_factory.mktemp("readme")
    for name, body in re.findall(r"```python title=(\S+)\n(.*?)```", README, flags=re.DOTALL):
        (folder / name).write_text(body, encoding="utf-8")
    return folder


def process(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # two workers share the cores
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_the_readme_shows_commands() -> None:
    assert len(COMMANDS) >= 6
    assert COMMANDS.keys() >= set(IN_PROCESSES_OF_THEIR_OWN)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs_as_printed(command: str, desk: Path, shell) -> None:
    words = shlex.split(command, comments=True)
    assert words[0] == "normscope"
    done = (process if command in IN_PROCESSES_OF_THEIR_OWN else shell)(words, desk)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    for verdict, status in EXPECTED.items():
        if done.stdout.startswith(verdict):
            assert done.returncode == status
    if COMMANDS[command] and not COMMANDS[command].startswith("$"):
        assert done.stdout.splitlines()[0] == COMMANDS[command]


@pytest.mark.parametrize("body", [body for language, body in BLOCKS if language == "python"])
def test_python_runs_as_printed(body: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    exec(compile(body, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


def test_the_budgets_are_those_of_the_table_and_of_the_command_line() -> None:
    assert [str(budget) for budget in options.Budget] == [str(budget) for budget in Budget]
    limits = dict(re.findall(r"^\| `(\w+)` \| (\d+)", README, flags=re.MULTILINE))
    assert limits == {str(budget): str(budget.forwards) for budget in Budget}
