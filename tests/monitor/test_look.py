"""Looks of a `Monitor` at its model with the probes of `check`: when, what, and what they leave as it was."""

import math
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import several_ranks
import torch
import torch.distributed as dist
from test_monitor import Loop
from torch import nn
from torch.distributed.fsdp import fully_shard

from normscope.errors import UsageError
from normscope.monitor import Event, Look, Monitor, RunReader, check_run
from normscope.monitor.look import LEAST_APART, Looker
from normscope.rules import Finding, Severity

SPEC = "nn:decoder,scheme=pre,depth=2,width=16,heads=2"
DROPOUT = "hf:gpt2,n_layer=2,n_embd=16,n_head=2,vocab_size=64"


def looks(path: Path) -> list[Event]:
    with RunReader(path) as reader:
        return reader.events("look")


def watch(loop: Loop, path: Path, steps: int, look: Look | None = None, **options: Any) -> Monitor:
    with Monitor(loop.model, loop.optimizer, store=path, look=look, **options) as monitor:
        for _ in range(steps):
            loop.step(monitor)
    assert monitor.failure is None
    return monitor


@pytest.mark.parametrize("spec", [SPEC, DROPOUT])
def test_a_run_with_looks_is_the_same_to_the_bit(spec: str, tmp_path: Path) -> None:
    plain, looked = Loop(spec), Loop(spec)
    torch.manual_seed(7)
    losses = [plain.step() for _ in range(6)]
    drawn = torch.rand(3)
    torch.manual_seed(7)
    with Monitor(looked.model, looked.optimizer, store=tmp_path / "run.db", look=Look(every=2)) as monitor:
        for step, loss in enumerate(losses):
            assert looked.step(monitor) == loss
            if step == 2:
                monitor.look(jacobian=True)
    assert torch.equal(torch.rand(3), drawn)
    for one, other in zip(plain.model.parameters(), looked.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert looked.model.training
    found = looks(tmp_path / "run.db")
    assert [(each.step, each.data["why"]) for each in found] == [
        (2, "on schedule"),
        (3, "asked for"),
        (4, "on schedule"),
        (6, "on schedule"),
    ]
    assert [each.data["unmeasured"] for each in found] == [[]] * 4


def losses_of(kind: str, look: Look | None, path: Path) -> list[float]:
    """Losses of a loop that compiles its model, trains in float16 with a scaler, or accumulates."""
    loop = Loop(SPEC)
    called = torch.compile(loop.model, backend="eager") if kind == "compiled" else loop.model
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "float16", init_scale=1024.0)
    losses = []
    with Monitor(called, loop.optimizer, store=path, look=look) as monitor:
        for _ in range(4):
            for _ in range(2 if kind == "accumulated" else 1):
                with torch.autocast("cpu", torch.float16, enabled=kind == "float16"):
                    loss = loop.subject.loss(next(loop.batches), model=called)
                scaler.scale(loss).backward()
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()
            monitor.step(loss)
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of PyTorch, where it resumes a frame
@pytest.mark.parametrize("kind", ["compiled", "float16", "accumulated"])
def test_looks_at_the_models_of_other_loops(kind: str, tmp_path: Path) -> None:
    torch.compiler.reset()  # of code that other tests compiled
    path = tmp_path / "run.db"
    assert losses_of(kind, Look(every=2), path) == losses_of(kind, None, tmp_path / "plain.db")
    found = looks(path)
    assert [each.step for each in found] == [2, 4]
    for each in found:
        assert each.data["unmeasured"] == []
        assert figures(each, "gradient/block")
        assert figures(each, "attention/entropy")


def figures(event: Event, quantity: str) -> dict[str, float]:
    rows = event.data["measurements"]
    return {row["site"]: row["value"] for row in rows if row["quantity"] == quantity}


def test_gradients_of_a_look_at_the_end_of_a_step_are_those_of_the_run(tmp_path: Path) -> None:
    """A learning rate of zero leaves the weights, so that the gradients can be compared."""
    loop, path = Loop(SPEC, torch.optim.SGD), tmp_path / "run.db"
    for group in loop.optimizer.param_groups:
        group["lr"] = 0.0
    watch(loop, path, 3, Look(every=3))
    (event,) = looks(path)
    with RunReader(path) as reader:
        steps, sites, values = reader.table("gradient/block")
        total = reader.series("gradient/norm")[1][-1]
    assert steps[-1] == 3
    found = figures(event, "gradient/block")
    assert {site: found[site] for site in sites if site in found} == pytest.approx(
        {site: value for site, value in zip(sites, values[-1], strict=True) if site in found}, rel=1e-4
    )
    assert len(found) == 2
    assert figures(event, "gradient/total")[""] == pytest.approx(total, rel=1e-4)


def test_figures_of_a_look_are_those_of_the_weights_at_its_step(tmp_path: Path) -> None:
    loop, path = Loop(SPEC), tmp_path / "run.db"
    with Monitor(loop.model, loop.optimizer, store=path) as monitor:
        loop.step(monitor)
        before = monitor.look()
        with torch.no_grad():
            for parameter in loop.model.blocks[0].parameters():
                parameter.mul_(30.0)
        after = monitor.look()
    first, second = looks(path)
    growth = figures(second, "stream/rms")["blocks.0"] / figures(first, "stream/rms")["blocks.0"]
    assert growth > 100
    assert before == []
    assert after
    assert [each.code for each in after] == [each["code"] for each in second.data["findings"]]


def test_a_look_within_a_step_waits_for_its_end(tmp_path: Path) -> None:
    loop, path = Loop(SPEC), tmp_path / "run.db"
    with Monitor(loop.model, loop.optimizer, store=path) as monitor:
        assert monitor.look() == []  # before the first forward: looks at the end of the first step
        loop.step(monitor)
        loss = loop.subject.loss(next(loop.batches))
        assert monitor.look() == []
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        assert [each.step for each in looks(path)] == [1]
        monitor.step(loss)
    assert [each.step for each in looks(path)] == [1, 2]


def test_a_look_that_an_alarm_asks_for_is_made_at_the_end_of_its_step(tmp_path: Path) -> None:
    loop, path = Loop(SPEC), tmp_path / "run.db"
    monitor = Monitor(loop.model, loop.optimizer, store=path, on_alarm=lambda _: found.append(monitor.look()))
    found: list[list[Finding]] = []
    with monitor:
        loop.step(monitor)
        monitor.step(math.nan)
        loop.step(monitor)
    assert monitor.failure is None, monitor.failure
    assert found == [[]]
    assert [each.step for each in looks(path)] == [2]


def test_an_alarm_is_looked_at_once_in_a_while(tmp_path: Path) -> None:
    loop = Loop(SPEC)
    looker = Looker(Look(at_alarm=True), loop.model, 0)
    seen: list[tuple[int, str]] = []

    def look(step: int, why: str, *rest: Any) -> tuple[Event, list[Any]]:
        seen.append((step, why))
        return Event(step, 0, 0.0, "look", {}), []

    looker.look = look  # type: ignore[method-assign]
    wrong = Finding("NS801", "not-finite", Severity.ERROR, (), "It is NaN.")
    spike = Finding("NS804", "loss-spike", Severity.WARNING, (), "It rose.")
    last = 5 + LEAST_APART
    for step, alarms in (
        (5, [spike]),
        (6, [spike, wrong]),
        (7, [wrong]),
        (last - 1, [spike]),
        (last, [spike]),
    ):
        looker.at_end(step, alarms, [])
    looker.at_end(400, [], [])
    spiked = "at the alarm NS804 loss-spike"
    assert seen == [(5, spiked), (6, "at the alarm NS801 not-finite"), (last, spiked)]


def test_a_wrong_weight_is_looked_at_in_the_step_of_its_alarm(tmp_path: Path) -> None:
    loop, path = Loop(SPEC), tmp_path / "run.db"
    with Monitor(
        loop.model, loop.optimizer, store=path, look=Look(at_alarm=True), on_alarm=lambda _: None
    ) as monitor:
        loop.step(monitor)
        with torch.no_grad():
            next(iter(loop.model.blocks[1].parameters())).fill_(float("nan"))
        loop.step(monitor)
        loop.step(monitor)
    (event,) = looks(path)
    assert (event.step, event.data["why"]) == (2, "at the alarm NS801 not-finite")
    assert "NS506 non-finite" in event.data["sentence"]


def test_the_surroundings_of_the_run_are_not_those_of_a_look(tmp_path: Path) -> None:
    """Hooks on gradients do not run, and an autocast of the run does not round the measurements."""
    loop, path = Loop(SPEC), tmp_path / "run.db"
    weight = next(iter(loop.model.blocks[1].parameters()))
    called: list[int] = []
    weight.register_hook(lambda gradient: called.append(1))
    with Monitor(loop.model, loop.optimizer, store=path) as monitor:
        loop.step(monitor)
        before = len(called)
        monitor.look()
        with torch.autocast("cpu", torch.bfloat16):
            monitor.look()
    assert len(called) == before
    first, second = looks(path)
    assert figures(first, "stream/rms") == figures(second, "stream/rms")


def test_the_time_of_a_look_is_not_that_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from normscope.monitor import look

    def slow(*args: Any) -> list[Any]:
        time.sleep(0.5)
        return []

    monkeypatch.setitem(look.PROBES, "signal", slow)
    path = tmp_path / "run.db"
    watch(Loop(SPEC), path, 5, Look(every=2))
    with RunReader(path) as reader:
        assert reader.series("seconds")[1][1:].max() < 0.4
    assert looks(path)[0].data["seconds"] >= 0.5


def fails(*args: Any) -> list[Any]:
    raise RuntimeError("no room")


def test_a_probe_that_fails_is_named_and_the_others_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normscope.monitor import look

    monkeypatch.setitem(look.PROBES, "attention", fails)
    path = tmp_path / "run.db"
    watch(Loop(SPEC), path, 2, Look(every=2))
    (event,) = looks(path)
    assert event.data["unmeasured"] == ["attention: RuntimeError: no room"]
    assert figures(event, "stream/rms")


def test_a_look_that_fails_ends_neither_the_run_nor_the_monitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normscope.monitor import look

    monkeypatch.setattr(look, "judge", fails)
    path = tmp_path / "run.db"
    monitor = watch(Loop(SPEC), path, 4, Look(every=2))
    assert monitor.look() == []
    assert [each.data["sentence"] for each in looks(path)] == [
        "the model could not be looked at: RuntimeError: no room"
    ] * 2
    with RunReader(path) as reader:
        assert reader.last_step == 4


def test_sharded_weights_are_refused_with_a_reason(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        from normscope.anatomy import read_anatomy

        loop = Loop(SPEC)
        anatomy = read_anatomy(loop.model, next(loop.batches))
        fully_shard(loop.model)
        looker = Looker(None, loop.model, 0)
        looker.begin(anatomy, "float32")
        looker.hold((next(loop.batches),), {})
        event, found = looker.look(1, "asked for", Look())
    finally:
        dist.destroy_process_group()
    assert found == []
    assert "its weights are sharded over processes" in event.data["sentence"]


def test_of_several_ranks_the_first_looks_and_none_waits(tmp_path: Path) -> None:
    ranks = [
        multiprocessing.get_context("spawn").Process(
            target=several_ranks.run, args=("looking", rank, 2, str(tmp_path))
        )
        for rank in (0, 1)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(120)
        if each.is_alive():
            each.kill()
            pytest.fail("a process hangs")
    assert [each.exitcode for each in ranks] == [0, 0]
    found = looks(tmp_path / several_ranks.STORE)
    assert [(each.rank, each.step) for each in found] == [(0, 3), (1, 5), (0, 6)]
    assert all(figures(each, "stream/rms") for each in found)
    assert check_run(tmp_path / several_ranks.STORE).findings == ()


def test_inputs_are_held_without_their_graph() -> None:
    looker = Looker(None, nn.Identity(), 0)
    embedded = torch.ones(2, 3, requires_grad=True) * 2
    looker.hold((embedded,), {"more": [embedded]})
    assert looker._inputs is not None
    (held,), more = looker._inputs
    assert held.grad_fn is None
    assert more["more"][0].grad_fn is None
    assert held.data_ptr() == embedded.data_ptr()


class Unreadable(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no items")


def test_arguments_that_cannot_be_held_are_a_matter_of_looks_alone() -> None:
    looker = Looker(None, nn.Identity(), 0)
    looker.hold((), Unreadable(x=1))
    event, _ = looker.look(1, "asked for", Look())
    assert "no forward with gradients has been seen" in event.data["sentence"]


def test_a_schedule_of_less_than_a_step_is_refused() -> None:
    with pytest.raises(UsageError, match="every=0: expected at least 1 step"):
        Look(every=0)


def test_the_report_of_a_run_shows_its_looks_apart_from_its_verdict(tmp_path: Path) -> None:
    from normscope.cli.run_view import text_run

    loop, path = Loop(SPEC), tmp_path / "run.db"
    with Monitor(loop.model, loop.optimizer, store=path, look=Look(every=2)) as monitor:
        loop.step(monitor)
        with torch.no_grad():
            for parameter in loop.model.blocks[0].parameters():
                parameter.mul_(30.0)
        loop.step(monitor)
    report = check_run(path)
    (event,) = report.looks
    name = event.data["findings"][0]["name"]
    assert report.events == ()
    assert event.data["findings"][0]["code"] not in {each.finding.code for each in report.findings}
    for shown in (text_run(report), report.to_markdown(), report.to_html()):
        assert name in shown
    assert report.to_dict()["looks"][0]["data"]["findings"][0]["name"] == name
