"""Steps of several forwards, steps after their update, and skipped ones: the first wrong value is named."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normscope
from benchmarks.monitor.faults import WrongBackward
from normscope.monitor import Event, RunReader, forwards
from normscope.monitor.plan import plan_of
from normscope.monitor.streams import Part, Streams
from normscope.monitor.wrong_value import Replay, first_wrong_value
from normscope.subjects import load

WIDTH = 16


class Chain(nn.Module):
    """Three linear maps; a fault is written where `bad` says, for the batch that begins with 7."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bad: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        is_bad = bool(x[0, 0] == 7)
        for number, each in enumerate(self.maps):
            x = each(x)
            if number == 1:
                x = self.middle(x, is_bad)
        return x

    def middle(self, x: Tensor, is_bad: bool) -> Tensor:
        return self.bad(x) if is_bad else x


def a_logarithm(x: Tensor) -> Tensor:
    return x + (x - x).log() * 0


def batch(is_bad: bool) -> Tensor:
    x = torch.randn(4, WIDTH)
    x[0, 0] = 7 if is_bad else 0
    return x


class Run:
    """A watched loop whose third step has the fault; the events of it."""

    def __init__(self, path: Path) -> None:
        torch.manual_seed(0)
        self.model, self.path = Chain(), path
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.monitor = normscope.Monitor(self.model, self.optimizer, store=path, on_alarm=lambda _: None)

    def go(self, step: Callable[[bool], Tensor], steps: int = 6, at: int = 3) -> list[Event]:
        with self.monitor:
            for number in range(1, steps + 1):
                self.optimizer.zero_grad()
                loss = step(number == at)
                self.monitor.step(loss)
        assert self.monitor.failure is None, self.monitor.failure
        with RunReader(self.path) as reader:
            return list(reader.events("first-wrong-value"))

    def update(self, loss: Tensor) -> Tensor:
        loss.backward()
        self.optimizer.step()
        return loss


FAULTS = {"forward": (a_logarithm, "log"), "backward": (WrongBackward.apply, "WrongBackward.backward")}


def two_before_the_backward(run: Run, place: int, is_at: bool) -> Tensor:
    outputs = [run.model(batch(is_at and place == number)) for number in range(2)]
    return run.update(F.mse_loss(*outputs))


def accumulated(run: Run, place: int, is_at: bool) -> Tensor:
    for number in range(2):
        loss = run.model(batch(is_at and place == number)).square().mean()
        loss.backward()
    run.optimizer.step()
    return loss


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("phase", FAULTS)
@pytest.mark.parametrize("step", [two_before_the_backward, accumulated])
def test_the_forward_with_the_fault_is_run_again(
    step: Callable[..., Tensor], phase: str, place: int, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run.db")
    run.model.bad, op = FAULTS[phase]
    (event,) = run.go(partial(step, run, place))
    assert event.step == 3
    assert event.data["phase"] == phase
    assert event.data["op"].endswith(op)


def test_earlier_forwards_are_dropped_when_they_take_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwards, "KEPT_BYTES", forwards.RANDOM_STATE_BYTES + 8 * 4 * WIDTH - 1)
    run = Run(tmp_path / "run.db")
    run.model.bad = WrongBackward.apply
    (event,) = run.go(partial(accumulated, run, 0))
    assert "module" not in event.data
    assert "or in one of the step's first 1 forwards" in event.data["sentence"]


def test_a_forward_that_raised_is_not_run_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "run.db")

    def step(is_at: bool) -> Tensor:
        loss = run.model(batch(False)).square().mean()
        if is_at:
            with pytest.raises(RuntimeError):
                run.model(torch.randn(4, WIDTH + 1))
        return run.update(loss * math.nan if is_at else loss)

    (event,) = run.go(step)
    assert (event.step, event.data["phase"]) == (3, "loss")


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_a_weight_that_a_wrong_state_spoils_is_of_the_state(key: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run.db")

    def step(is_at: bool) -> Tensor:
        if is_at:
            run.optimizer.state[run.model.maps[1].weight][key][2, 5] = math.nan
        return run.update(run.model(batch(False)).square().mean())

    (event,) = run.go(step)
    assert (event.data["phase"], event.data["module"]) == ("optimizer state", "maps.1")
    assert event.step == 3, "the step whose update used the state, not the one that met the weights"
    assert event.data["tensor"] == f"{key} of maps.1.weight"
    assert "the first at [2, 5]" in event.data["sentence"]


def test_a_wrong_state_of_one_weight_is_not_the_cause_of_another() -> None:
    model = Chain()
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(False)).square().mean().backward()
    optimizer.step()
    optimizer.state[model.maps[0].weight]["exp_avg_sq"][0, 0] = math.inf
    with torch.no_grad():
        model.maps[2].bias[3] = math.nan
    found = first_wrong_value(Replay(model, (batch(False),), optimizers=[optimizer]))
    assert found is not None
    assert (found.phase, found.tensor) == ("parameter", "maps.2.bias")


def test_a_learning_rate_that_is_nan_is_the_cause_of_all_weights(tmp_path: Path) -> None:
    run = Run(tmp_path / "run.db")

    def step(is_at: bool) -> Tensor:
        run.optimizer.param_groups[0]["lr"] = math.nan if is_at else 1e-3
        return run.update(run.model(batch(False)).square().mean())

    (event,) = run.go(step)
    assert event.step == 3
    assert event.data["tensor"] == "learning rate of group 0"
    assert "holds NaN after the update" in event.data["sentence"]


class LargeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 1e30


@pytest.mark.parametrize("is_clipped", [False, True])
def test_a_large_gradient_that_clipping_turns_into_zeros_is_found(is_clipped: bool, tmp_path: Path) -> None:
    run = Run(tmp_path / "run.db")
    run.model.bad = LargeGradient.apply

    def step(is_at: bool) -> Tensor:
        loss = run.model(batch(is_at)).square().mean()
        loss.backward()
        if is_clipped:
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            assert is_at != any(bool(p.grad.any()) for p in run.model.parameters() if p.grad is not None)
        run.optimizer.step()
        return loss

    (event,) = run.go(step)
    assert (event.step, event.data["phase"], event.data["kind"]) == (3, "backward", "garbage")
    assert event.data["op"] == "LargeGradient.backward"


def test_a_run_without_any_gradient_is_run_again_once(tmp_path: Path, monkeypatch: Any) -> None:
    run, replays = Run(tmp_path / "run.db"), []
    monkeypatch.setattr(forwards, "first_wrong_value", lambda replay: replays.append(replay))
    assert run.go(lambda is_at: run.update(run.model(batch(False)).square().mean() * 0)) == []
    assert len(replays) == 1


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_a_weight_that_nothing_uses_is_named_where_its_figures_show_it(value: float, tmp_path: Path) -> None:
    run = Run(tmp_path / "run.db")
    run.model.unused = nn.Linear(WIDTH, WIDTH)
    run.optimizer.add_param_group({"params": list(run.model.unused.parameters())})

    def step(is_at: bool) -> Tensor:
        if is_at:
            with torch.no_grad():
                run.model.unused.weight[2, 5] = value
        return run.update(run.model(batch(False)).square().mean())

    (event,) = run.go(step, steps=10, at=10)
    assert event.step == 10
    assert (event.data["phase"], event.data["tensor"]) == ("parameter", "unused.weight")
    assert event.data["seen"].startswith("weight/norm at ")


class Scaled(Run):
    """The same under float16 with a loss scaler."""

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def update(self, loss: Tensor) -> Tensor:
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def loss(self, is_at: bool) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return self.model(batch(is_at)).float().square().mean()


@pytest.mark.parametrize("at", [3, 4])
def test_a_wrong_backward_that_a_loss_scaler_skips_is_traced(at: int, tmp_path: Path) -> None:
    run = Scaled(tmp_path / "run.db")
    run.model.bad = WrongBackward.apply
    (event,) = run.go(lambda is_at: run.update(run.loss(is_at)), at=at)
    assert event.step == at
    assert event.data["op"] == "WrongBackward.backward"
    assert event.data["seen"] == "the gradient of a skipped step"


def test_a_scale_that_is_too_large_is_no_wrong_value(tmp_path: Path) -> None:
    run = Scaled(tmp_path / "run.db")
    skipped = []

    def step(is_at: bool) -> Tensor:
        if is_at:
            run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
        before = run.model.maps[0].weight.detach().clone()
        loss = run.update(run.loss(False))
        skipped.append(torch.equal(before, run.model.maps[0].weight))
        return loss

    assert run.go(step) == []
    assert skipped[2]


class Table(nn.Module):
    """Model whose output is its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


def test_no_hook_stays_on_an_output_that_is_a_parameter() -> None:
    model, kept = Table(), forwards.Forwards()
    for _ in range(3):
        kept.open(model, (), {}, None)
        kept.close(model(torch.ones(4)))
    model.weight.sum().backward()
    assert kept.cotangents[0] is not None
    kept.clear()
    assert not model.weight._backward_hooks


def test_the_memory_of_forwards_is_counted_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three forwards of 256 bytes before their backward, which gives as much to each; not quite three fit."""
    of_one = forwards.RANDOM_STATE_BYTES + 2 * 256
    monkeypatch.setattr(forwards, "KEPT_BYTES", 3 * of_one - 1)
    model, kept = Chain(), forwards.Forwards()

    def run() -> Tensor:
        x = batch(False)
        kept.open(model, (x,), {}, None)
        y: Tensor = model(x)
        kept.close(y)
        return y.sum()

    loss = torch.stack([run() for _ in range(3)]).sum()
    assert len(kept) == 3
    for _ in range(2):  # the second gradients replace the first
        loss.backward(retain_graph=True)
    for number in range(1, 4):
        run().backward()
        assert (len(kept), kept.num_dropped) == (3, number)


def test_each_forward_of_a_step_is_checked_once() -> None:
    subject = load("nn:decoder,scheme=pre,depth=1,width=16,heads=2")
    streams = Streams(subject.model, plan_of(subject.model, subject.batch))
    streams.begin(checked := [])
    for _ in range(2):
        streams.parts.append(Part([0], torch.ones(1), [1]))
        assert not streams.is_wrong
    assert streams.parts is checked
    checked[0].squares.fill_(math.nan)
    assert not streams.is_wrong, "it was checked before"
    streams.parts.append(Part([0], torch.tensor([math.inf]), [1]))
    assert streams.is_wrong
    streams.parts.append(Part([0], torch.ones(1), [1]))
    assert streams.is_wrong
    streams.begin([])
    assert not streams.is_wrong
