"""`Rescue`: each action on a run that is spoilt in a known way, beside its twin that is not rescued."""

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normscope
from normscope.errors import UsageError
from normscope.monitor import Event, Monitor, Rescue, RunReader
from normscope.monitor.alarms.rescued import RESCUED
from normscope.monitor.decision import FIELDS, Decision, Figures
from normscope.monitor.optimizers import after_closure
from normscope.monitor.rescuer import Rescuer
from normscope.monitor.row import RESCUE, SNAPSHOTS_KEPT
from normscope.subjects import load

SPEC = "nn:decoder,scheme=pre,depth=2,width=16,heads=2"
BAD = 30
"""Step that is spoilt, behind the 20 values that a window needs."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "foreach": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, foreach=True),
    "fused": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True),
    "SGD": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.1),
    "NAdam": torch.optim.NAdam,
    "RMSprop": lambda parameters, lr: torch.optim.RMSprop(parameters, lr=lr, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
Fault = Callable[["Run"], None]


class Run:
    """A run of a small decoder; a fault is called between the backward and the update of its step."""

    def __init__(
        self,
        path: Path,
        rescue: Rescue | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        lr: float = 1e-3,
        **options: Any,
    ) -> None:
        torch.manual_seed(7)
        self.subject = load(SPEC)
        self.model = self.subject.model
        self.model.train()
        self.optimizer = optimizer(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 200)
        self.batches = self.subject.batches()
        self.path = path
        self.monitor = Monitor(self.model, self.optimizer, store=path, rescue=rescue, **options)
        self.losses: list[float] = []
        self.rates: list[float] = []

    def go(self, steps: int, faults: dict[int, Fault] | None = None, at: int | None = None) -> "Run":
        """Train; `at` is a step around whose update the state is kept in `before` and `after`."""
        with self.monitor:
            for step in range(1, steps + 1):
                loss = self.subject.loss(next(self.batches))
                loss.backward()
                (faults or {}).get(step, lambda run: None)(self)
                if step == at:
                    self.before = self.state()
                    gradients = [p.grad for p in self.model.parameters()]
                self.optimizer.step()
                if step == at:
                    self.after = self.state()
                    assert all(p.grad is g for p, g in zip(self.model.parameters(), gradients, strict=True))
                self.rates.append(self.optimizer.param_groups[0]["lr"])
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.monitor.step(loss)
                self.losses.append(float(loss.detach()))
        assert self.monitor.failure is None, self.monitor.failure
        return self

    def state(self) -> list[Any]:
        """Copies of the weights, the buffers and the states of the optimizer."""
        flat = [*self.model.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            flat += state.values()
        return copy.deepcopy(flat)

    def events(self, action: str | None = None) -> list[Event]:
        with RunReader(self.path) as reader:
            found = [*reader.events(RESCUE), *reader.events(SNAPSHOTS_KEPT)]
        return [event for event in found if action in (None, event.data["action"])]

    def alarms(self) -> list[str]:
        return [raised.finding.code for raised in self.monitor.alarms]


def same(before: list[Any], after: list[Any]) -> bool:
    """Whether two states are equal to the bit."""
    return len(before) == len(after) and all(
        torch.equal(a.nan_to_num(nan=7e7), b.nan_to_num(nan=7e7)) if isinstance(a, Tensor) else a == b
        for a, b in zip(before, after, strict=True)
    )


def grow(factor: float) -> Fault:
    def fault(run: Run) -> None:
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            parameter.grad *= factor

    return fault


def nan_gradient(run: Run) -> None:
    next(run.model.parameters()).grad[0] = math.nan


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_sound_run_is_the_same_to_the_bit_with_and_without_a_rescue(optimizer: str, tmp_path: Path) -> None:
    with_rescue = Run(tmp_path / "a.db", Rescue(lower=0.5), OPTIMIZERS[optimizer]).go(40)
    without = Run(tmp_path / "b.db", None, OPTIMIZERS[optimizer]).go(40)
    assert with_rescue.losses == without.losses
    assert same(with_rescue.state(), without.state())
    assert not with_rescue.events()
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in [with_rescue.optimizer])
    assert not with_rescue.optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("fault", [grow(1000), nan_gradient], ids=["jump", "nan"])
def test_a_skipped_step_leaves_weights_and_states_as_they_are(
    fault: Fault, optimizer: str, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run.db", Rescue(), OPTIMIZERS[optimizer]).go(BAD + 5, {BAD: fault}, at=BAD)
    assert same(run.before, run.after)
    (event,) = run.events()
    assert (event.step, event.data["action"]) == (BAD, "skip")
    assert math.isfinite(sum(run.losses))
    with RunReader(run.path) as reader:
        steps, values = reader.series("rescued")
    assert steps[values == 1].tolist() == [BAD]


def test_a_run_that_is_not_rescued_is_lost(tmp_path: Path) -> None:
    lost = Run(tmp_path / "a.db").go(BAD + 5, {BAD: nan_gradient})
    assert math.isnan(lost.losses[-1])


class Spy(torch.optim.AdamW):
    """Optimizer that keeps the learning rate and the gradient norm of each of its updates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.used: list[tuple[float, float]] = []

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        gradients = [p.grad.flatten() for p in group["params"] if p.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.cat(gradients))) if gradients else 0.0
        self.used.append((group["lr"], norm))
        return super().step(closure)


def test_a_jump_is_clipped_to_the_limit(tmp_path: Path) -> None:
    run = Run(tmp_path / "run.db", Rescue(skip=False), Spy).go(BAD + 5, {BAD: grow(1000)})
    (event,) = run.events()
    assert (event.step, event.data["action"]) == (BAD, "clip")
    assert event.data["norm"] / event.data["median"] == pytest.approx(1000, rel=0.5)
    assert event.data["scale"] == pytest.approx(event.data["limit"] / event.data["norm"])
    assert run.optimizer.used[BAD - 1][1] == pytest.approx(event.data["limit"], rel=1e-4)


def test_a_lowered_rate_recovers_and_the_scheduler_sees_nothing_of_it(tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain.db").go(BAD + 110)  # first: PyTorch then runs the hooks of a Spy twice
    run = Run(tmp_path / "spied.db", Rescue(lower=0.5), Spy).go(BAD + 110, {BAD: grow(1000)})
    assert run.rates == plain.rates
    factors = [used / p for (used, _), p in zip(run.optimizer.used, plain.rates, strict=True)]
    assert factors[: BAD - 1] == [1.0] * (BAD - 1)
    assert factors[BAD] == pytest.approx(0.5 ** (99 / 100))
    assert factors[BAD + 49] == pytest.approx(0.5**0.5)
    assert factors[BAD + 99 :] == [1.0] * 11
    with RunReader(run.path) as reader:
        _, stored = reader.series("lr")
    assert stored[BAD + 49] == pytest.approx(run.optimizer.used[BAD + 49][0], rel=0.02)
    assert [event.data["action"] for event in run.events()] == ["skip", "lower", "recovered"]


def test_a_rescue_that_skips_too_much_is_an_alarm_and_never_skips_for_ever(tmp_path: Path) -> None:
    once = Run(tmp_path / "once.db", Rescue()).go(BAD + 5, {BAD: grow(1000)})
    assert "NS816" not in once.alarms()
    faults = dict.fromkeys(range(BAD, BAD + 60), grow(1000))
    run = Run(tmp_path / "run.db", Rescue()).go(BAD + 40, faults)
    assert "NS816" in run.alarms()
    skipped = [event.step for event in run.events("skip")]
    assert skipped == list(range(BAD, BAD + 32)), "then it is the new level"


def nan_weight(run: Run) -> None:
    with torch.no_grad():
        list(run.model.parameters())[3].view(-1)[0] = math.nan


def nan_state(run: Run) -> None:
    state = run.optimizer.state[list(run.model.parameters())[3]]
    first = next(value for value in state.values() if isinstance(value, Tensor) and value.dim())
    first.view(-1)[0] = math.nan


def shaken_weights(run: Run) -> None:
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter += torch.randn_like(parameter)


class Kept(Run):
    """Run that keeps a copy of its state before the update of each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.states: list[list[Any]] = []
        self.optimizer.register_step_pre_hook(lambda *_: self.states.append(self.state()))


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "NAdam", "Adafactor"])
@pytest.mark.parametrize("fault", [nan_weight, nan_state, shaken_weights])
def test_a_run_whose_state_is_wrong_goes_back_to_the_bit(
    fault: Fault, optimizer: str, tmp_path: Path
) -> None:
    rescue = Rescue(skip=False, clip=False, back=10)
    run = Kept(tmp_path / "run.db", rescue, OPTIMIZERS[optimizer]).go(BAD + 20, {BAD: fault})
    (event,) = run.events("back")
    steps = 12 if fault is shaken_weights else 2
    assert BAD < event.step <= BAD + steps
    assert event.data["to"] in (11, 21)
    assert same(run.states[event.data["to"] - 1], run.states[event.step]), "before the update that follows"
    assert math.isfinite(run.losses[-1])
    lost = Run(tmp_path / "lost.db", None, OPTIMIZERS[optimizer]).go(BAD + 20, {BAD: fault})
    assert not lost.losses[-1] < run.losses[-1]


def test_a_run_that_going_back_does_not_help_is_left_alone_with_an_alarm(tmp_path: Path) -> None:
    faults = dict.fromkeys(range(BAD, BAD + 20), nan_weight)
    run = Run(tmp_path / "run.db", Rescue(back=10)).go(BAD + 20, faults)
    assert [event.data["to"] for event in run.events("back")] == [21, 21, 11, 11]
    (event,) = run.events("gave up")
    assert "NS816" in run.alarms()
    with RunReader(run.path) as reader:
        steps, values = reader.series("rescued")
    assert steps[values == 2].tolist() == [event.step]


def test_a_state_whose_loss_has_left_is_not_kept(tmp_path: Path) -> None:
    run = Run(tmp_path / "run.db", Rescue(skip=False, clip=False, back=3)).go(BAD + 20, {BAD: shaken_weights})
    (event,) = run.events("back")
    assert BAD - 6 <= event.data["to"] <= BAD
    assert run.losses[-1] < 6


def test_a_run_goes_back_to_its_first_state(tmp_path: Path) -> None:
    run = Kept(tmp_path / "run.db", Rescue(back=100)).go(8, {5: nan_weight})
    (event,) = run.events("back")
    assert event.data["to"] == 1
    assert same(run.states[0], run.states[event.step]), "its optimizer has no state yet"


def test_five_gradients_in_a_row_that_are_not_finite_blame_the_state(tmp_path: Path) -> None:
    run = Run(tmp_path / "run.db", Rescue(back=10)).go(
        BAD + 10, dict.fromkeys(range(BAD, BAD + 5), nan_gradient)
    )
    actions = [(event.step, event.data["action"]) for event in run.events() if event.step > 20]
    assert actions == [*((step, "skip") for step in range(BAD, BAD + 4)), (BAD + 4, "back")]


def test_snapshots_are_bounded_and_their_size_is_stored(tmp_path: Path) -> None:
    run = Run(tmp_path / "run.db", Rescue(back=10)).go(12)
    with RunReader(run.path) as reader:
        noted = reader.notes()["rescue"]
    assert noted == {"skip": True, "clip": True, "lower": None, "back": 10, "memory": 4096}
    weights = sum(p.nbytes for p in run.model.parameters())
    assert run.events("snapshots")[-1].data["MiB"] == pytest.approx(2 * 3 * weights / 2**20, rel=0.05)
    with pytest.raises(UsageError, match="memory"):
        Run(tmp_path / "b.db", Rescue(back=10, memory=1.9 * weights / 2**20))
    faults = {BAD: nan_weight}
    small = Run(tmp_path / "c.db", Rescue(back=10, memory=2.5 * weights / 2**20)).go(BAD + 5, faults)
    assert not small.events("back")
    assert "no snapshots" in small.events("snapshots")[-1].data["sentence"]


def test_a_mask_that_is_not_finite_is_no_wrong_state(tmp_path: Path) -> None:
    run = Run(tmp_path / "run.db", Rescue(back=10))
    run.model.register_buffer("mask", torch.full((3,), -math.inf))
    run.go(25)
    assert {event.data["action"] for event in run.events()} == {"snapshots"}


def wrong_streams(run: Run, steps: range) -> None:
    """In these steps the stream between the two blocks is NaN at one token, and the gradients are finite."""
    first, second = run.model.blocks

    def spoil(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if len(run.losses) + 1 not in steps:
            return None
        mask = torch.zeros((*output.shape[:2], 1), dtype=torch.bool)
        mask[0, 0] = True
        return output.masked_fill(mask, math.nan)

    def heal(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.where(args[0].isnan(), 0.0, args[0]), *args[1:])

    first.register_forward_hook(spoil)
    second.register_forward_pre_hook(heal)


def test_a_wrong_stream_is_skipped_until_it_is_the_runs_normal_state(tmp_path: Path) -> None:
    run = Run(tmp_path / "run.db", Rescue())
    wrong_streams(run, range(5, 50))
    run.go(45)
    assert [event.step for event in run.events("skip")] == list(range(5, 37))
    assert "stream" in run.events("skip")[0].data["sentence"]


@pytest.mark.parametrize("every", [1, 10])
def test_a_rescue_does_not_wait_for_figures_that_are_read_late(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normscope.monitor.monitor.is_on_device", lambda model: True)
    run = Run(tmp_path / "run.db", Rescue(), every=every)
    wrong_streams(run, range(6, 7))
    run.go(BAD + 5, {BAD + 2: nan_gradient})
    assert [event.step for event in run.events("skip")] == [6, BAD + 2]
    with RunReader(run.path) as reader:
        steps, values = reader.series("rescued")
    assert steps[values == 1].tolist() == [6, BAD + 2]


def test_each_call_of_a_closure_is_between_before_and_act() -> None:
    calls: list[str] = []
    given = after_closure(
        ("optimizer",),
        {"closure": lambda: calls.append("closure")},
        lambda: calls.append("act"),
        before=lambda: calls.append("before"),
    )
    assert given is not None
    assert calls == []
    for _ in range(2):
        given[1]["closure"]()
    assert calls == ["before", "closure", "act"] * 2
    assert after_closure(("optimizer", None), {}, lambda: calls.append("now")) is None
    assert calls[6:] == ["now"]


def test_a_closure_is_judged_after_it_has_run(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Monitor(model, optimizer, store=tmp_path / "run.db", rescue=Rescue()) as monitor:
        for step in range(1, BAD + 2):
            inputs = torch.randn(8, 4)

            def closure(inputs: Tensor = inputs, step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                (loss * (math.nan if step == BAD else 1)).backward()
                return loss.detach()

            before = copy.deepcopy(model.state_dict())
            loss = optimizer.step(closure)
            assert same([*before.values()], [*model.state_dict().values()]) is (step == BAD)
            monitor.step(loss)
    with RunReader(tmp_path / "run.db") as reader:
        assert [event.step for event in reader.events("rescue")] == [BAD]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch, which compiles
def test_a_compiled_update_is_skipped_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    update = torch.compile(optimizer.step, backend="eager")
    with Monitor(model, optimizer, store=tmp_path / "run.db", rescue=Rescue()) as monitor:
        for step in range(1, 8):
            loss = model(torch.randn(8, 4)).square().mean()
            (loss * (math.nan if step == 5 else 1)).backward()
            before = copy.deepcopy(model.state_dict())
            update()
            assert same([*before.values()], [*model.state_dict().values()]) is (step == 5)
            optimizer.zero_grad()
            monitor.step(loss)
    assert monitor.failure is None, monitor.failure
    with RunReader(tmp_path / "run.db") as reader:
        assert [event.step for event in reader.events("rescue")] == [5]


def test_what_cannot_be_rescued_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="LBFGS"):
        Monitor(model, torch.optim.LBFGS(model.parameters()), rescue=Rescue())
    with pytest.raises(UsageError, match="lower=2"):
        Rescue(lower=2)
    with pytest.raises(UsageError, match="nothing"):
        Rescue(skip=False, clip=False)
    assert normscope.Rescue is Rescue


TOGETHER = {
    "ddp:nan": ("skip", BAD),
    "apart:jump": ("skip", BAD),
    "fsdp:jump": ("skip", BAD),
    "fsdp:weight": ("back", BAD),
    "ddp:measure": ("skip", BAD + 1),
    "apart:monitor": ("skip", BAD + 1),
    "apart:scaler": ("skip", BAD + 1),
}
"""Cases of `rescued_ranks.py`, and what both processes do in which step."""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what two processes wrote."""
    folder = tmp_path_factory.mktemp("together")
    words = [*TORCHRUN, str(Path(__file__).with_name("rescued_ranks.py")), str(folder), *TOGETHER]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("case", TOGETHER)
def test_two_processes_decide_together_though_one_saw_it(case: str, two_processes: Path) -> None:
    action, step = TOGETHER[case]
    name = case.replace(":", "-")
    seen = [json.loads((two_processes / f"{name}.{rank}.json").read_text()) for rank in (0, 1)]
    with RunReader(two_processes / f"{name}.db") as reader:
        events = [event for event in reader.events("rescue") if event.data["action"] in ("skip", "back")]
    assert sorted((event.rank, event.step, event.data["action"]) for event in events) == [
        (0, step, action),
        (1, step, action),
    ]
    assert events[0].data == events[1].data
    for rank, each in enumerate(seen):
        assert [bool(failure) for failure in each["failures"]] == [
            case == "apart:monitor" and rank == 1,
            False,
        ]
        same_as = step if action == "skip" else events[0].data["to"]
        assert each["after"][step - 1] == each["before"][same_as - 1]
        assert math.isfinite(each["loss"][-1])
    if case.startswith("ddp"):
        assert seen[0]["after"] == seen[1]["after"]
    if case == "fsdp:jump":
        assert events[0].data["norm"] == pytest.approx(seen[0]["norm"], rel=1e-4), (
            "of the whole, not of a part"
        )


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_step_without_an_update_is_decided_with_the_others(
    is_wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []

    def gathered(row: np.ndarray, device: torch.device) -> np.ndarray:
        other = Figures(is_known=True, squares=1.0, seen=1.0, wrong_gradient=is_wrong and len(tables) == 2)
        tables.append(np.stack([row, other.row()]))
        return tables[-1]

    monkeypatch.setattr("normscope.monitor.rescuer.gathered", gathered)
    monkeypatch.setattr("normscope.monitor.rescuer._num_ranks", lambda: 2)
    monkeypatch.setattr(Rescuer, "_device", lambda rescuer: torch.device("cpu"))
    run = Run(tmp_path / "run.db", Rescue())
    with run.monitor:
        for step in range(1, 6):
            loss = run.subject.loss(next(run.batches))
            loss.backward()
            if step != 3:  # which a scaler skips on this rank alone
                run.optimizer.step()
            run.optimizer.zero_grad()
            run.monitor.step(loss)
    assert [table[0, FIELDS.index("is_known")] for table in tables] == [1, 1, 0, 1, 1]
    assert [(event.step, event.data["action"]) for event in run.events()] == [(3, "skip")] * is_wrong
    with RunReader(run.path) as reader:
        assert reader.series("rescued")[1].tolist() == [0, 0, RESCUED if is_wrong else 0, 0, 0]


def test_a_parameter_of_two_optimizers_is_counted_and_clipped_once() -> None:
    model = nn.Linear(3, 3)
    two = [torch.optim.SGD(each, lr=0.1) for each in (model.parameters(), [model.weight])]
    rescuer = Rescuer(Rescue(), model, two, has_wrong_stream=lambda: False, say=lambda *said: None)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert rescuer._squares(None) == (12.0, True)
    rescuer._carry_out(Decision("clip", "a jump", scale=0.5))
    assert all(p.grad is not None and p.grad.eq(0.5).all() for p in model.parameters())


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_that_a_loss_scaler_skips_is_left_to_it(is_fused: bool, tmp_path: Path) -> None:
    run = Run(tmp_path / "run.db", Rescue(), OPTIMIZERS["fused" if is_fused else "AdamW"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    parameters = list(run.model.parameters())
    skipped = []
    with run.monitor:
        for step in range(1, BAD + 20):
            loss = run.subject.loss(next(run.batches))
            scaler.scale(loss).backward()
            if step == BAD:
                nan_gradient(run)
            if step == BAD + 10:
                grow(1000)(run)
            before = run.state()
            scaler.step(run.optimizer)
            skipped += [step] if same(before, run.state()) else []
            scaler.update()
            run.optimizer.zero_grad()
            run.monitor.step(loss)
    assert skipped == [BAD, BAD + 10]
    assert [(event.step, event.data["action"]) for event in run.events()] == [(BAD + 10, "skip")]
    assert all(parameter.isfinite().all() for parameter in parameters)


def test_a_learning_rate_that_an_optimizer_sets_itself_is_not_lowered(tmp_path: Path) -> None:
    run = Run(tmp_path / "run.db", Rescue())
    rescuer, groups = run.monitor._rescuer, run.optimizer.param_groups
    assert rescuer is not None
    groups.extend({"params": [], **each} for each in ({"lr": None}, {}))
    rescuer._lower(run.optimizer, 0.5)
    lowered = [group.get("lr") for group in groups]
    rescuer._give_back()
    assert lowered == [0.5 * groups[0]["lr"], None, None]


def test_all_optimizers_of_a_step_are_held_back_or_none(tmp_path: Path) -> None:
    torch.manual_seed(7)
    subject = load(SPEC)
    model = subject.model.train()
    parameters = list(model.parameters())
    first, second = (torch.optim.AdamW(each, lr=1e-3) for each in (parameters[:5], parameters[5:]))
    batches, path = subject.batches(), tmp_path / "run.db"
    held = []
    with Monitor(model, [first, second], store=path, rescue=Rescue()) as monitor:
        for step in range(1, BAD + 3):
            losses = []
            for _ in range(2):  # micro-batches
                losses.append(subject.loss(next(batches)) / 2)
                losses[-1].backward()
            if step in (BAD, BAD + 1):
                parameters[7 - 7 * (step - BAD)].grad[0] = math.nan
            before = copy.deepcopy(parameters)
            first.step()
            second.step()
            if not any(torch.equal(a, b) for a, b in zip(before, parameters, strict=True)):
                held.append(False)
            elif all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True)):
                held.append(True)
            first.zero_grad()
            second.zero_grad()
            monitor.step(sum(losses))
    assert held == [False] * (BAD - 1) + [True, True, False]
    with RunReader(path) as reader:
        assert [event.step for event in reader.events("rescue")] == [BAD, BAD + 1]


def test_a_loop_that_clips_is_judged_by_the_gradients_before(tmp_path: Path) -> None:
    def clipped(is_seen: bool, factor: float) -> Fault:
        def fault(run: Run) -> None:
            grow(factor)(run)
            if is_seen:
                run.monitor.see_gradients()
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)

        return fault

    for is_seen in (True, False):
        faults = dict.fromkeys(range(1, BAD + 5), clipped(is_seen, 1.0)) | {BAD: clipped(is_seen, 1000.0)}
        run = Run(tmp_path / f"{is_seen}.db", Rescue()).go(BAD + 4, faults)
        assert [event.step for event in run.events()] == ([BAD] if is_seen else [])
        if is_seen:
            faults[BAD] = clipped(is_seen, 6.0)
            run = Run(tmp_path / "small.db", Rescue()).go(BAD + 4, faults, at=BAD)
            assert run.events("clip"), "a smaller jump"
            assert run.events("clip")[0].data["scale"] == 1, "the loop has clipped it enough"


def test_rescue_outlives_its_monitor_and_its_events_are_stored(tmp_path: Path) -> None:
    run = Run(tmp_path / "run.db", Rescue())

    def fails(*args: object, **options: object) -> None:
        raise RuntimeError("put in")

    def fault(run: Run) -> None:
        run.monitor._instruments.after_update = fails

    with pytest.raises(AssertionError, match="put in"):
        run.go(BAD + 5, {BAD - 5: fault, BAD: nan_gradient}, at=BAD)
    assert same(run.before, run.after)
    assert [event.step for event in run.events()] == [BAD]


def test_an_error_of_the_communication_ends_the_rescue_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("Connection closed by peer")

    def fault(run: Run) -> None:
        monkeypatch.setattr("normscope.monitor.rescuer.gathered", fails)

    run = Run(tmp_path / "run.db", Rescue()).go(BAD + 1, {5: fault, BAD: nan_gradient})
    (event,) = run.events()
    assert event.step == 5
    assert "peer" in event.data["sentence"]
    assert math.isnan(run.losses[-1])
