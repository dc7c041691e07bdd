"""After kill -9 at random moments, a full disk or Ctrl-C, a run continues bit by bit as if undisturbed."""

import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from normscope.errors import UsageError
from normscope.train import RunConfig
from normscope.train.checkpoints import Checkpoints
from normscope.train.prepare import prepared

SMALL = {"steps": 24, "lr": 1e-2, "batch_size": 2, "seq_len": 16}
MODEL = "nn:decoder,depth=2,width=16,heads=2,context=32,dropout=0.1"
CONFIGS = [
    {"model": f"{MODEL},scheme=pre", "accumulation": 2, "schedule": "cosine", "warmup": 5},
    {"model": f"{MODEL},scheme=sigma-reparam,checkpoint=true", "optimizer": "sgd", "clip": 0.5},
    {"model": f"{MODEL},scheme=ngpt", "optimizer": "muon", "precision": "bfloat16"},
    {"model": f"{MODEL},scheme=post", "precision": "float16", "optimizer": "adam", "eps": 1e-6},
    {"model": "hf:gpt2,n_layer=2,n_embd=16,n_head=2,vocab_size=256", "weight_decay": 0.1},
]
FILES = ("losses.jsonl", "config.toml", "checkpoints/step-00000024/state.safetensors")


def train_here(config: dict, folder: str, every: int) -> None:
    """A whole `normscope train --resume`, without the command line."""
    config = SMALL | config | {"checkpoint_every": every}
    with prepared(RunConfig.from_dict(config), folder=Path(folder), resume=True) as run:
        run.go()


@pytest.fixture(scope="module")
def processes() -> multiprocessing.context.ForkServerContext:
    """New processes that have finished their imports."""
    context = multiprocessing.get_context("forkserver")
    # optimizers import torch._dynamo
    preload = ["normscope.train.prepare", "normscope.nn", "torch._dynamo", "transformers"]
    context.set_forkserver_preload(preload)
    return context


def begun(processes, config: dict, folder: Path, every: int = 1000) -> BaseProcess:
    process = processes.Process(target=train_here, args=(config, str(folder), every))
    process.start()
    return process


def finished(process: BaseProcess) -> None:
    process.join(60)
    assert process.exitcode == 0


def killed_and_gone_on_with(
    processes, config: dict, tmp_path: Path, kills: int, every: int, seed: int
) -> int:
    """Number of kills that hit a living run; the finished run is compared with an undisturbed one."""
    draw = random.Random(seed)
    finished(begun(processes, config, tmp_path / "warm", every))
    start = time.monotonic()
    finished(begun(processes, config, tmp_path / "whole", every))
    length = time.monotonic() - start
    folder, met, last = tmp_path / "killed", 0, 0
    for _ in range(kills):
        process = begun(processes, config, folder, every)
        process.join(draw.uniform(0, length))
        met += process.is_alive()
        process.kill()
        process.join()
        step = Checkpoints(folder / "checkpoints").last_step() or 0
        assert step >= last, "what was finished is not lost"
        last = step
    finished(begun(processes, config, folder, every))
    for name in FILES:
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert max(p.name for p in (folder / "checkpoints").iterdir()) == "step-00000024"
    return met


def test_a_run_killed_at_random_moments_has_the_curve_of_one_that_was_not(processes, tmp_path: Path) -> None:
    assert killed_and_gone_on_with(processes, CONFIGS[0], tmp_path, kills=2, every=2, seed=1) > 0


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model"].split(",")[-1])
@pytest.mark.parametrize("every", [1, 7])
def test_thirty_kills_and_more(processes, config: dict, every: int, tmp_path: Path) -> None:
    met = killed_and_gone_on_with(processes, config, tmp_path, kills=6, every=every, seed=every)
    print(f"{config['model']}: {met} of 6 kills met the run alive")
    assert met > 0


def train_on_a_small_disk(config: dict, folder: str, every: int) -> None:
    """Exit status 2 and one line for a file that grows over the limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    try:
        train_here(config, folder, every)
    except UsageError as error:
        Path(folder, "error.txt").write_text(str(error), encoding="utf-8")
        sys.exit(2)


@pytest.mark.slow  # test_checkpoints.py refuses every call in turn
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(processes, tmp_path: Path) -> None:
    config, folder = CONFIGS[0], tmp_path / "run"
    finished(begun(processes, config, tmp_path / "whole", 1000))
    finished(begun(processes, config | {"steps": 3, "schedule": "constant"}, tmp_path / "short"))
    size = (tmp_path / "short/checkpoints/step-00000003/state.safetensors").stat().st_size
    assert size > 60_000, "a checkpoint does not fit the limit"
    process = processes.Process(target=train_on_a_small_disk, args=(config, str(folder), 5))
    process.start()
    process.join(60)
    assert process.exitcode == 2
    line = (folder / "error.txt").read_text(encoding="utf-8")
    assert "checkpoint of step 5" in line
    assert "File too large" in line
    assert "there is none yet" in line
    assert "\n" not in line
    finished(begun(processes, config, folder, 1000))
    for name in FILES:
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def train_and_interrupt(config: dict, folder: str, every: int) -> None:
    """Ctrl-C after the twelfth step; exit status 130 at the end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with prepared(
        RunConfig.from_dict(SMALL | config | {"checkpoint_every": every}),
        folder=Path(folder),
        observers=[lambda trial: os.kill(os.getpid(), signal.SIGINT) if trial.step == 12 else None],
    ) as run:
        try:
            run.go()
        except KeyboardInterrupt:
            sys.exit(130 if run.interrupted else 1)


@pytest.mark.slow  # tests/cli/test_train.py has one
def test_ctrl_c_writes_a_checkpoint_of_where_it_came(processes, tmp_path: Path) -> None:
    config, folder = CONFIGS[0], tmp_path / "run"
    process = processes.Process(target=train_and_interrupt, args=(config, str(folder), 1000))
    process.start()
    process.join(60)
    assert process.exitcode == 130
    step = Checkpoints(folder / "checkpoints").last_step()
    assert step is not None
    assert 12 <= step < 24
    finished(begun(processes, config, folder, 1000))
    finished(begun(processes, config, tmp_path / "whole", 1000))
    for name in FILES:
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
