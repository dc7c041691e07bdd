"""Numbers that are read one step late, as on a device; here the device is the CPU."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.monitor import Monitor, RunReader
from normscope.monitor import monitor as module_of_monitor
from normscope.monitor.recorder import Recorder
from normscope.monitor.row import FIRST_WRONG_VALUE
from normscope.subjects import load

SPECS = (
    "nn:decoder,scheme=pre,depth=2,width=16,heads=2",
    "hf:gpt2,n_layer=2,n_embd=16,n_head=2,vocab_size=64",
    "hf:t5,num_layers=2,d_model=16,num_heads=2,d_ff=32,d_kv=8,vocab_size=64",
)
STEPS, WRONG = 23, 14
"""The step that goes wrong is none at which all figures are due: such steps are read at once."""

Fault = Callable[[nn.Module], object]


def trained(spec: str, path: Path, fault: Fault | None = None, **options: Any) -> list[float]:
    """Losses of a run under a monitor."""
    subject = load(spec)
    model = subject.model.train()
    torch.manual_seed(0)  # dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches, losses = subject.batches(), []
    with Monitor(model, optimizer, store=path, on_alarm=lambda _: None, **options) as monitor:
        for step in range(1, STEPS + 1):
            if step == WRONG and fault is not None:
                fault(model)
            loss = subject.loss(next(batches))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
            losses.append(float(loss.detach()))
    assert monitor.failure is None, monitor.failure
    return losses


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Function after which numbers are read late."""
    return lambda: monkeypatch.setattr(module_of_monitor, "is_on_device", lambda model: True)


def tables(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    with RunReader(path) as reader:
        quantities = [name for name in reader.columns() if name != "seconds"]
        return {name: (reader.table(name)[0], reader.table(name)[2]) for name in quantities}


@pytest.mark.parametrize("spec", SPECS)
def test_late_rows_are_those_that_are_read_at_once(spec: str, tmp_path: Path, late: Any) -> None:
    losses = trained(spec, tmp_path / "now.db")
    late()
    assert trained(spec, tmp_path / "late.db") == losses
    expected, found = tables(tmp_path / "now.db"), tables(tmp_path / "late.db")
    assert found.keys() == expected.keys()
    assert found["loss"][0].tolist() == list(range(1, STEPS + 1)), "the last step too"
    for name, (steps, values) in expected.items():
        np.testing.assert_array_equal(found[name][0], steps, err_msg=name)
        np.testing.assert_allclose(found[name][1], values, rtol=1e-6, err_msg=name)


def linears(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if type(each).__name__ in ("Linear", "Conv1D")]


def nan_weight(model: nn.Module) -> None:
    with torch.no_grad():
        max(model.parameters(), key=lambda p: p.numel()).view(-1)[::7] = math.nan


def nan_activation(model: nn.Module) -> None:
    linears(model)[-2].register_forward_hook(lambda module, args, output: output * math.nan)


def nan_gradient(model: nn.Module) -> None:

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient * math.inf)

    linears(model)[1].register_forward_hook(hook)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("fault", [nan_weight, nan_activation, nan_gradient])
def test_a_wrong_value_is_traced_with_the_weights_of_its_step(
    fault: Fault, spec: str, tmp_path: Path, late: Any
) -> None:
    trained(spec, tmp_path / "now.db", fault)
    late()
    trained(spec, tmp_path / "late.db", fault)
    events = []
    for name in ("now.db", "late.db"):
        with RunReader(tmp_path / name) as reader:
            events.append(reader.events(FIRST_WRONG_VALUE)[0])
    assert [event.step for event in events] == [WRONG, WRONG]
    for key in ("module", "phase", "op", "kind", "sentence"):
        assert events[1].data[key] == events[0].data[key], key


def scaled(path: Path, *, fused: bool, count: int = 1) -> None:
    """A run of `count` optimizers with a loss scaler that skips its first step and step `WRONG`."""
    subject = load(SPECS[0])
    model, batches = subject.model.train(), subject.batches()
    parameters = list(model.parameters())
    optimizers = [torch.optim.AdamW(parameters[i::count], lr=1e-3, fused=fused) for i in range(count)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    with Monitor(model, optimizers, store=path, scaler=scaler) as monitor:
        for step in range(1, STEPS + 1):
            loss = subject.loss(next(batches))
            scaler.scale(loss).backward()
            if step in (1, WRONG):
                for parameter in parameters[:count]:
                    assert parameter.grad is not None
                    parameter.grad.view(-1)[0] = math.inf
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
            monitor.step(loss)
    assert monitor.failure is None, monitor.failure
    assert not monitor.alarms


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_fused_optimizer_under_a_loss_scaler_is_measured_as_another(
    is_late: bool, count: int, tmp_path: Path, late: Any
) -> None:
    scaled(tmp_path / "plain.db", fused=False)
    if is_late:
        late()
    scaled(tmp_path / "fused.db", fused=True, count=count)
    expected, found = tables(tmp_path / "plain.db"), tables(tmp_path / "fused.db")
    assert found["skipped"][1].ravel().tolist() == [float(step in (1, WRONG)) for step in range(1, STEPS + 1)]
    assert found.keys() == expected.keys()
    for name in ("gradient/norm", "gradient/block", "gradient/kind", "adam/lag", "skipped", "loss-scale"):
        np.testing.assert_array_equal(found[name][0], expected[name][0], err_msg=name)
        np.testing.assert_allclose(found[name][1], expected[name][1], rtol=1e-3, err_msg=name)
    with RunReader(tmp_path / "fused.db") as reader:
        assert not reader.events(FIRST_WRONG_VALUE)


class Reads(TorchDispatchMode):
    """Counts the numbers that Python reads from tensors, for which a host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_late_step_reads_no_number(is_late: bool, late: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_late:
        late()
    reads, finish = Reads(), Recorder._record

    def apart(self: Recorder, taken: Any) -> Any:  # it reads numbers that have arrived
        before = reads.count
        found = finish(self, taken)
        reads.count = before
        return found

    monkeypatch.setattr(Recorder, "_record", apart)
    subject = load(SPECS[0])
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=1e-3)
    batches, counts = subject.batches(), []
    with Monitor(subject.model.train(), optimizer) as monitor:
        for _ in range(1, 19):
            reads.count = 0
            with reads:
                loss = subject.loss(next(batches))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(loss)
            counts.append(reads.count)
    assert monitor.failure is None, monitor.failure
    assert (sum(counts[11:]) == 0) == is_late, counts
