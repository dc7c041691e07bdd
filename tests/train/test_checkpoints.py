"""Checkpoints: a restored trial continues bit by bit; an interrupted write leaves the last one intact."""

import errno
import itertools
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from normscope.atomic import remove_halves
from normscope.errors import UsageError
from normscope.nn import SCHEMES, build
from normscope.subjects.rng import put_random_state, take_random_state
from normscope.subjects.subject import call_model
from normscope.train import OPTIMIZERS, Recipe, Trial
from normscope.train.checkpoints import Checkpoints
from normscope.train.state import State, put_state, take_state

TOKENS = torch.randint(16, (40, 2, 9), generator=torch.Generator().manual_seed(0))
BATCHES = [{"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()} for ids in TOKENS]
HALF, END = 2, 4


def loss(model: nn.Module, batch: dict) -> torch.Tensor:
    return call_model(model, batch).loss


def trial_of(scheme: str, config: Recipe, seed: int = 0, **options: object) -> Trial:
    torch.manual_seed(seed)
    sizes = {"depth": 2, "width": 16, "heads": 2, "vocab": 16, "context": 16, "dropout": 0.1}
    model = build("decoder", scheme=scheme, **(sizes | options))
    return Trial(model, itertools.cycle(BATCHES), loss, config)


def steps(trial: Trial, number: int) -> None:
    for _ in range(number):
        trial.advance()


def goes_on_to_the_bit(scheme: str, config: Recipe, folder: Path, **options: object) -> None:
    """A trial, and another with other weights that gets its checkpoint, take the same steps."""
    first = trial_of(scheme, config, **options)
    steps(first, HALF)
    if first.scaler is not None:
        first.scaler.update(128.0)  # as after many overflows
    state = take_state(first, first.model)
    random_state = take_random_state()
    Checkpoints(folder).save(state)
    steps(first, END - HALF)

    second = trial_of(scheme, config, seed=1, **options)
    found = Checkpoints(folder).read()
    assert found is not None
    put_state(second, second.model, found)
    next(itertools.islice(second.batches, HALF * config.accumulation, HALF * config.accumulation), None)
    put_random_state(random_state)
    steps(second, END - HALF)
    assert second.losses == first.losses
    assert len(set(first.losses)) > 1
    ends = [take_state(trial, trial.model) for trial in (first, second)]
    assert ends[0].values == ends[1].values
    ours, theirs = (end.tensors for end in ends)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_goes_on_to_the_bit(scheme: str, tmp_path: Path) -> None:
    goes_on_to_the_bit(scheme, Recipe(lr=1e-2, steps=END), tmp_path)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "change",
    [
        {"precision": "float16", "clip": 0.1},
        {"precision": "bfloat16", "accumulation": 3},
        {"schedule": "cosine", "warmup": 2, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_every_optimizer_goes_on_to_the_bit(optimizer: str, change: dict, tmp_path: Path) -> None:
    config = Recipe(optimizer=optimizer, lr=1e-2, steps=END, **change)
    goes_on_to_the_bit("post", config, tmp_path, tie=True)


@pytest.mark.parametrize("options", [{"init": "mup", "base_width": 8}, {"checkpoint": True}], ids=str)
def test_mup_and_checkpointed_activations_go_on_to_the_bit(options: dict, tmp_path: Path) -> None:
    goes_on_to_the_bit("sigma-reparam" if "checkpoint" in options else "pre", Recipe(), tmp_path, **options)


def test_the_generators_come_back() -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)  # noqa: NPY002
    random.gauss(0, 1), np.random.standard_normal()  # noqa: NPY002 -- each keeps a second draw
    state = take_random_state()

    def draws() -> list[float]:
        return [
            *(random.gauss(0, 1) for _ in range(3)),
            *np.random.standard_normal(3),  # noqa: NPY002
            *torch.randn(3).tolist(),
        ]

    expected = draws()
    assert draws() != expected
    put_random_state(state)
    assert draws() == expected


def small_state(step: int) -> State:
    tensors = {"model.w": torch.full((3,), float(step)), "losses": torch.zeros(step, dtype=torch.float64)}
    return State(tensors, {"step": step, "config": {}})


class Killed(BaseException):
    """Stand-in for SIGKILL, except that `finally` still runs; the real one is in test_kill.py."""


FILE_SYSTEM = [
    (os, "open"),
    (os, "fsync"),
    (Path, "mkdir"),
    (Path, "write_text"),
    (Path, "replace"),
    (shutil, "rmtree"),
]


def calls_of_a_save(folder: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int, error: BaseException) -> int:
    """Save step 2 after step 1 while call `fail_at` to the file system raises; return the calls made."""
    made = 0

    def failing(real):
        def call(*args, **kwargs):
            nonlocal made
            made += 1
            if made == fail_at:
                raise error
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in FILE_SYSTEM:
            patch.setattr(owner, name, failing(getattr(owner, name)))
        Checkpoints(folder).save(small_state(2))
    return made


def test_a_save_that_dies_at_any_call_leaves_one_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Checkpoints(tmp_path / "all").save(small_state(1))
    calls = calls_of_a_save(tmp_path / "all", monkeypatch, -1, Killed())
    assert calls > 8
    kept = set()
    for fail_at in range(1, calls + 1):
        folder = tmp_path / str(fail_at)
        Checkpoints(folder).save(small_state(1))
        with pytest.raises(Killed):
            calls_of_a_save(folder, monkeypatch, fail_at, Killed())
        found = Checkpoints(folder).read()
        assert found is not None
        step = found.values["step"]
        assert torch.equal(found.tensors["model.w"], torch.full((3,), float(step)))
        kept.add(step)
        remove_halves(folder)
        Checkpoints(folder).save(small_state(3))
        kept_steps = sorted(path.name for path in folder.iterdir())
        assert kept_steps == [f"step-0000000{step}", "step-00000003"]
    assert kept == {1, 2}, "before the rename the old one, after it the new one"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_full_or_broken_disk_is_one_line_and_the_last_checkpoint_is_whole(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Checkpoints(tmp_path / "all").save(small_state(1))
    calls = calls_of_a_save(tmp_path / "all", monkeypatch, -1, Killed())
    for fail_at in range(1, calls + 1):
        folder = tmp_path / str(fail_at)
        Checkpoints(folder).save(small_state(1))
        with pytest.raises(UsageError) as error:
            calls_of_a_save(folder, monkeypatch, fail_at, OSError(number, os.strerror(number)))
        assert "\n" not in str(error.value)
        assert os.strerror(number) in str(error.value)
        assert "--resume" in str(error.value)
        assert Checkpoints(folder).read() is not None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_two_are_kept_and_saving_one_again_writes_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.read() is None
    assert checkpoints.last_step() is None
    for step in (1, 2, 10):
        checkpoints.save(small_state(step))
    checkpoints.save(small_state(2))
    checkpoints.save(small_state(3))
    assert names(tmp_path) == ["step-00000002", "step-00000003"], "10 was ahead of a run that went back"
    checkpoints.save(small_state(2))
    assert names(tmp_path) == ["step-00000002"]
    before = (tmp_path / "step-00000002").stat().st_mtime_ns
    checkpoints.save(small_state(2))
    assert (tmp_path / "step-00000002").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "state.json").unlink(),
        lambda folder: (folder / "state.safetensors").write_bytes(b"half"),
        lambda folder: (folder / "state.json").write_text("{"),
    ],
    ids=["no file", "half a file", "half a JSON"],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_with_a_warning(damage, tmp_path: Path) -> None:
    for step in (1, 2):
        Checkpoints(tmp_path).save(small_state(step))
    damage(tmp_path / "step-00000002")
    checkpoints = Checkpoints(tmp_path)
    with pytest.warns(UserWarning, match="continuing from the checkpoint of step 1"):
        found = checkpoints.read()
    assert found is not None
    assert torch.equal(found.tensors["model.w"], torch.ones(3))
    checkpoints.save(small_state(2))
    again = Checkpoints(tmp_path)
    assert again.read().values["step"] == 2, "the damaged one was replaced"
    assert again.warning is None
    damage(tmp_path / "step-00000001"), damage(tmp_path / "step-00000002")
    with pytest.raises(UsageError):
        again.read()


def test_a_checkpoint_of_another_version_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(small_state(1))
    path = tmp_path / "step-00000001" / "state.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    assert values["format"] == 2
    for text, words in [
        (json.dumps(values | {"format": 1}), "of format 1: expected format 2"),
        (json.dumps([1]), "of format None"),
        ("{", "expected JSON"),
    ]:
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match=words) as error:
            checkpoints.read()
        assert "\n" not in str(error.value)
    path.write_text(json.dumps(values), encoding="utf-8")
    tensors = path.with_name("state.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-8])
    with pytest.raises(UsageError, match="a safetensors file"):
        checkpoints.read()


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_a_checkpoint_with_a_flipped_bit_is_refused(name: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(small_state(1))
    path = tmp_path / "step-00000001" / name
    whole = path.read_bytes()
    for place in (
        range(len(whole) - 20, len(whole)) if name.endswith("s") else [whole.index(b'"step": 1') + 8]
    ):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UsageError, match="damaged") as error:
            checkpoints.read()
        assert "\n" not in str(error.value)
    path.write_bytes(whole)
    assert checkpoints.read() is not None


def test_no_pickle_is_written_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("pickle")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    Checkpoints(tmp_path).save(small_state(1))
    assert Checkpoints(tmp_path).read() is not None
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".json", ".safetensors"}


def test_the_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trial, other = trial_of("pre", Recipe()), trial_of("pre", Recipe(), width=32)
    with pytest.raises(UsageError, match="of another model") as error:
        put_state(other, other.model, take_state(trial, trial.model))
    assert "\n" not in str(error.value)
