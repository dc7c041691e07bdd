"""`[tool.normscope]` of a pyproject.toml: its defaults and its errors."""

import json
from pathlib import Path

import pytest

from normscope.cli.defaults import ANATOMY_KEYS, KEYS, read_defaults
from normscope.cli.main import app, run
from normscope.errors import UsageError

SMALL = "nn:decoder,scheme=pre,depth=1,width=16,heads=2"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder under one with a pyproject.toml."""
    below = tmp_path / "some" / "where"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    return tmp_path / "pyproject.toml"


def test_defaults_of_a_folder_above(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here.write_text(
        "[tool.normscope]\nlr = 0.002\nbatch-size = 2\nseq_len = 16\nsteps = 1\nbudget = 'fast'\n"
    )
    assert run(["check", SMALL, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["forecast"]["lr"] == 0.002
    assert run(["check", SMALL, "--format", "json", "--lr", "0.001"]) == 0
    assert json.loads(capsys.readouterr().out)["forecast"]["lr"] == 0.001


BROKEN = [
    "[tool.normscope",
    "[tool.normscope]\nlr = 'fast'\n",
    "[tool]\nnormscope = 3\n",
    "tool = 3\n",
    "\xff",
]
OTHERS = [["explain", "NS101"], ["schemes", "pre"], ["claims", "--list"], ["--help"], ["check", "--help"]]


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_file_stops_only_what_reads_it(
    content: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here.write_bytes(content.encode("latin-1"))
    for call in OTHERS:
        assert run(call) == 0, call
        assert capsys.readouterr().err == ""


# Content, command → what its one line must contain.
REFUSED = [
    ("[tool.normscope\n", "anatomy", ("pyproject.toml", "line 1", "TOML")),
    ("\n[tool.normscope]\nlr = 'fast'\n", "check", ("lr = 'fast'", "line 3", "a number")),
    ("[tool.normscope]\nsteps = 2.5\n", "check", ("steps = 2.5", "line 2", "whole number")),
    ("[tool.normscope]\nseed = true\n", "anatomy", ("seed = True", "line 2", "whole number")),
    ("[tool.normscope]\nforecast = 1\n", "check", ("forecast = 1", "line 2", "true or false")),
    ("[tool.normscope]\nselect = [1]\n", "check", ("select = [1]", "line 2", "list of strings")),
    ("[tool.normscope]\nbatch_size = 0\n", "check", ("batch-size = 0", "line 2", "greater than")),
    ("[tool.normscope]\nformat = 'yaml'\n", "check", ("format = 'yaml'", "line 2", "html")),
    ("[tool.normscope]\nseq-len = 1\n", "anatomy", ("seq-len = 1", "line 2", "greater than")),
    ("[x]\nlr = 1\n[tool.normscope]\n'lr' = []\n", "check", ("lr = []", "line 4", "a number")),
    ("[tool]\nnormscope.lr = []\n", "check", ("lr = []", "pyproject.toml", "a number")),
    ("[tool.normscope]\noptimiser = 'adam'\n", "check", ("optimiser", "line 2", "optimizer")),
    ("[tool]\nnormscope = 3\n", "check", ("normscope = 3", "expected a table")),
]


@pytest.mark.parametrize(("content", "command", "parts"), REFUSED)
def test_a_wrong_value_is_one_line_with_its_file(
    content: str, command: str, parts: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here.write_text(content)
    assert run([command, SMALL]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for part in (*parts, "pyproject.toml"):
        assert part in err
    assert "--help" not in err, "the call is not to blame"
    assert "Value error" not in err


def test_the_keys_are_options_of_the_commands() -> None:
    from typer.main import get_command

    for command, keys in (("check", KEYS), ("anatomy", ANATOMY_KEYS)):
        assert set(keys) <= {param.name for param in get_command(app).commands[command].params}


def test_lists_of_codes_are_joined(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[tool.normscope]\nignore = ['NS1', 'eps-small']\nselect = 'NS5'\n"
    )
    assert read_defaults(tmp_path).map["check"] == {"ignore": "NS1,eps-small", "select": "NS5"}
    assert read_defaults(tmp_path).map["anatomy"] == {}


def test_a_folder_that_is_gone_has_no_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    try:
        assert read_defaults().values == {}
    finally:
        monkeypatch.chdir(tmp_path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("")

    def denied(path: Path, **more: str) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(UsageError, match=r"pyproject\.toml .*Permission denied"):
        read_defaults(tmp_path)
