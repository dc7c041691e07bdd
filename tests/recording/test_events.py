"""Events of scripts with several threads: what one thread does hides nothing of another."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from normscope.recording.events import Events, Silent

PATIENCE = 30.0


class Seen(Silent):
    """Listener that keeps the events, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def called(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.events.append(("called", module))

    def differentiates(self, loss: torch.Tensor) -> None:
        self.events.append(("differentiates", loss))

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        self.events.append(("steps", optimizer))

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.events.append(("stepped", optimizer))

    def skipped(self, optimizer: torch.optim.Optimizer) -> None:
        self.events.append(("skipped", optimizer))


def elsewhere(action: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result(PATIENCE)


def test_a_backward_in_one_thread_hides_no_forward_of_another() -> None:
    seen, model, other = Seen(), nn.Linear(2, 2), nn.Linear(2, 2)
    with Events(seen).attach():
        output = model(torch.ones(2))
        output.register_hook(lambda gradient: elsewhere(lambda: other(torch.ones(2)).sum().backward()))
        output.sum().backward()
    assert [name for name, _ in seen.events] == ["called", "differentiates", "called", "differentiates"]
    assert seen.events[2][1] is other


@pytest.mark.parametrize(("reentrant", "gradient"), [(False, False), (False, True), (True, False)])
def test_blocks_that_run_again_in_a_backward_are_no_forwards(reentrant: bool, gradient: bool) -> None:
    seen, block = Seen(), nn.Linear(2, 2)

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(block, x, use_reentrant=reentrant)
            return result

    inputs = torch.ones(2, requires_grad=True)
    with Events(seen).attach():
        loss = Model()(inputs).sum()
        torch.autograd.grad(loss, inputs) if gradient else loss.backward()
    assert [name for name, _ in seen.events] == ["called"] + ["differentiates"] * (not gradient)


def test_a_muted_thread_hides_nothing_of_another_and_a_pause_hides_all() -> None:
    seen, model, events_of_other = Seen(), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    events = Events(seen)
    with events.attach():
        with events.muted():
            model(torch.ones(2))
            elsewhere(lambda: events_of_other(torch.ones(2)))
        assert seen.events == [("called", events_of_other)]
        with events.paused():
            model(torch.ones(2))
            elsewhere(lambda: events_of_other(torch.ones(2)))
        assert len(seen.events) == 1
        model(torch.ones(2))
    assert seen.events[1:] == [("called", model)]


def test_a_forward_that_a_pause_of_another_thread_begins_in_is_seen_with_the_next() -> None:
    seen, inner = Seen(), nn.Linear(2, 2)
    events = Events(seen)
    begun, may_end = threading.Event(), threading.Event()

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            begun.set()
            assert may_end.wait(PATIENCE)
            result: torch.Tensor = inner(x)
            return result

    model = Model()

    def twice() -> None:
        for _ in range(2):
            model(torch.ones(2))

    with events.attach(), ThreadPoolExecutor(1) as pool:
        done = pool.submit(twice)
        assert begun.wait(PATIENCE)
        with events.paused():
            may_end.set()
            done.result(PATIENCE)
        pool.submit(model, torch.ones(2)).result(PATIENCE)
    assert seen.events == [("called", model)] * 2


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_is_no_step(fused: bool, unscales: bool) -> None:
    seen, model = Seen(), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with Events(seen).attach():
        for value in (1.0, torch.inf):
            scaler.scale(model(torch.ones(2)).sum()).backward()
            model.weight.grad.fill_(value)
            before = model.weight.detach().clone()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert torch.equal(model.weight, before) == (value == torch.inf)
    names = [name for name, _ in seen.events if name not in ("called", "differentiates")]
    assert names == ["steps", "stepped", "skipped"]


def test_a_step_of_another_thread_is_not_that_of_a_scaler() -> None:
    seen, model = Seen(), nn.Linear(2, 2)
    mine, others = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    with Events(seen).attach():
        scaler.scale(model(torch.ones(2)).sum()).backward()
        model.weight.grad.fill_(torch.inf)

        class Slow(dict):
            """Found infinities, which another optimizer steps beside."""

            def values(self):
                elsewhere(others.step)
                return super().values()

        scaler.unscale_(mine)
        state = scaler._per_optimizer_states[id(mine)]
        state["found_inf_per_device"] = Slow(state["found_inf_per_device"])
        scaler.step(mine)
    assert ("skipped", mine) in seen.events
