"""The command line: exit statuses, one-line errors, pure JSON, defaults from pyproject.toml."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from normscope.cli.main import run

SMALL = "nn:decoder,scheme=pre,depth=2,width=32"
QUICK = ("--steps", "2", "--batch-size", "2", "--seq-len", "16")


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_factory(folder: Path, body: str, name: str = "model.py") -> str:
    (folder / name).write_text("import torch\nfrom torch import nn\n\n\ndef build():\n" + body)
    return f"{folder / name}:build"


def test_check_json_is_one_object_and_nothing_else(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = write_factory(
        here, "    print('built')\n    return nn.TransformerEncoderLayer(16, 2, 32, norm_first=True)\n"
    )
    status = run(["check", spec, "--format", "json", *QUICK])
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["schema"] == "normscope.report/1"
    assert "built" in err
    assert status == int(report["verdict"] == "will fail")


def test_check_text_opens_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", SMALL, *QUICK]) == 0
    out, err = capsys.readouterr()
    assert "healthy" in lines(out)[0].lower()
    assert err == ""


def test_output_goes_to_the_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", SMALL, *QUICK, "--format", "html", "-o", "page.html"]) == 0
    assert "<html" in (here / "page.html").read_text()
    assert capsys.readouterr().out == ""


def test_fail_on_and_ignore_decide_the_status(here: Path) -> None:
    spec = write_factory(
        here, "    m = nn.TransformerEncoderLayer(16, 2, 32)\n    return nn.TransformerEncoder(m, 3)\n"
    )
    assert run(["check", spec, *QUICK, "--fail-on", "never"]) == 0
    assert run(["check", spec, *QUICK, "--fail-on", "warning", "--select", "identical-blocks"]) == 1
    structure = ["--select", "NS1", "--ignore", "NS103"]
    assert run(["check", spec, *QUICK, "--fail-on", "error", *structure]) == 0
    assert run(["check", spec, *QUICK, "--fail-on", "warning", *structure]) == 1, "no trial, for no loss"


def test_nothing_tried_is_no_trial(capsys: pytest.CaptureFixture[str]) -> None:
    """ "No trial" counts as a warning for --fail-on."""
    untried = ["check", SMALL, *QUICK[2:], "--steps", "0", "--budget", "fast"]
    for fail_on, status in (("error", 0), ("warning", 1), ("never", 0)):
        assert run([*untried, "--fail-on", fail_on]) == status
        assert lines(capsys.readouterr().out)[0].startswith("no trial")


def test_nan_model_gets_a_full_report_and_status_1(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = write_factory(
        here,
        "    m = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True)\n"
        "    m.linear1.weight.data[0, 0] = float('nan')\n    return m\n",
    )
    assert run(["check", spec, *QUICK, "--format", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "will fail"
    assert "non-finite" in {finding["name"] for finding in report["findings"]}
    assert report["anatomy"]["blocks"]


@pytest.fixture
def files(here: Path) -> Path:
    """The files that the bad calls name."""
    (here / "empty.txt").write_text("")
    (here / "binary.bin").write_bytes(bytes(range(256)) * 40)
    write_factory(here, "    raise RuntimeError('no luck')\n", "raises.py")
    write_factory(here, "    return 7\n", "nonsense.py")
    write_factory(here, "    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))\n", "plain.py")
    return here


# Call → what its one line must contain.
BAD_CALLS: dict[str, tuple[list[str], str]] = {
    "unknown type": (["check", "hf:gtp2"], "gpt2"),
    "unknown option": (["check", "hf:gpt2,n_layers=2"], "n_layer"),
    "unknown prefix": (["check", "hg:gpt2"], "hf:"),
    "no prefix": (["check", "gpt2"], "hf:gpt2"),
    "missing file": (["check", "missing.py:build"], "missing.py"),
    "missing factory": (["check", "nonsense.py:bild"], "build"),
    "missing module": (["check", "no_such_package.models:build"], "no_such_package"),
    "raising factory": (["check", "raises.py:build"], "no luck"),
    "nonsense factory": (["check", "nonsense.py:build"], "int"),
    "missing config": (["check", "hf:./nowhere/config.json"], "nowhere"),
    "missing text": (["check", SMALL, "--text", "nowhere.txt"], "nowhere.txt"),
    "empty text": (["check", SMALL, "--text", "empty.txt"], "empty"),
    "binary text": (["check", SMALL, "--text", "binary.bin"], "text"),
    "unknown scheme": (["check", "nn:decoder,scheme=pots"], "post"),
    "heads that do not divide": (["check", "nn:decoder,width=30,heads=4"], "30"),
    "unknown flag": (["check", SMALL, "--formt", "json"], "--format"),
    "bad format": (["check", SMALL, "--format", "yaml"], "yaml"),
    "bad code": (["check", SMALL, "--select", "post-ln-dep"], "post-ln-deep"),
    "bad optimizer": (["check", SMALL, "--optimizer", "adamv"], "adamw"),
    "bad rate": (["check", SMALL, "--lr", "-1"], "-1"),
    "bad dtype": (["check", SMALL, "--dtype", "float23"], "float32"),
    "bad device": (["check", SMALL, "--device", "warp"], "warp"),
    "unknown command": (["chekc", SMALL], "check"),
    "unknown code": (["explain", "NS999"], "NS999"),
    "near code": (["explain", "post-ln-dep"], "post-ln-deep"),
    "unknown bench": (["bench", "chekc"], "check"),
    "unwritable output": (["check", SMALL, *QUICK, "-o", "no/such/folder.txt"], "folder"),
    "no argument": (["check"], "MODEL"),
    "no residual stream": (["check", "plain.py:build"], "x + F(x)"),
    "only read, no residual stream": (["anatomy", "plain.py:build"], "x + F(x)"),
    "too large": (["check", "hf:llama,num_hidden_layers=8,hidden_size=65536"], "memory"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
@pytest.mark.usefixtures("files")
def test_bad_calls_get_one_line_and_status_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, expected = BAD_CALLS[name]
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(lines(err)) == 1, err
    assert "Traceback" not in err
    assert expected in err


def test_traceback_shows_the_users_own_error(here: Path) -> None:
    spec = write_factory(here, "    raise RuntimeError('no luck')\n")
    command = [sys.executable, "-m", "normscope", "check", spec, "--traceback"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "model.py" in done.stderr
    assert "RuntimeError: no luck" in done.stderr


def test_an_error_of_ours_is_not_blamed_on_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*given, **more) -> None:
        raise AttributeError("module 'os' has no such attribute")

    monkeypatch.setattr("normscope.nn.catalogue.catalogue", broken)
    monkeypatch.setattr("normscope.subjects.load", broken)
    for call, more in ((["schemes"], ""), (["check", SMALL], ", with the output of --traceback")):
        assert run(call) == 2
        err = capsys.readouterr().err
        assert f": a bug in normscope. Please report it{more}.\n" in err
        assert f"(in {call[0]}.py, line " in err
        assert "a model that can be read" not in err


def test_an_error_of_the_models_forward_is_its_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "model.py").write_text(BROKEN_FORWARD)
    assert run(["check", f"{here / 'model.py'}:build", *QUICK]) == 2
    err = capsys.readouterr().err
    assert "no_such_thing" in err
    assert "in normscope, not in the call" not in err


BROKEN_FORWARD = """
from torch import nn


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 4)

    def forward(self, x):
        return self.embedding(x).no_such_thing


def build():
    return Broken()
"""


@pytest.mark.parametrize("command", ["anatomy", "bench", "train"])
def test_html_is_offered_only_where_there_is_a_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    offered = capsys.readouterr().out
    assert "<text|json>" in offered
    assert "html" not in offered.replace("run.html", ""), "train writes that page by itself"
    assert run([command, SMALL, "--format", "html"]) == 2
    err = capsys.readouterr().err
    assert "'html' is not one of 'text', 'json'" in err
    assert "Value error" not in err


def test_anatomy_reads_without_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["anatomy", SMALL, "--format", "json"]) == 0
    reading = json.loads(capsys.readouterr().out)
    assert [b["placement"] for block in reading["blocks"] for b in block["branches"]] == ["pre"] * 4
    assert reading["final_norm"] is True


@pytest.mark.parametrize("command", [[], ["check"], ["anatomy"], ["explain"], ["demo"], ["bench"]])
def test_help_is_quick_and_complete(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_help_keeps_the_name_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich treats square brackets as markup."""
    run(["check", "--help"])
    assert "[tool.normscope]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (["check", "m", "--learning-rate", "3"], "; did you mean --lr?"),
        (["check", "m", "--learning_rate=3"], "; did you mean --lr?"),
        (["train", "m", "--max-steps", "3"], "; did you mean --steps?"),
        (["map", "--scheme", "post"], "; did you mean --schemes?"),
        (["check", "m", "--optimiser", "sgd"], "; did you mean --optimizer?"),
        (["check", "m", "--html"], "; did you mean --format html?"),
        (["diff", "a", "b", "--markdown", "x.md"], "; did you mean --format markdown?"),
        (["check", "m", "--zzzz"], "."),
        (["check", "m", "-z"], "."),
        (["anatomy", "m", "--lr", "3"], "."),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_an_unknown_option_names_what_was_meant(
    call: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(call) == 2
    option = next(word for word in call if word.startswith("-")).partition("=")[0]
    wanted = f"normscope: No such option: {option}{meant} See `normscope {call[0]} --help`.\n"
    assert capsys.readouterr().err == wanted


def test_the_options_of_check_are_frozen() -> None:
    """Scripts depend on these names: change this list only together with the changelog."""
    from typer.main import get_command

    from normscope.cli.main import app

    check = get_command(app).commands["check"]
    names = {flag for parameter in check.params for flag in parameter.opts}
    assert names == {
        *(
            "model",
            "--optimizer",
            "--lr",
            "--warmup",
            "--steps",
            "--budget",
            "--batch-size",
            "--seq-len",
            "--text",
            "--seed",
        ),
        *(
            "--device",
            "--dtype",
            "--format",
            "--output",
            "-o",
            "--fail-on",
            "--select",
            "--ignore",
            "--quantise",
            "--traceback",
        ),
        *("--source", "--target", "--images"),
        *("--forecast", "--rates", "--refine", "--try-remedies"),
        *("--schedule", "--run-steps", "--weight-decay", "--eps", "--beta1", "--beta2"),
        *("--clip", "--accumulation", "--precision"),
        *("--module", "--quiet-script"),
    }


def test_importing_normscope_does_not_import_torch() -> None:
    code = "import sys, normscope, normscope.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("words", [["--lr", "3"], ["--steps", "0"], ["nn:decoder"]])
def test_options_that_do_not_go_with_a_script_are_refused_without_pytorch(words: list[str]) -> None:
    """Its import takes seconds, of which a typing error should cost none."""
    arguments = ["check", *words, "--", "python", "train.py"]
    code = "import sys; from normscope.cli.main import run; "
    code += f"assert run({arguments!r}) == 2; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--", "python", "absent.py"],
        ["--refine", "3", "--", "python", __file__],
        ["nn:decoder", "--refine", "3"],
        ["nn:decoder", "--rates", "1e-3:x"],
        ["nn:decoder", "--quantise", "int7"],
    ],
)
def test_bad_values_and_absent_scripts_are_refused_without_pytorch(words: list[str]) -> None:
    code = "import sys; from normscope.cli.main import run; "
    code += f"assert run({['check', *words]!r}) == 2; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ctrl_c_in_the_trial_shows_what_was_measured_and_exits_130(here: Path) -> None:
    """Sent twice, as `timeout` does, while the trial's thread is in a backward pass."""
    (here / "model.py").write_text(INTERRUPTED)
    command = [sys.executable, "-m", "normscope", "check", f"{here / 'model.py'}:build", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    report = json.loads(done.stdout)
    assert report["measurements"]
    assert report["verdict"] == "interrupted"


INTERRUPTED = """
import os, signal, threading, time
from normscope.nn import build as decoder


def interrupt(gradient):
    if threading.current_thread().name == "normscope-trial":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.5)  # within autograd's C++, long enough for Python to end meanwhile


def watch(module, arguments, output):
    if output.logits.requires_grad:
        output.logits.register_hook(interrupt)


def build():
    model = decoder("decoder", depth=2, width=32, heads=2)
    model.register_forward_hook(watch)
    return model
"""


def test_ctrl_c_while_the_report_is_written_does_not_lose_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from normscope.report import Report

    to_json = Report.to_json

    def interrupted(report: Report) -> str:
        signal.raise_signal(signal.SIGINT)
        return to_json(report)

    monkeypatch.setattr(Report, "to_json", interrupted)
    assert run(["check", SMALL, "--steps", "0", "--budget", "fast", "--format", "json"]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"] == "no trial"
    assert err == "normscope: interrupted\n"


def test_quantise_shows_what_hurts_most(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", SMALL, "--steps", "0", "--seq-len", "16", "--budget", "fast", "--quantise", "int8,int4"]
    assert run(words) == 0
    out = capsys.readouterr().out
    assert out.count("int8 per tensor") == 2  # in the table, and beside the counterpart
    assert "outlier" in out
    assert "with scheme post" in out
    assert run([*words, "-o", "report.json"]) == 0
    assert run([*words, "-o", "report.html"]) == 0
    assert "Rounded alone" in (here / "report.html").read_text()
    assert "--quantise</span>" in (here / "report.html").read_text(), "the command that repeats it"


def test_an_unknown_format_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "no/such/model.py:build", "--quantise", "int9"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        'normscope: format "int9" of quantise: expected some of int8, int4, fp8, with commas between them; '
        'the nearest name is "int8".\n'
    )


def test_an_interrupted_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*given: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("normscope.planning.plan", stopped)
    assert run(["plan", "nn:decoder"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "normscope: interrupted"
