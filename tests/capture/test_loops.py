"""Training loops of many kinds under `check -- COMMAND`: each loss is the script's, each fact its recipe's.

Loops that need no process of their own run in this one, under the same watcher.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import here
import numpy as np
import pytest
import torch

from normscope.capture import launch
from normscope.capture.folder import VARIABLE, Folder, Settings

SCRIPTS = here.SCRIPTS
STEPS = 5
CHECK = [sys.executable, "-m", "normscope", "check", "--format", "json", "--budget", "fast"]
TORCHRUN = "python -m torch.distributed.run --nproc-per-node 2"


@dataclass(frozen=True)
class Loop:
    """A loop and what has to be seen of it.

    Attributes:
        words: its command line, without `python` where it needs no process of its own.
        optimizers: name of each, and of each group: tensors, learning rate, weight decay.
        recipe: further facts, other than the ones of the plainest loop.
        blocks: number of blocks that are read.
        says: texts in the line on the input.
        module: `--module`.
        losses: the word before the losses that the script prints.
        verdict: the report's verdict.
    """

    words: str
    optimizers: tuple[tuple[str, tuple[tuple[int, float, float], ...]], ...]
    recipe: Mapping[str, Any] = field(default_factory=dict)
    blocks: int = 2
    says: tuple[str, ...] = ()
    module: str | None = None
    losses: str = "loss of step"
    verdict: str = "healthy"


def one(name: str = "AdamW", tensors: int = 29, lr: float = 1e-3, decay: float = 0.01) -> Any:
    return ((name, ((tensors, lr, decay),)),)


BY_KIND = (("AdamW", ((11, 1e-3, 0.1), (18, 1e-3, 0.0))),)
OF_GPT2 = (("AdamW", ((10, 1e-3, 0.1), (18, 1e-3, 0.0))),)
PLAIN_GPT2 = (("AdamW", ((10, 1e-3, 0.0), (18, 1e-3, 0.0))),)
MICRO = {"clip": 1.0, "accumulation": 4, "schedule": "recorded"}
HERE = {
    "accumulation": Loop("accumulated.py", BY_KIND, MICRO),
    "losses by the items of a step": Loop("accumulated.py --items", BY_KIND, MICRO),
    "losses by the items of a step, of which the later ones are shorter": Loop(
        "accumulated.py --items --shorter", BY_KIND, MICRO
    ),
    "float16, with a skipped step": Loop(
        "accumulated.py --float16 --overflow",
        BY_KIND,
        MICRO | {"precision": "float16"},
        says=("the loss scaler skipped 1 of 5 steps",),
    ),
    "two optimizers under a scaler": Loop(
        "loops.py two_scaled",
        one(tensors=26) + one(tensors=3),
        says=("the loss scaler skipped 1 of 5 steps", "the loss scaler skipped some optimizers in 1 of 5"),
    ),
    "torch.compile(model)": Loop("accumulated.py --compile", BY_KIND, MICRO),
    "model.compile()": Loop("accumulated.py --compile-in-place", BY_KIND, MICRO),
    "Muon and AdamW": Loop("loops.py muon", (("Muon", ((8, 0.02, 0.1),)), ("AdamW", ((21, 1e-3, 0.01),)))),
    "optimizers in the backward": Loop("loops.py in_backward", one(tensors=1) * 29),
    "LBFGS": Loop("loops.py lbfgs", (("LBFGS", ((29, 0.1, None),)),)),
    "distillation": Loop("loops.py distilled", one()),
    "teacher with gradients": Loop("loops.py online", one()),
    "activation checkpointing": Loop("loops.py checkpointed", one()),
    "loss of the model, a scheduler": Loop(
        "loops.py own_loss", one("SGD", lr=0.1, decay=0.0), {"schedule": "CosineAnnealingLR"}
    ),
    "loss beside the output, a warm-up that goes on": Loop(
        "loops.py side_loss",
        one(),
        {"accumulation": 2, "schedule": "recorded", "warmup": 50},
        says=("no loss of copies",),
        verdict="no trial",
    ),
    "two backwards of micro-batches": Loop(
        "loops.py two_shares", one(), {"accumulation": 2}, says=("no loss of copies",)
    ),
    "LoRA": Loop("loops.py lora", one(tensors=8)),
    "optimizer of the user's": Loop("loops.py scheduled_free", one("Averaged", decay=None)),
    "compiled loss": Loop("loops.py compiled_loss", one()),
    "two backwards": Loop("loops.py two_losses", one(tensors=30), says=("no loss of copies",)),
    "two backwards and steps": Loop(
        "loops.py two_optimizers", one(tensors=1) + one(tensors=29), says=("no loss of copies",)
    ),
    "two scaled backwards and steps, micro-batches": Loop(
        "loops.py two_scaled_optimizers",
        one(tensors=1) + one(tensors=29),
        {"accumulation": 2},
        says=("no loss of copies",),
    ),
    "weights outside the forward": Loop(
        "loops.py head_outside", one(tensors=28), says=("no loss of copies",)
    ),
    "autocast only": Loop("loops.py half_inputs", one(), {"precision": "bfloat16"}),
    "collective in the forward": Loop(
        "loops.py communicating",
        one(),
        blocks=0,
        says=("only the loss is judged: the model's forward communicates with other processes (allreduce)",),
        verdict="at risk",
    ),
    "two models: the larger": Loop(
        "adversarial.py",
        one("Adam", 40, lr=4e-4, decay=0.0),
        {"accumulation": 2},
        blocks=3,
        says=("Critic (38.2k trained weights) was taken, the largest; others: Generator (26.5k)",),
        losses="critic",
    ),
    "two models: the named": Loop(
        "adversarial.py",
        one("Adam", 28, lr=2e-4, decay=0.0),
        says=("Generator (26.5k trained weights) was taken, as --module asks", "no loss of copies"),
        module="Generator",
        losses="generator",
    ),
}
APART = {
    "Hugging Face Trainer, bfloat16": Loop(
        "python hf_trainer.py --bf16",
        OF_GPT2,
        {"clip": 0.5, "accumulation": 2, "precision": "bfloat16"},
    ),
    "TRL SFTTrainer": Loop("python with_trl.py", PLAIN_GPT2, {"clip": 1.0}),
    "Lightning": Loop(
        "python with_lightning.py",
        one(decay=0.05),
        {"clip": 0.25, "accumulation": 2, "schedule": "LinearLR"},
    ),
    "accelerate launch": Loop(
        "python -m accelerate.commands.launch --cpu --num_processes 1 with_accelerate.py",
        one(lr=2e-3),
        {"clip": 1.0, "accumulation": 2, "schedule": "LambdaLR"},
    ),
    "torchrun, DDP": Loop(f"{TORCHRUN} distributed.py", one(), {"clip": 1.0}),
    "torchrun, collective in the forward": Loop(
        f"{TORCHRUN} distributed.py --reduce",
        one(),
        {"clip": 1.0},
        blocks=0,
        says=("only the loss is judged: the model's forward communicates with other processes (allreduce)",),
        verdict="at risk",
    ),
    "torchrun, FSDP2": Loop(
        f"{TORCHRUN} distributed.py --shard",
        one(),
        {"clip": 1.0},
        blocks=0,
        verdict="at risk",
        says=("only the loss is judged: the weights are sharded over processes",),
    ),
}
PLAIN = {"own": True, "schedule": "constant", "warmup": 0, "clip": None, "accumulation": 1}
PLAIN |= {"precision": "float32"}


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # the script's process ignores it too
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of Dynamo's own
@pytest.mark.parametrize("loop", HERE.values(), ids=HERE)
def test_a_loop_in_this_process(loop: Loop, tmp_path: Path, monkeypatch, capsys) -> None:
    folder = watched(loop.words, tmp_path, monkeypatch, module=loop.module)
    report = folder.report()
    assert report is not None, folder.facts()
    assert report.verdict == loop.verdict, (report.findings, folder.facts())
    agrees(loop, json.loads(report.to_json()), capsys.readouterr().out)


def test_a_loop_whose_later_steps_cannot_be_seen_is_judged_by_its_first(tmp_path: Path, monkeypatch) -> None:
    folder = watched("loops.py blind 2", tmp_path, monkeypatch)
    settings: Any = settings_of("loops.py blind 2")
    outcome = launch._outcome(folder, folder.report(), settings, None)
    reason = "its optimizer steps without a backward from its model after 2 of 5 steps"
    assert outcome.reason == f"{reason}; the report has what was seen"
    assert not outcome.is_whole
    assert outcome.report is not None
    assert outcome.report.verdict == "interrupted"
    assert {reason, "3 more optimizer steps had no backward from the model"} <= set(outcome.report.notes)
    assert [step.step for step in outcome.report.forecast.curve] == [0, 2]


@pytest.mark.parametrize(("first", "warmup"), [(0, 4), (1, 3)])
def test_the_warmup_of_the_trial_is_that_of_the_recipe(
    first: int, warmup: int, tmp_path: Path, monkeypatch
) -> None:
    """Both count to the first step with the full rate, which is one later where step 1 has none."""
    report = watched(f"loops.py warming {first}", tmp_path, monkeypatch).report()
    assert report is not None
    assert report.recipe["warmup"] == warmup
    assert report.forecast.warmup == warmup


@pytest.mark.parametrize("first", [0, 1])
def test_the_next_step_is_compared_with_the_full_rate(first: int, tmp_path: Path, monkeypatch) -> None:
    """The first step of a warm-up has less of it, or none."""
    report = watched(f"loops.py warming_by_hand {first}", tmp_path, monkeypatch).report()
    assert report is not None
    assert report.recipe["optimizers"][0]["groups"][0]["lr"] == 1e-3
    critical = report.measurements.of("step/critical-rate")[""]
    assert report.measurements.of("step/critical-over-lr")[""] == pytest.approx(critical / 1e-3)


def test_a_batch_is_that_of_its_forward(tmp_path: Path, monkeypatch, capsys) -> None:
    folder = watched("loops.py static_buffers", tmp_path, monkeypatch)
    report = folder.report()
    assert report is not None, folder.facts()
    agrees(Loop("", one()), json.loads(report.to_json()), printed := capsys.readouterr().out)
    first = float(re.search(r"loss of step 1 (\S+)", printed)[1])
    assert report.forecast.curve[0].loss == pytest.approx(first, rel=1e-6)


def test_all_losses_of_the_first_step_are_counted(tmp_path: Path, monkeypatch, capsys) -> None:
    folder = watched("loops.py two_scaled_optimizers", tmp_path, monkeypatch)
    report = folder.report()
    assert report is not None, folder.facts()
    first = float(re.search(r"loss of step 1 (\S+)", capsys.readouterr().out)[1])
    assert report.forecast.curve[0].loss == pytest.approx(first, rel=1e-4)


def test_a_loop_none_of_whose_steps_can_be_seen_is_refused(tmp_path: Path, monkeypatch) -> None:
    folder = watched("loops.py blind 0", tmp_path, monkeypatch)
    assert folder.report() is None
    given, expected, _ = folder.facts()["refusal"]
    assert given == "`loops.py blind 0`: its optimizer steps without a backward from its model"
    assert "loss.backward()" in expected


BY_HAND = "torchrun, collective in the forward"
"""A loop of `HERE` under a launcher of others."""


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(loop, id=name, marks=pytest.mark.slow if name == BY_HAND else ())
        for name, loop in APART.items()
    ],
)
def test_a_loop_in_processes_of_its_own(loop: Loop, tmp_path: Path) -> None:
    before = {path.name for path in SCRIPTS.iterdir()} - {"__pycache__"}
    done = checked(loop.words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    agrees(loop, json.loads(done.stdout), done.stderr)
    assert not list(tmp_path.glob("normscope-*")), "a file of the check is left"
    assert {path.name for path in SCRIPTS.iterdir()} - {"__pycache__"} == before
    assert not running(tmp_path), "a process of the script is left"


def agrees(loop: Loop, report: Mapping[str, Any], printed: str) -> None:
    """Hold a report to the facts of its loop."""
    forecast, recipe = report["forecast"], report["recipe"]
    number = r"nan|inf|-?\d+\.\d+\S*"
    said = re.findall(rf"{loop.losses} (\d+) ({number})", printed)
    found = {int(n): float(loss) for n, loss in said}
    seen = {step["step"]: float(step["train_loss"]) for step in forecast["curve"] if step["step"]}
    assert set(seen) == {2, STEPS}
    assert forecast["steps"] == STEPS
    compared = set(seen) & set(found)
    assert 2 in compared
    for step in compared:
        assert seen[step] == pytest.approx(found[step], rel=1e-4, nan_ok=True), f"step {step}"
    groups = tuple(
        (each["name"], tuple((g["tensors"], g["lr"], g.get("weight_decay")) for g in each["groups"]))
        for each in recipe["optimizers"]
    )
    assert groups == tuple(
        (name, tuple((tensors, pytest.approx(lr), decay) for tensors, lr, decay in parts))
        for name, parts in loop.optimizers
    )
    expected = PLAIN | loop.recipe
    assert {name: recipe[name] for name in expected} == expected
    assert len(report["anatomy"]["blocks"]) == loop.blocks
    assert report["seed"] is None
    for text in loop.says:
        assert any(text in note for note in report["notes"]) or text in report["findings"][0]["message"]
    assert report["verdict"] == loop.verdict


@pytest.mark.parametrize(("kind", "unit"), [("plain", 1), ("scaled", 1), ("summed", 8 * 24)])
def test_accumulated_losses_have_the_loss_to_beat_of_their_mean(
    kind: str, unit: int, tmp_path: Path, monkeypatch, capsys
) -> None:
    report = watched(f"loops.py quarters {kind}", tmp_path, monkeypatch).report()
    assert report is not None
    recipe = {"accumulation": 4, "precision": "bfloat16" if kind == "scaled" else "float32"}
    agrees(Loop("", one(), recipe), json.loads(report.to_json()), capsys.readouterr().out)
    with open(torch.__file__, "rb") as file:
        counts = np.bincount([byte for byte in file.read() if byte < 128])
    shares = counts[counts > 0] / counts.sum()
    entropy = -float((shares * np.log(shares)).sum())
    assert report.forecast.unigram_entropy == pytest.approx(entropy, abs=0.15)
    assert report.forecast.loss_unit == pytest.approx(unit, rel=1e-3)
    assert report.forecast.baseline.loss == pytest.approx(unit * entropy, rel=0.05)


def test_a_model_that_is_no_transformer_is_one_line(tmp_path: Path) -> None:
    done = checked("python loops.py picture", tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "no residual sum was found" in done.stderr.splitlines()[-1]
    assert not running(tmp_path)


def settings_of(words: str, module: str | None = None) -> Settings:
    return Settings(command=words, steps=STEPS, budget="fast", module=module)


def watched(words: str, path: Path, monkeypatch, module: str | None = None) -> Folder:
    """The folder of a check of the loop `words` in this process."""
    folder, is_ended = here.watched(words, path, settings_of(words, module), monkeypatch)
    assert is_ended
    return folder


def checked(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    return subprocess.run(
        [*CHECK, "--steps", str(STEPS), "--", *words.split()],
        cwd=SCRIPTS,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def running(folder: Path) -> list[int]:
    """Processes of a check whose temporary files are in `folder`."""
    mark, found = f"{VARIABLE}={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # another user's, or gone
            continue
    return found
