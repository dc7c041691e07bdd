"""docs/train.md is correct: its table is the config's, its TOML and Python run, its commands exist."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from normscope.cli.main import app
from normscope.train import RunConfig
from normscope.train.run_config import KEYS

PAGE = (Path(__file__).parents[2] / "docs" / "train.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_table_has_every_key_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (\S+) \|", PAGE, flags=re.MULTILINE))
    defaults = RunConfig.from_dict({"model": "nn:decoder"}).to_dict() | {"model": None}
    written = {key.replace("_", "-"): "–" if v is None else str(v) for key, v in defaults.items()}
    assert rows == written
    assert set(defaults) == set(KEYS)


def test_every_key_is_an_option_of_the_command() -> None:
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {f"--{key.replace('_', '-')}" for key in KEYS if key != "model"} <= options


def test_the_toml_is_a_config() -> None:
    for body in blocks("toml"):
        RunConfig.from_dict(tomllib.loads(body)).subject()


def test_the_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for body in blocks("python"):
        exec(compile(body, "docs/train.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.splitlines()[0].startswith("10 ")


def test_the_commands_have_the_options_they_show() -> None:
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts}
    for line in "".join(blocks("console")).splitlines():
        words = shlex.split(line.partition("#")[0])
        ours = words[words.index("train") :]
        assert {word for word in ours if word.startswith("-")} <= options
