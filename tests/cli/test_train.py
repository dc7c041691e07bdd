"""`normscope train`: its arguments, its output and files, and one-line errors."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from normscope.cli.main import run
from normscope.nn import load_model
from normscope.subjects import load
from normscope.train import RunConfig, trains
from normscope.train.run_config import read_table

MODEL = "nn:decoder,depth=2,width=16,heads=2,context=160"
QUICK = ("--steps", "6", "--batch-size", "2", "--seq-len", "16")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_json_is_one_object_and_the_folder_holds_the_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", MODEL, *QUICK, "--lr", "1e-2", "-o", "one", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert said["schema"] == "normscope.train/1"
    assert said["steps"] == 6
    assert RunConfig.from_dict(said["config"]) == RunConfig.from_dict(
        read_table(here / "one" / "config.toml")
    )
    records = [json.loads(line) for line in (here / "one/losses.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 6
    assert said["loss"] == pytest.approx(sum(losses) / 6)
    assert said["trained"] is trains(losses, said["unigram_entropy"])
    assert said["validation"] == {"step": 6, "loss": records[-1]["validation"]}
    assert len(err.splitlines()) == 6, "a line a step of so few"
    assert "unigram 3." in err
    assert len(said["sample"]["text"]) > 0
    assert load_model(said["trained_model"]).config.depth == 2
    assert load(f"nn:{said['trained_model']}").loss_fn is not None


def test_text_opens_with_the_verdict_and_trained_means_trained(capsys: pytest.CaptureFixture[str]) -> None:
    short = "nn:decoder,depth=1,width=64,context=160"
    assert run(["train", short, "--steps", "120", "--lr", "1e-2", "--seq-len", "32", "-o", "run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("trained: the loss ends at ")
    assert "below the unigram entropy" in out.splitlines()[0]
    assert run(["train", short, "--steps", "4", "--lr", "1e-5", "-o", "slow"]) == 0
    assert capsys.readouterr().out.startswith("not yet trained: ")


def test_a_file_with_options_on_top(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = f'model = "{MODEL}"\nsteps = 99\nbatch-size = 2\nseq_len = 16\nlr = 1e-3\n'
    (here / "mine.toml").write_text(body, encoding="utf-8")
    assert run(["train", "mine.toml", "--steps", "2", "--schedule", "cosine", "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["steps"], said["config"]["lr"], said["config"]["schedule"]) == (2, 1e-3, "cosine")
    assert said["folder"].startswith("runs/mine-")


def test_the_same_command_again_and_resume(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", MODEL, "--batch-size", "2", "--seq-len", "16", "--format", "json"]
    assert run([*words, "--steps", "4", "--resume"]) == 0, "--resume begins where nothing is"
    folder = json.loads(capsys.readouterr().out)["folder"]
    assert run([*words, "--steps", "4"]) == 2
    assert "holds a run" in capsys.readouterr().err
    assert run([*words, "--steps", "6", "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["resumed_at"] == 4
    assert run(["train", folder, "--steps", "8", "--resume", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["resumed_at"] == 6
    assert run([*words, "--steps", "8", "-o", "whole", "--validate-every", "4"]) == 0

    def losses(run_folder: str) -> list[str]:
        lines = (here / run_folder / "losses.jsonl").read_text().splitlines()
        return [line for line in lines if "loss" in json.loads(line)]

    assert losses(folder) == losses("whole")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([MODEL, "--lr", "-1"], "learning rate -1.0"),
        ([MODEL, "--lr", "0"], "positive"),
        ([MODEL, "--steps", "-1"], "steps -1"),
        ([MODEL, "--optimizer", "adamm"], 'nearest name is "adam"'),
        ([MODEL, "--precision", "float8"], "precision 'float8'"),
        ([MODEL, "--validation", "1"], "validation = 1.0"),
        ([MODEL, "--text", "nowhere.txt"], "not found"),
        ([MODEL, "--text", "empty.txt"], "empty"),
        ([MODEL, "--text", "short.txt", "--validation", "0"], "at least one sequence"),
        ([MODEL, "--text", "short.txt"], "sequence"),
        ([MODEL, "--format", "html"], "is not one of 'text', 'json'"),
        ([MODEL, "--checkpoint-every", "often"], 'every "often"'),
        ([MODEL, "--checkpoint-every", "0"], 'every "0"'),
        ([MODEL, "--checkpoint-every", "nans"], 'every "nans"'),
        ([MODEL, "--parallel", "ddp"], "torchrun"),
        ([MODEL, "--parallel", "dpp"], 'nearest name is "ddp"'),
        ([MODEL, "--device", "warp"], 'device "warp"'),
        (["nn:decodr"], 'nearest name is "decoder"'),
        (["nothing.toml"], "No such file"),
        (["broken.toml"], "a TOML file"),
        (["unknown.toml"], 'nearest name is "batch-size"'),
        (["nomodel.toml"], "without a model"),
        (["folder"], "--resume"),
        (["folder", "--resume"], "without a config.toml"),
        ([MODEL, "-o", "short.txt"], "a file: expected a folder"),
        ([MODEL, "-o", "short.txt/in"], "Not a directory"),
        (["noloss.py:build"], "without a loss"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_run_is_one_line_and_status_2(
    words: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "empty.txt").touch()
    (here / "short.txt").write_text("ten bytes.", encoding="utf-8")
    (here / "folder").mkdir()
    (here / "broken.toml").write_text("lr = = 1", encoding="utf-8")
    (here / "unknown.toml").write_text(f'model = "{MODEL}"\nbatchsize = 1\n', encoding="utf-8")
    (here / "nomodel.toml").write_text("lr = 1e-3\n", encoding="utf-8")
    body = "import torch\n\n\ndef build():\n    return torch.nn.Linear(4, 4), torch.ones(1, 4)\n"
    (here / "noloss.py").write_text(body, encoding="utf-8")
    assert run(["train", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.strip().splitlines()) == 1, err
    assert not (here / "runs").exists(), "no litter"


def test_a_checkpoint_of_another_config_or_text_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    words = ["train", MODEL, "--text", "text.txt", *QUICK, "-o", "run"]
    assert run(words) == 0
    kept = (here / "run/config.toml").read_bytes()
    capsys.readouterr()
    for change, said in [
        (("--lr", "1e-2"), "lr = 0.01 for a checkpoint of 0.0003"),
        (("--seed", "3"), "seed = 3 for a checkpoint of 0"),
        (("--steps", "3"), "steps = 3 for a checkpoint of 6"),
        (("--schedule", "cosine"), "schedule = 'cosine'"),
    ]:
        assert run([*words, *change, "--resume"]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert len(err.strip().splitlines()) == 1
        assert (here / "run/config.toml").read_bytes() == kept
    (here / "text.txt").write_text(
        "pack my box with five dozen liquor jugs, said he. " * 40, encoding="utf-8"
    )
    assert run([*words, "--resume"]) == 2
    assert "data that differ from the checkpoint" in capsys.readouterr().err
    text = "the quick brown fox jumps over the lazy dog. " * 40
    for place in range(
        100, 1500, 200
    ):  # batches begin at random places: the first sees only some of the text
        (here / "text.txt").write_text(f"{text[:place]}~{text[place + 1 :]}", encoding="utf-8")
        assert run([*words, "--resume"]) == 2, place


def test_a_folder_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_only(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", read_only)
    assert run(["train", MODEL, *QUICK]) == 2
    err = capsys.readouterr().err
    assert "Read-only file system" in err
    assert len(err.strip().splitlines()) == 1


def test_two_processes_cannot_train_in_one_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from normscope.train.folder import RunFolder

    with RunFolder(here / "run").claimed(resume=False):
        assert run(["train", MODEL, *QUICK, "-o", "run"]) == 2
    assert "another process" in capsys.readouterr().err
    assert run(["train", MODEL, *QUICK, "-o", "run"]) == 0


def test_a_loss_that_stays_infinite_ends_the_run_early_and_is_said(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = (
        "import torch\n\n\ndef build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))\n"
        "    return model, torch.ones(2, 3, 4), lambda output, batch: output.sum() * float('inf')\n"
    )
    (here / "mine.py").write_text(body, encoding="utf-8")
    assert run(["train", "mine.py:build", "--steps", "90", "-o", "run", "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["steps"], said["loss"], said["unigram_entropy"]) == (20, None, None)
    first = json.loads((here / "run/losses.jsonl").read_text().splitlines()[0])
    figures = {"step": 0, "loss": None, "lr": 3e-4, "gradient_norm": None}
    assert first == figures | {"schema": "normscope.losses/1"}
    assert (here / "run/model/model.safetensors").is_file()


def test_ctrl_c_says_how_to_go_on(here: Path) -> None:
    command = [sys.executable, "-m", "normscope", "train", MODEL, "--steps", "100000", "-o", "run"]
    process = subprocess.Popen(command, cwd=here, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    losses = here / "run/losses.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (losses.exists() and losses.stat().st_size > 200):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert 'To continue: normscope train "run" --resume' in err
    assert out.startswith("interrupted after ")
    checkpoint = max((here / "run/checkpoints").iterdir())
    step = int(checkpoint.name.removeprefix("step-"))
    assert f"interrupted after step {step}" in err


@pytest.mark.parametrize(
    "words",
    [
        ("nn:encoder-decoder,depth=1,width=16",),
        ("nn:encoder-decoder,depth=1,width=16", "--source", "lines.txt", "--target", "lines.txt"),
        ("nn:vision,depth=1,width=16",),
        ("nn:vision,depth=1,width=16", "--images", "digits"),
        ("nn:encoder,depth=1,width=16", "--precision", "bfloat16"),
        pytest.param(
            ("hf:bert,num_hidden_layers=1,hidden_size=16,num_attention_heads=2,intermediate_size=32",),
            marks=pytest.mark.slow,
        ),
        ("hf:t5,num_layers=1,d_model=16,num_heads=2,d_kv=8,d_ff=32,vocab_size=300",),
    ],
    ids=" ".join,
)
def test_every_kind_of_model_and_data_trains_and_goes_on(
    words: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "lines.txt").write_text("\n".join(f"line {i} of these" for i in range(40)), encoding="utf-8")
    common = ["--batch-size", "2", "--seq-len", "8", "--format", "json", "-o", "run", "--resume"]
    assert run(["train", *words, *common, "--steps", "2"]) == 0
    assert run(["train", *words, *common, "--steps", "3"]) == 0
    err = capsys.readouterr().err
    assert "Traceback" not in err
    lines = [json.loads(line) for line in (here / "run/losses.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [0, 1, 2]


def test_hugging_faces_models_are_left_so_that_load_reads_them(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = "hf:gpt2,n_layer=1,n_embd=16,n_head=2,vocab_size=256"
    assert run(["train", spec, *QUICK, "-o", "run", "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["sample"]["text"]) > 0
    again = load("hf:run/model", batch_size=2, seq_len=16)
    assert sum(p.numel() for p in again.model.parameters()) > 0


@pytest.mark.parametrize("words", [(MODEL, "--optimizer", "sgd"), ("hf:gpt2,n_layer=1,n_embd=16,n_head=2",)])
def test_a_run_that_diverges_ends_with_its_verdict(
    words: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--lr", "1e20", "--steps", "90", "--batch-size", "2", "--seq-len", "16", "-o", "run"]
    assert run(["train", *words, *common, "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["outcome"], said["loss"], said["sample"]) == ("did not train", None, None)
    assert [note for note in said["notes"] if note.startswith("no sample: ")]


@pytest.mark.parametrize(
    "spec",
    ["hf:gpt2,n_layer=1,n_embd=16,n_head=2,n_positions=16", "nn:decoder,depth=1,width=16,context=16"],
)
def test_a_context_that_is_full_leaves_no_room_for_a_sample(
    spec: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", spec, *QUICK, "-o", "run", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["sample"] is None
    assert "shards" not in err, "a pipe sees no bars of other libraries"


def test_a_file_with_a_relative_text_is_gone_on_with_from_anywhere(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    (here / "mine.toml").write_text(f'model = "{MODEL}"\ntext = "text.txt"\n', encoding="utf-8")
    assert run(["train", "mine.toml", *QUICK, "-o", "run"]) == 0
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert run(["train", "../run", "--steps", "7", "--resume"]) == 0, capsys.readouterr().err
