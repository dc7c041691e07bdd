"""normscope init: the stub for code as people write it is found without running it, and `check` takes it."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_projects as projects

from normscope.cli.main import run
from normscope.errors import UsageError
from normscope.starter import start

QUICK = ["--steps", "2", "--budget", "fast", "--fail-on", "never", "--format", "json"]
# Files → the class that is found, and what its stub gives the model.
RUN = {
    "nanoGPT": ({"model.py": projects.NANO, "train.py": projects.NANO_TRAIN}, "GPT", "n_layer=3"),
    "minGPT": (
        {"mingpt/__init__.py": "", "mingpt/model.py": projects.MINI, "demo.py": projects.MINI_DEMO},
        "GPT",
        "config.model_type = 'gpt-nano'",
    ),
    "nn.TransformerEncoder": ({"lm.py": projects.ENCODER}, "TransformerModel", "nlayers=2"),
    "no class": ({"train.py": projects.NO_CLASS}, "TransformerEncoder", "num_layers=2"),
    "transformers": ({"train.py": projects.HUGGING_FACE}, "GPT2LMHeadModel", "vocab_size=256"),
    "own config": ({"src/tiny.py": projects.OWN_PRETRAINED}, "TinyModel", "TinyConfig()"),
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, body in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(body, encoding="utf-8")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder; modules that are imported from it are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (
            str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path))
            or name == "mingpt"
        ):
            del sys.modules[name]


@pytest.mark.parametrize("case", RUN)
def test_check_takes_the_stub(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, name, given = RUN[case]
    write(here, files)
    assert run(["init"]) == 0
    said = capsys.readouterr().out
    assert f"Found {name} in " in said
    assert said.splitlines()[-1] == "Next: normscope check normscope_model.py:build"
    assert "TODO" not in said
    assert given in (here / "normscope_model.py").read_text()
    assert run(["check", "normscope_model.py:build", *QUICK]) == 0, capsys.readouterr().err
    report = json.loads(capsys.readouterr().out)
    assert len(report["anatomy"]["blocks"]) in (2, 3)
    has_loss = case != "no class"
    assert (report["forecast"]["outcome"] != "not measured") is has_loss


@pytest.mark.parametrize(
    ("body", "line_of", "words"),
    [
        (projects.UNKNOWN_DEPTH, "depth=", "TODO: write depth of Net(…)"),
        (projects.ONE_FILE, "TODO(", "TODO: put the loop of net.py, line 18, under `if __name__"),
    ],
    ids=["a depth that is not known", "a file that trains when it is imported"],
)
def test_the_error_of_check_points_to_the_todo(
    body: str, line_of: str, words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, {"net.py": body})
    assert run(["init"]) == 0
    lines = (here / "normscope_model.py").read_text().splitlines()
    number = next(
        n for n, line in enumerate(lines, start=1) if line.strip().startswith(line_of) and "def" not in line
    )
    assert f"TODO  line {number}: " in capsys.readouterr().out
    assert run(["check", "normscope_model.py:build", *QUICK]) == 2
    error = capsys.readouterr().err
    assert f"normscope_model.py, line {number}: {words}" in error
    assert len(error.splitlines()) == 1


def test_a_todo_that_is_written_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, {"net.py": projects.UNKNOWN_DEPTH})
    run(["init"])
    stub = here / "normscope_model.py"
    stub.write_text(re.sub(r'depth=TODO\(".*?"\)', "depth=2", stub.read_text()))
    assert "vocab_size=100" in stub.read_text(), "the script gives it"
    assert run(["check", "normscope_model.py:build", *QUICK]) == 0, capsys.readouterr().err


def test_a_stub_is_not_written_over(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, {"net.py": projects.UNKNOWN_DEPTH, "normscope_model.py": "mine"})
    assert run(["init"]) == 2
    assert "--force" in capsys.readouterr().err
    assert (here / "normscope_model.py").read_text() == "mine"
    assert run(["init", "--force"]) == 0
    assert "Net" in (here / "normscope_model.py").read_text()


def test_a_class_can_be_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, {"code/model.py": projects.NANO})
    assert run(["init", "code", "--class", "Block"]) == 0
    said = capsys.readouterr().out
    assert "Found Block" in said
    assert "Other classes, for --class: GPT" in said
    assert said.splitlines()[-1] == "Next: normscope check code/normscope_model.py:build"
    assert run(["init", "code", "--class", "Blok", "--force"]) == 2
    assert "Block" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no Python files"),
        ({"a.py": "print('hello')"}, "1 Python file, no class that derives from nn.Module"),
        ({"a.py": "print 'hello'"}, "none of which can be parsed"),
        ({".venv/a.py": projects.NANO, "site-packages/b.py": projects.NANO}, "no Python files"),
    ],
    ids=["empty", "no model", "Python 2", "installed code"],
)
def test_a_folder_without_a_model_is_refused(
    files: dict[str, str], words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, files)
    assert run(["init"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "expected a folder with the code of a model" in error
    assert not (here / "normscope_model.py").exists()
    assert run(["init", "nowhere"]) == 2


def test_a_broken_file_does_not_hide_the_model(here: Path) -> None:
    write(here, {"model.py": projects.NANO, "old.py": "print 'hello'", "binary.py": "\x00"})
    assert start(here).name == "GPT"


def test_a_file_can_be_named(here: Path) -> None:
    write(here, {"a.py": projects.UNKNOWN_DEPTH, "b.py": projects.NANO})
    assert (start(here / "a.py").name, start(here / "b.py").name) == ("Net", "GPT")


def test_tests_and_parts_do_not_rank_first(here: Path) -> None:
    test = projects.UNKNOWN_DEPTH.replace("Net", "ModelUnderTest")
    found = start(write(here, {"test_model.py": test, "model.py": projects.NANO}))
    assert found.name == "GPT"
    assert "ModelUnderTest" in found.others
    assert found.file == here / "model.py"


@pytest.mark.parametrize("name", ["my-gpt.py", "class.py", "2024_model.py", "my-models/model.py"])
def test_a_name_that_import_cannot_spell(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, {name: projects.NANO})
    assert run(["init"]) == 0
    assert "TODO" not in capsys.readouterr().out
    assert run(["anatomy", "normscope_model.py:build"]) == 0, capsys.readouterr().err


def test_a_file_name_with_a_dot_is_to_be_renamed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, {"gpt.v2.py": projects.NANO})
    assert run(["init"]) == 0
    assert "rename gpt.v2.py: Python cannot import a name with a dot" in capsys.readouterr().out
    assert run(["anatomy", "normscope_model.py:build"]) == 2
    assert "rename gpt.v2.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("sizes = dict(n_layer=3, n_head=4)\nGPT(GPTConfig(**sizes))", {"n_layer=3", "n_head=4"}),
        ("sizes = {'n_layer': 3, 'n_head': 4}\nGPT(GPTConfig(**sizes))", {"n_layer=3", "n_head=4"}),
        ("GPT(GPTConfig(n_head=4, **{'n_layer': 3}))", {"n_layer=3", "n_head=4"}),
        (
            "sizes = dict(n_layer=3, n_head=None)\nsizes['n_head'] = 4\nGPT(GPTConfig(**sizes))",
            {"n_layer=3", "n_head=4"},
        ),
    ],
    ids=["dict()", "literal", "in place", "filled later"],
)
def test_a_dict_of_keyword_arguments_is_followed(given: str, taken: set[str], here: Path) -> None:
    text = start(write(here, {"model.py": projects.NANO, "train.py": "from model import *\n" + given})).text
    (line,) = re.findall(r"config = GPTConfig\((.*)\)", text)
    assert set(line.split(", ")) == taken


def test_nothing_is_imported(here: Path) -> None:
    write(here, {"model.py": "raise SystemExit\n" + projects.NANO})
    assert start(here).name == "GPT"


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="not found"):
        start(Path("nowhere"))


def test_a_model_inside_another_is_not_the_root(here: Path) -> None:
    wrapper = """
class Tagger(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = GPT(config)

    def forward(self, sentences):
        return self.inner(sentences)[0]
"""
    assert start(write(here, {"model.py": projects.NANO + wrapper})).name == "Tagger"
    inspect = "from model import GPT, GPTConfig\n\nprint(GPT(GPTConfig()))\n"
    assert start(write(here, {"inspect_gpt.py": inspect})).name == "Tagger", "though a script constructs GPT"


def test_objects_that_the_code_constructs_are_arguments(here: Path) -> None:
    script = """
from torch import nn
from model import GPT, GPTConfig

class Wrapped(nn.Module):
    def __init__(self, inner, norm, width, vocab_size):
        super().__init__()
        self.inner, self.norm, self.heads = inner, norm, nn.ModuleList([nn.Linear(width, vocab_size)])

depth = 2
gpt = GPT(GPTConfig(n_layer=depth))
width = args.width
parser.add_argument("--width", default=8 * depth)
model = Wrapped(gpt, nn.LayerNorm(width), width, len(vocabulary))
model = nn.DataParallel(model)
"""
    text = start(write(here, {"model.py": projects.NANO, "run.py": script}), "Wrapped").text
    assert "config = GPTConfig(n_layer=2)" in text
    given = "inner=GPT(config=config), norm=nn.LayerNorm(16), width=16, vocab_size=256"
    assert f"model = Wrapped({given})" in text
    assert "# Neutral values for what the code does not give: vocab_size=256" in text
    assert "TODO" not in text


LARGE = "from model import Net\ndef main():\n    return Net(depth=24, width=unknown(), heads=16)\n"
SMALL = "from model import Net\nmodel = Net(depth=2, width=30, heads=3, vocab=100)\n"
NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self, depth, width, heads=4, vocab=256):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
"""


def test_values_of_two_scripts_are_not_mixed(here: Path) -> None:
    write(here, {"model.py": NET, "a_large.py": LARGE, "b_small.py": SMALL})
    text = start(Path()).text
    assert "Net(depth=2, width=30, heads=3, vocab=100)" in text
    assert "# The values of b_small.py, line 2.\n    # Net is also constructed in a_large.py, line 3." in text


@pytest.mark.parametrize("train", ["train.py", "a_train.py", "pretrain.py"])
def test_of_equals_the_training_script_gives_the_values(train: str, here: Path) -> None:
    write(here, {"model.py": NET, "bench.py": SMALL, train: SMALL.replace("30", "60"), "z.py": SMALL})
    text = start(Path()).text
    assert "Net(depth=2, width=60, heads=3, vocab=100)" in text
    assert f"# The values of {train}, line 2." in text


def test_what_the_chosen_place_does_not_give_is_left_to_write(here: Path) -> None:
    other = "from model import Net\nNet(width=64, depth=n())\n"
    write(here, {"model.py": NET, "train.py": LARGE, "test_net.py": other})
    found = start(Path())
    assert "heads=16" in found.text
    assert "width=64" not in found.text
    assert ["width" in what for _, what in found.todo] == [True]


def test_a_default_config_takes_what_one_file_sets(here: Path) -> None:
    made = "from mingpt.model import GPT\nconfig = GPT.get_default_config()\n"
    other = f"{made}config.block_size = 99\nGPT(config)\n"
    files = {"mingpt/__init__.py": "", "mingpt/model.py": projects.MINI}
    write(here, {**files, "a.py": other, "demo.py": projects.MINI_DEMO})
    text = start(Path()).text
    assert "config.model_type = 'gpt-nano'" in text
    assert "config.block_size = 16" in text
