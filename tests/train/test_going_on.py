"""Resumed runs: allowed changes, messages, cost, and the contents of `losses.jsonl`."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from normscope.errors import UsageError
from normscope.subjects import Subject, feed, load
from normscope.train import Run, RunConfig, Trial, rate_factor
from normscope.train.folder import RunFolder
from normscope.train.prepare import prepared
from normscope.train.run_config import read_table

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
SMALL = {
    "model": "nn:decoder,depth=1,width=8,heads=1,vocab=64,context=16",
    "batch_size": 2,
    "seq_len": 8,
    "steps": 6,
    "lr": 1e-2,
}


def gone(folder: Path | None, config: dict[str, Any], every: int = 3, **options: Any) -> Run:
    """Run a config to its end."""
    often = {"checkpoint_every": every}
    with prepared(RunConfig.from_dict(SMALL | often | config), folder=folder, **options) as run:
        run.go()
    return run


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on its own text."""
    home = tmp_path_factory.mktemp("stopped")
    (home / "text.txt").write_text(TEXT, encoding="utf-8")
    gone(home / "run", {"steps": 3, "text": str(home / "text.txt"), "validate_every": 2})
    return home


@pytest.fixture
def home(stopped: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(stopped, tmp_path / "home")


def test_validations_go_on_as_often_as_they_were_asked_for(home: Path) -> None:
    config = RunConfig.from_dict(read_table(home / "run" / "config.toml")).replace(steps=8)
    with prepared(config, folder=home / "run", resume=True) as run:
        assert run.began_at == 3
        run.go()
    steps = [record["step"] for record in records(home / "run") if "validation" in record]
    assert steps == [0, 2, 3, 4, 6, 8]


def test_checkpoints_go_on_as_often_as_they_were_asked_for(home: Path) -> None:
    config = RunConfig.from_dict(read_table(home / "run" / "config.toml")).replace(steps=5)
    assert config.checkpoint_every == "3"
    with prepared(config, folder=home / "run", resume=True) as run:
        assert run.every.steps == 3
    with prepared(config.replace(checkpoint_every="2s"), folder=home / "run", resume=True) as run:
        assert (run.every.steps, run.every.seconds) == (None, 2.0)


def test_what_killed_writers_left_is_gone_when_a_run_goes_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    halves = [place / ".half-1-file" for place in (folder.path, folder.tokens, folder.model)]
    for half in halves:
        half.parent.mkdir(exist_ok=True)
        half.touch()
    with folder.claimed(resume=True):
        assert not any(half.exists() for half in halves)


def test_a_run_without_the_setting_validates_ten_times() -> None:
    run = gone(None, {"steps": 20})
    assert [step for step, _ in run.validations] == list(range(0, 21, 2))


def test_a_text_that_was_moved_and_another_device_go_on_to_the_bit(home: Path) -> None:
    (home / "text.txt").rename(home / "moved.txt")
    whole = gone(None, {"text": str(home / "moved.txt")})
    changes = {"text": str(home / "moved.txt"), "device": "cpu:0", "validate_every": 5}
    run = gone(home / "run", changes, resume=True)
    assert run.began_at == 3
    assert run.trial.losses == whole.trial.losses
    assert run.trial.gradient_norms == whole.trial.gradient_norms


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "data that differ from the checkpoint"),
        ({"lr": 2e-2}, "lr = 0.02 for a checkpoint of 0.01"),
        ({"beta2": 0.95}, "beta2 = 0.95 for a checkpoint of None"),
        ({"batch_size": 1}, "batch-size = 1"),
        ({"steps": 2}, "steps = 2 for a checkpoint of 3"),
    ],
    ids=str,
)
def test_other_data_or_another_recipe_is_refused(home: Path, changed: dict, words: str) -> None:
    if not changed:
        (home / "text.txt").write_text(TEXT.replace("lazy", "late"), encoding="utf-8")
    config = {"text": str(home / "text.txt")} | changed
    with pytest.raises(UsageError, match=words):
        gone(home / "run", config, resume=True)


def test_words_in_another_order_are_other_data(home: Path) -> None:
    """The counts of letters, and so the entropy, are the same, but the batches differ."""
    (home / "text.txt").write_text(TEXT.replace("quick brown", "brown quick"), encoding="utf-8")
    with pytest.raises(UsageError, match="data that differ from the checkpoint"):
        gone(home / "run", {"text": str(home / "text.txt")}, resume=True)


def test_accumulated_batches_are_counted_when_a_run_goes_on(tmp_path: Path) -> None:
    whole = gone(None, {"accumulation": 2})
    gone(tmp_path, {"accumulation": 2, "steps": 3})
    assert gone(tmp_path, {"accumulation": 2}, resume=True).trial.losses == whole.trial.losses


@pytest.mark.parametrize(
    ("schedule", "refused"),
    [
        ({"schedule": "cosine"}, True),
        ({"schedule": "wsd", "decay_steps": 2}, False),
        ({"schedule": "wsd", "decay_steps": 5}, True),
        ({"schedule": "constant"}, False),
    ],
    ids=str,
)
def test_more_steps_are_taken_where_those_before_stay_as_they_were(
    schedule: dict, refused: bool, tmp_path: Path
) -> None:
    """The first two steps of a run of six; with eight the cosine would differ."""

    def stop(trial: Trial) -> None:
        if trial.step == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        gone(tmp_path, schedule, every=2, observers=[stop])
    if refused:
        with pytest.raises(UsageError, match="steps = 8 for a checkpoint of 6"):
            gone(tmp_path, schedule | {"steps": 8}, resume=True)
    else:
        assert gone(tmp_path, schedule | {"steps": 8}, resume=True).began_at == 2


def test_a_damaged_checkpoint_is_said_and_the_run_comes_to_the_same_end(tmp_path: Path) -> None:
    whole = gone(None, {})
    gone(tmp_path, {"steps": 4}, every=2)
    (tmp_path / "checkpoints/step-00000004/state.safetensors").write_bytes(b"x")
    with pytest.warns(UserWarning, match="step 2"):
        run = gone(tmp_path, {}, resume=True)
    assert run.began_at == 2
    assert "continuing from the checkpoint of step 2" in run.notes[0]
    assert run.trial.losses == whole.trial.losses


def test_going_on_draws_no_batch_of_the_blocks_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "BLOCK", 2)
    config = {"validation": 0.0}
    whole = gone(None, config)
    gone(tmp_path, config | {"steps": 5})
    blocks: list[int] = []
    of_block = feed.Portions.of_block

    def seen(portions: feed.Portions, block: int) -> feed.Portions:
        blocks.append(block)
        return of_block(portions, block)

    monkeypatch.setattr(feed.Portions, "of_block", seen)
    run = gone(tmp_path, config, resume=True)
    assert run.began_at == 5
    assert [block for block in blocks if block] == [2]
    assert run.trial.losses == whole.trial.losses


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_run_has_a_folder_for_the_tokens_of_its_whole_text(
    is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Path] = []

    def seen(*args: Any, tokens: Path, **options: Any) -> Subject:
        given.append(tokens)
        return load(*args, **options)

    monkeypatch.setattr("normscope.train.run_config.load", seen)
    gone(tmp_path if is_kept else None, {"steps": 1})
    assert (given[0] == tmp_path / "tokens") == is_kept
    assert not given[0].exists(), "empty where a model has no tokenizer, and a temporary one is gone"


def test_each_line_has_the_learning_rate_and_the_norm_of_the_gradients(tmp_path: Path) -> None:
    config = {"schedule": "cosine", "warmup": 2, "clip": 1e-3, "validation": 0.0}
    norms: list[float] = []

    def look(trial: Trial) -> None:
        gradients = [p.grad for p in trial.model.parameters() if p.grad is not None]
        assert float(torch.stack([g.norm() for g in gradients]).norm()) == pytest.approx(1e-3, rel=1e-3)
        norms.append(trial.gradient_norms[-1])

    run = gone(tmp_path, config, observers=[look])
    trial = RunConfig.from_dict(SMALL | config).trial
    assert records(tmp_path) == [
        {
            "step": n,
            "loss": run.trial.losses[n],
            "lr": 1e-2 * rate_factor(trial, n),
            "gradient_norm": norms[n],
            "schema": "normscope.losses/1",
        }
        for n in range(6)
    ]
    assert all(norm > 1e-2 for norm in norms), "before clipping"


def test_a_loss_that_is_no_number_has_null_in_its_line(tmp_path: Path) -> None:
    with prepared(RunConfig.from_dict(SMALL | {"validation": 0.0}), folder=tmp_path) as run:
        evaluated = run.trial.loss
        run.trial.loss = lambda model, batch: evaluated(model, batch) * math.nan
        run.go()
    figures = {"step": 0, "loss": None, "lr": 1e-2, "gradient_norm": None}
    assert records(tmp_path)[0] == figures | {"schema": "normscope.losses/1"}
