"""docs/data.md is true: its Python and its commands run."""

import re
import shlex
from pathlib import Path

import pytest

from normscope.cli.main import run

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ normscope (.+)$", PAGE, flags=re.MULTILINE)
QUICK = ("--steps", "0", "--budget", "fast", "--fail-on", "never", "--seq-len", "16", "--format", "json")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("some words of a page\n" * 20)
    (tmp_path / "train.en").write_text("one two three\n" * 20)
    (tmp_path / "train.de").write_text("eins zwei drei\n" * 20)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command: str, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*shlex.split(command), *QUICK]) == 0
    words = next(word for word in ("docs/", "train.de", "digits") if word in command)
    assert words.rstrip("/") in capsys.readouterr().out


def test_python_runs(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (body,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(body, "data.md", "exec"), {})
    assert "torch.Size([8, 64])" in capsys.readouterr().out


def test_the_page_shows_commands() -> None:
    assert len(COMMANDS) == 3
