"""Trials against a hand-written loop, and the state that they do not change."""

import ctypes
import itertools
import math
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from normscope.nn import build
from normscope.train import (
    Recipe,
    Trial,
    UpdateRatio,
    build_optimizers,
    endless,
    in_flushed_thread,
    thread,
    working_copy,
)

BATCHES = [torch.randn(5, 3, generator=torch.Generator().manual_seed(s)) for s in range(4)]


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_steps_are_those_of_a_hand_written_loop_with_warmup() -> None:
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    trial = Trial(ours, iter(BATCHES), squared, Recipe(optimizer="adam", lr=0.1, warmup=2))
    losses = [trial.advance() for _ in range(4)]
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.1, fused=True)
    expected = []
    for rate, batch in zip([0.05, 0.1, 0.1, 0.1], BATCHES, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = squared(theirs, batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == expected == trial.losses
    assert torch.equal(ours.weight, theirs.weight)
    assert trial.step == 4


def test_a_parameter_that_is_a_part_of_a_tensor_leaves_the_rest_of_it() -> None:
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    rest, twin = whole[:, 3:].clone(), nn.Module()
    ours = nn.Module()
    ours.weight, twin.weight = nn.Parameter(whole[:, :3]), nn.Parameter(whole[:, :3].clone())
    (optimizer,) = build_optimizers(ours, Recipe(optimizer="adam", lr=0.1))
    reference = torch.optim.Adam(twin.parameters(), lr=0.1, fused=False)
    for _ in range(3):
        for module, stepped in ((ours, optimizer), (twin, reference)):
            module.weight.grad = module.weight.detach().sin()
            stepped.step()
    torch.testing.assert_close(ours.weight, twin.weight)
    assert torch.equal(whole[:, 3:], rest)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_recorded_and_not_stepped_on(wrong: float) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    trial = Trial(model, iter(BATCHES), lambda m, b: squared(m, b) * wrong, Recipe())
    assert trial.advance() == pytest.approx(wrong, nan_ok=True)
    assert trial.diverged
    assert torch.equal(model.weight, before)


def test_update_ratio_of_a_known_step() -> None:
    model = nn.Linear(3, 2, bias=False)
    ratio = UpdateRatio(model)
    ratio.before()
    with torch.no_grad():
        model.weight.mul_(1.25)
    assert ratio.after() == pytest.approx(0.25, rel=1e-6)
    assert ratio.after() is None, "nothing was remembered"


def test_endless_starts_again_and_refuses_nothing() -> None:
    assert list(itertools.islice(endless(lambda: iter("ab")), 5)) == list("ababa")
    with pytest.raises(ValueError, match="batches are empty"):
        next(endless(lambda: iter(())))


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo: object) -> "Uncopyable":
        raise TypeError("cannot pickle '_thread.lock' object")


@pytest.mark.parametrize("kind", [nn.Linear, Uncopyable])
def test_training_the_working_copy_leaves_the_model(kind: type[nn.Linear]) -> None:
    model = kind(3, 2)
    squared(model, BATCHES[0]).backward()
    gradient, weight = model.weight.grad, model.weight.detach().clone()
    with pytest.raises(ZeroDivisionError), working_copy(model) as twin:  # noqa: PT012
        assert (twin is model) == (kind is Uncopyable)
        assert twin.weight.grad is None
        twin.eval()
        Trial(twin, iter(BATCHES), squared, Recipe(lr=0.1)).advance()
        assert not torch.equal(twin.weight, weight), "it trains"
        raise ZeroDivisionError
    assert torch.equal(model.weight, weight)
    assert model.weight.grad is gradient
    assert model.training


def flushes() -> bool:
    return bool(torch.tensor([1e-39]).mul(1.0).item() == 0.0)


@pytest.mark.parametrize("caller", [False, True])
def test_the_thread_flushes_denormals_and_the_caller_keeps_its_setting(caller: bool) -> None:
    if not torch.set_flush_denormal(caller):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert in_flushed_thread(lambda checkpoint: flushes())
        assert flushes() == caller
    finally:
        torch.set_flush_denormal(False)


def test_idle_workers_of_gnu_openmp_are_ended_and_other_libraries_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    libraries: list[object] = [SimpleNamespace(omp_pause_resource_all=calls.append), SimpleNamespace()]
    num_threads = torch.get_num_threads()
    thread.end_idle_workers()
    assert torch.get_num_threads() == num_threads
    (tmp_path / "lib").mkdir()
    for number in (1, 2):
        (tmp_path / "lib" / f"libgomp.so.{number}").touch()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(ctypes, "CDLL", lambda path: libraries.pop())
    thread.end_idle_workers()
    assert calls == [thread.OMP_PAUSE_SOFT]
    assert not libraries


def test_an_exception_in_the_thread_reaches_the_caller() -> None:
    def fails(checkpoint: object) -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        in_flushed_thread(fails)


def test_an_interrupt_waits_for_the_thread_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes while the caller waits; no thread runs afterwards."""
    steps: list[int] = []

    def work(checkpoint) -> None:
        for step in range(10_000):
            checkpoint()
            steps.append(step)
            time.sleep(0.001)

    join = threading.Thread.join

    def interrupted_once(thread: threading.Thread, timeout: float | None = None) -> None:
        if timeout is not None:
            while not steps:
                time.sleep(0.001)
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        in_flushed_thread(work)
    count = len(steps)
    time.sleep(0.02)
    assert 0 < len(steps) == count < 10_000


def test_several_interrupts_wait_for_the_thread_too() -> None:
    """A terminal or `timeout` sends more than one; Python must not end while the thread is in a kernel."""
    alive: list[threading.Thread] = []

    def work(checkpoint) -> None:
        alive.append(threading.current_thread())
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # a step that does not ask in between
        checkpoint()

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        in_flushed_thread(work)
    assert not alive[0].is_alive()
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_a_model_under_mup_trains_at_its_own_rates(optimizer: str) -> None:
    """The blocks' matrices get half the learning rate at twice the base width; a plain model has one rate."""
    options = {"depth": 1, "width": 32, "heads": 2, "vocab": 11, "context": 8}
    mup, plain = build("decoder", init="mup", base_width=16, **options), build("decoder", **options)
    config = Recipe(optimizer=optimizer, lr=0.1)
    of_mup, of_plain = (
        {g["lr"] for o in build_optimizers(m, config) for g in o.param_groups} for m in (mup, plain)
    )
    assert of_mup == {0.1, 0.05}
    assert of_plain == {0.1}


def test_sparse_gradients_have_no_norm_and_train() -> None:
    """PyTorch has no norm of a sparse gradient."""
    model = nn.Embedding(8, 2, sparse=True)
    config = Recipe(optimizer="sgd", lr=0.1)
    trial = Trial(
        model, itertools.repeat(torch.arange(4)), lambda m, ids: m(ids).sum(), config, keeps_norms=True
    )
    before = model.weight.detach().clone()
    trial.advance()
    assert not torch.equal(before, model.weight)
    assert math.isnan(trial.gradient_norms[0])
