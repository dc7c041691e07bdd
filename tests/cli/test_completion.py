"""Completion in the shell: the words offered, bash's splitting, and speed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import shellingham

from normscope import completion
from normscope.cli.main import run
from normscope.monitor.alarms import ALARMS
from normscope.nn.schemes import SCHEMES
from normscope.rules import RULES


def test_the_names_that_are_read_are_those_of_the_tables() -> None:
    assert completion.findings() == {code: rule.name for code, rule in RULES.items()}
    assert completion.alarms() == {code: alarm.name for code, alarm in ALARMS.items()}
    assert set(completion.schemes()) == set(SCHEMES)


def test_models_and_options_are_those_of_nn() -> None:
    from normscope.nn.models import MODELS, options_of

    assert set(completion.MODELS) == set(MODELS)
    assert {option.removesuffix("=") for option in completion.OPTIONS} <= set(options_of("decoder"))


def test_types_of_transformers_are_those_that_it_knows() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found, known = set(completion.hf_types()), set(CONFIG_MAPPING_NAMES)
    assert {"gpt2", "llama", "bert", "t5", "vit"} <= found
    assert len(found ^ known) < 0.03 * len(known), "a few are entered by code"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", {"nn:", "hf:", "model.py:"}),
        ("n", {"nn:"}),
        ("mod", {"model.py:"}),
        ("nn:", {"nn:decoder", "nn:encoder", "nn:encoder-decoder", "nn:vision"}),
        ("nn:decoder,sch", {"nn:decoder,scheme="}),
        ("nn:decoder,depth=2,scheme=pos", {"nn:decoder,depth=2,scheme=post"}),
        ("nn:decoder,scheme=post,sch", set()),
        ("hf:gpt2", {"hf:gpt2"}),
        ("model.py:", {"model.py:build"}),
        ("nowhere.py:", set()),
        ("broken.py:", set()),
    ],
)
def test_a_model_is_completed(
    typed: str, offered: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(
        "def build(depth=2): ...\ndef _own(): ...\ndef needs(x): ...\nclass A: ...\n"
    )
    found = set(completion.complete_model(typed))
    if typed:
        (tmp_path / "broken.py").write_text("def (")
        found = set(completion.complete_model(typed))
    assert found == offered


def test_codes_are_completed_one_by_one() -> None:
    assert completion.complete_codes("NS10") == [code for code in RULES if code.startswith("NS10")]
    assert completion.complete_codes("NS101,post") == ["NS101,post-ln-deep"]
    assert completion.complete_codes("ns101") == ["NS101"]
    assert completion.complete_code("post") == ["post-ln-deep"]
    assert completion.complete_schemes("pre,dee") == ["pre,deepnorm"]
    assert completion.complete_scheme("dee") == ["deepnorm"]
    assert completion.complete_formats("int") == ["int8", "int4"]
    assert completion.complete_formats("int8,") == ["int8,int4", "int8,fp8"]


@pytest.mark.parametrize(
    ("words", "glued", "kept"),
    [
        ("check nn : dec", "check nn:dec", "nn:"),
        ("check nn :", "check nn:", "nn:"),
        ("check nn : decoder,scheme = po", "check nn:decoder,scheme=po", "nn:decoder,scheme="),
        ("check x --select = NS1", "check x --select=NS1", "--select="),
        ("check nn:", "check nn:", "nn:"),
        ("check ", "check ", ""),
    ],
)
def test_words_of_bash_are_put_together(words: str, glued: str, kept: str) -> None:
    def variables(line: str) -> dict[str, str]:
        split = ["normscope", *line.split(" ")]
        return {"COMP_WORDS": "\n".join(split), "COMP_CWORD": str(len(split) - 1)}

    environment = variables(words)
    assert completion.glue_bash_words(environment) == kept
    assert environment == variables(glued)


def test_sides_of_diff_are_models_reports_and_revisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text("def build(): ...\n")
    (tmp_path / "report.json").write_text('{\n  "schema": "normscope.report/1"}')
    (tmp_path / "other.json").write_text("{}")
    heads = tmp_path / ".git" / "refs" / "heads" / "feature"
    heads.mkdir(parents=True)
    (heads / "norms").write_text("0")
    (tmp_path / ".git" / "packed-refs").write_text("# pack-refs\n00 refs/heads/main\n00 refs/tags/v1\n^00\n")
    monkeypatch.chdir(tmp_path)
    assert {"nn:", "hf:", "git:", "model.py:", "report.json"} <= set(completion.complete_side(""))
    assert "other.json" not in completion.complete_side("")
    assert completion.complete_side("git:") == ["git:HEAD:", "git:feature/norms:", "git:main:", "git:v1:"]
    assert completion.complete_side("git:ma") == ["git:main:"]
    assert completion.complete_side("git:main:mod") == ["git:main:model.py:"]
    assert completion.complete_side("git:main:model.py:") == ["git:main:model.py:build"]
    assert "nn:decoder" in completion.complete_side("nn:dec")


@pytest.fixture
def in_bash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], list[str]]:
    """Completions that bash gets at the end of a line, by the script that `--show-completion` prints."""
    bash = shutil.which("bash")
    assert bash is not None
    monkeypatch.setattr(shellingham, "detect_shell", lambda: ("bash", bash))
    with pytest.raises(SystemExit):
        run(["--show-completion"])
    script = capsys.readouterr().out
    program = tmp_path / "normscope"
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m normscope \"$@\"\n")
    program.chmod(0o755)

    def offered(line: str) -> list[str]:
        asked = f"COMP_WORDS=(normscope {line}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))\n"
        shown = f"_normscope_completion '{program}'\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
        done = subprocess.run(
            [bash, "-c", script + asked + shown], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    return offered


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_is_offered_what_goes_on_from_the_word(in_bash: Callable[[str], list[str]]) -> None:
    assert in_bash("check nn : deco") == ["decoder"]
    assert in_bash("check nn : decoder,scheme = deepn") == ["deepnorm"]
    assert in_bash("check nn:x --select NS101,post") == ["NS101,post-ln-deep"]
    assert in_bash("check nn : decoder --budget = fa") == ["fast"]
    assert in_bash("check nn : decoder --select = NS101") == ["NS101"]
    assert in_bash("check nn:x --quantise int8,f") == ["int8,fp8"]
    assert in_bash("doc") == ["doctor"]


def test_a_completion_does_not_wait_for_torch(tmp_path: Path) -> None:
    code = """
import atexit, sys
heavy = {"torch", "transformers", "numpy", "matplotlib", "scipy"}
atexit.register(lambda: print(*sorted(heavy & set(sys.modules)), file=sys.stderr))
from normscope.cli import main
main()
"""
    asked = {"_NORMSCOPE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "normscope check hf:gpt2"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=os.environ | asked, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr.strip() == ""
    assert r'"hf\\:gpt2"' in done.stdout


def test_the_help_names_both_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "--install-completion" in shown
    assert "--show-completion" in shown
