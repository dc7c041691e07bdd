"""Pages are true: commands and Python run as printed, translations show the same code and figures."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from normscope.cli import options
from normscope.cli.main import app
from normscope.probes import Budget

ROOT = Path(__file__).parents[1]
# Pages whose commands and Python run here. A translation runs nothing: its code is that of the English page.
GUIDE = ["docs/index.md", *(f"docs/guide/{path.name}" for path in sorted((ROOT / "docs/guide").glob("*.md")))]
GUIDE = [page for page in GUIDE if not page.endswith(".zh.md")]
PAGES = ["README.md", "AGENTS.md", *GUIDE, "docs/check.md", "docs/diff.md", "docs/models.md"]
TRANSLATIONS = {"README.zh-CN.md": "README.md"} | {
    page.replace(".md", ".zh.md"): page for page in (*GUIDE, "docs/evidence.md")
}
# The others run in the process of the tests: a start of Python adds the same to each.
IN_A_PROCESS_OF_ITS_OWN = "normscope schemes deepnorm"
DIFFERENCE = runpy.run_path(str(Path(__file__).parent / "linalg" / "pages.py"))["difference"]
GOES_ON = re.compile(r"--resume|--store map.sqlite$")
EXPECTED = {"will fail": 1, "at risk": 0, "healthy": 0}


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """Bodies of a page's code blocks in a language."""
    return re.findall(rf"```{language}\b[^\n]*\n(.*?)```", read(page), flags=re.DOTALL)


def commands(page: str) -> dict[str, str]:
    """Command → the output shown under it, without `make`, which runs this very suite."""
    console = "\n".join(blocks(page, "console")) + "$ "
    shown = re.findall(r"^\$ ([^\n]+)\n(.*?)(?=^\$ )", console, flags=re.MULTILINE | re.DOTALL)
    return {command: output for command, output in shown if not command.startswith("make")}


def files(page: str) -> dict[str, str]:
    """Name → content of the files that a page shows."""
    return dict(re.findall(r"```python title=(\S+)\n(.*?)```", read(page), flags=re.DOTALL))


@pytest.fixture(scope="module")
def desks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each page, with the files that it and the README show."""
    folders = {}
    for page in PAGES:
        folders[page] = tmp_path_factory.mktemp("page")
        for name, body in (files("README.md") | files(page)).items():
            (folders[page] / name).write_text(body, encoding="utf-8")
    return folders


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


def to_run() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Page and command, with those that go on where it ended: one test, because workers share no folder.

    A command that another page ran already is left out, unless its output is shown.
    """
    seen = set()
    for page in PAGES:
        groups: list[list[str]] = []
        for command in commands(page):
            if GOES_ON.search(command):
                groups[-1].append(command)
            else:
                groups.append([command])
        for group in groups:
            shown = any(commands(page)[command].strip() for command in group)
            if shown or not seen.issuperset(group) or any(name in group[0] for name in files(page)):
                yield page, tuple(group)
            seen.update(group)


@pytest.mark.parametrize(
    ("page", "group"), list(to_run()), ids=lambda value: value[0] if isinstance(value, tuple) else value
)
def test_commands_run_as_printed(page: str, group: tuple[str, ...], desks: dict[str, Path], shell) -> None:
    for command in group:
        runs_as_printed(page, command, desks, shell)


def runs_as_printed(page: str, command: str, desks: dict[str, Path], shell) -> None:
    words = shlex.split(command, comments=True)
    assert words[0] == "normscope"
    done = (process if command == IN_A_PROCESS_OF_ITS_OWN else shell)(words, desks[page])
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    for verdict, status in EXPECTED.items():
        if done.stdout.startswith(verdict):
            assert done.returncode == status
    rest = iter(done.stdout.splitlines())  # an iterator: the lines are in this order
    lines = [line for line in commands(page)[command].splitlines() if line.strip() not in ("…", "")]
    assert [line for line in lines if not any(shows(line, printed) for printed in rest)] == []


def shows(line: str, printed: str) -> bool:
    """Whether a line of a page is a line of output, or the begin of one if it ends in "…"."""
    begin, rest = words_of(line.removesuffix("…")), words_of(printed)
    return rest.startswith(begin) if line.endswith("…") else rest == begin


def words_of(line: str) -> str:
    """A line without its figures, which differ between machines, and without its spacing."""
    return " ".join(re.sub(r"[-+−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", "#", line).split())


@pytest.mark.parametrize(
    ("page", "body"), [(page, body) for page in PAGES for body in blocks(page, "python")]
)
def test_python_runs_as_printed(
    page: str,
    body: str,
    desks: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(desks[page])
    monkeypatch.syspath_prepend(desks[page])
    for name in (Path(name).stem for name in files("README.md") | files(page)):
        monkeypatch.delitem(sys.modules, name, raising=False)
    exec(compile(body, page, "exec"), {"__name__": "page"})
    _, _, after = read(page).partition(f"{body}```\n")
    if shown := re.match(r"\n```text\n(.*?)```", after, flags=re.DOTALL):
        assert not DIFFERENCE(capsys.readouterr().out, shown[1])


def without_comments(page: str) -> list[str]:
    """The code of a page, in any language."""
    return [re.sub(r" +#.*", "", body) for body in blocks(page, r"\w+")]


def figures(page: str) -> list[Counter[str]]:
    """Count of each number in the prose and tables of each section."""
    prose = re.sub(r"```.*?```|\]\(.*?\)", "", read(page), flags=re.DOTALL)
    sections = re.split(r"^#+ ", prose, flags=re.MULTILINE)
    return [Counter(re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", section)) for section in sections]


@pytest.mark.parametrize(("translation", "page"), TRANSLATIONS.items())
def test_a_translation_shows_the_same_code_and_figures(translation: str, page: str) -> None:
    assert without_comments(translation) == without_comments(page)
    assert figures(translation) == figures(page)


def test_the_readme_is_short() -> None:
    assert len(read("README.md").split()) <= 900


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_a_word_that_the_readme_presents_like_a_command_is_one(page: str) -> None:
    names = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    (section,) = (part for part in read(page).split("\n## ") if "`doctor`" in part)
    assert set(re.findall(r"`([a-z]+)(?: --\w+)?`", section)) <= names


def test_the_budgets_are_those_of_the_table_and_of_the_command_line() -> None:
    assert [str(budget) for budget in options.Budget] == [str(budget) for budget in Budget]
    limits = dict(re.findall(r"^\| `(\w+)` \| (\d+)", read("docs/check.md"), flags=re.MULTILINE))
    assert limits == {str(budget): str(budget.forwards) for budget in Budget}
