"""`normscope bench monitor`: a training step under a monitor, against the step alone.

The model is a Pre-LN decoder of 12 layers, d = 256, 9.6 million weights, with AdamW, on 8 × 128 tokens; ours
also on 8 × 512, since most of what it does costs the same for any number of tokens. Two copies of the model
take steps in turns in one process, one of them watched. A row's figure is the median over pairs of steps of
their ratio. `normscope.Monitor` writes its store and judges its alarms, as by default; the
others have their defaults too.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import normscope
from benchmarks.process import Row, circumstances, in_fresh_process, median_ms, row
from normscope.monitor import Monitor, Rescue

DEPTH, WIDTH, BATCH, TOKENS, IDS = 12, 256, 8, (128, 512), 256
PAIRS, WARM, LOOKS = {128: 60, 512: 24}, 10, 5
TARGET = 1.02

Seen = Callable[[Tensor], object]
"""Called with the loss."""


def _nothing(loss: Tensor) -> None:
    pass


@dataclass(frozen=True)
class Calls:
    """Calls that a monitor wants: after the backward, and at the end of the step."""

    after_backward: Seen = _nothing
    at_end: Seen = _nothing


class Loop:
    """A plain loop on random ids."""

    def __init__(self, tokens: int = TOKENS[0]) -> None:
        torch.manual_seed(0)
        self.model = normscope.nn.build(
            "decoder", scheme="gpt2", depth=DEPTH, width=WIDTH, heads=8, context=tokens, vocab=IDS
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.ids = torch.randint(0, IDS, (BATCH, tokens))

    def step(self, calls: Calls | None = None) -> float:
        """Seconds of a step."""
        calls = calls or Calls()
        begin = time.perf_counter()
        logits, *_ = self.model(self.ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), self.ids[:, 1:].flatten())
        loss.backward()
        calls.after_backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        calls.at_end(loss)
        return time.perf_counter() - begin


@contextmanager
def ours(loop: Loop) -> Iterator[Calls]:
    """`normscope.Monitor` with a store."""
    with tempfile.TemporaryDirectory() as folder:
        with Monitor(loop.model, loop.optimizer, store=Path(folder) / "run.db") as monitor:
            yield Calls(at_end=monitor.step)
        assert monitor.failure is None, monitor.failure


@contextmanager
def with_rescue(loop: Loop) -> Iterator[Calls]:
    """The same with a rescue, which has nothing to do here."""
    with Monitor(loop.model, loop.optimizer, rescue=Rescue()) as monitor:
        yield Calls(at_end=monitor.step)
    assert monitor.failure is None, monitor.failure


@contextmanager
def anomaly(loop: Loop) -> Iterator[Calls]:
    """PyTorch's anomaly mode."""
    step = loop.step

    def watched(calls: Calls | None = None) -> float:
        with torch.autograd.set_detect_anomaly(True):
            return step(calls)

    loop.step = watched  # type: ignore[method-assign]
    yield Calls()


@contextmanager
def histograms(loop: Loop) -> Iterator[Calls]:
    """A histogram of each gradient at each step, by hooks, as `wandb.watch` takes them every few steps."""

    def hook(gradient: Tensor) -> None:
        low, high = torch.aminmax(gradient)
        torch.histc(gradient, 64, float(low), float(high))

    handles = [parameter.register_hook(hook) for parameter in loop.model.parameters()]
    yield Calls()
    for handle in handles:
        handle.remove()


@contextmanager
def trainscope(loop: Loop) -> Iterator[Calls]:
    """trainscope, called before the optimizer as its README says."""
    from trainscope import TrainScope, TrainScopeConfig

    with tempfile.TemporaryDirectory() as folder:
        scope = TrainScope(loop.model, loop.optimizer, config=TrainScopeConfig(run_dir=folder)).attach()
        yield Calls(after_backward=lambda loss: scope.step(loss.item()))
        scope.detach()


@contextmanager
def torchmortem(loop: Loop) -> Iterator[Calls]:
    """torchmortem with its default sampling."""
    from torchmortem import Autopsy

    autopsy = Autopsy(loop.model, optimizer=loop.optimizer)
    autopsy.attach()
    yield Calls(at_end=lambda loss: autopsy.step(loss=loss.item()))
    autopsy.detach()


OURS = "normscope.Monitor"
VARIANTS: dict[str, Any] = {
    OURS: ours,
    "normscope.Monitor with Rescue()": with_rescue,
    "anomaly mode": anomaly,
    "histograms by hooks": histograms,
    "trainscope 1.8.1": trainscope,
    "torchmortem 0.1.1": torchmortem,
}


def measured(name: str, tokens: int) -> dict[str, Any]:
    """Times of pairs of steps, without and with the monitor `name`."""
    plain, watched = Loop(tokens), Loop(tokens)
    pairs = []
    with VARIANTS[name](watched) as calls:
        for number in range(WARM + PAIRS[tokens]):
            if number % 2:
                alone, under = plain.step(), watched.step(calls)
            else:
                under, alone = watched.step(calls), plain.step()
            pairs.append((alone, under))
    return {"pairs": pairs[WARM:], **circumstances()}


def bench_monitor() -> list[Row]:
    """A row for each monitor, and those of a look."""
    rows = [_row(OURS, TOKENS[1]), *(_row(name, TOKENS[0]) for name in VARIANTS)]
    return rows + [_row_of_look(jacobian) for jacobian in (False, True)]


def measured_look(jacobian: bool) -> dict[str, Any]:
    """Seconds of steps under a monitor, and of looks between them."""
    loop, steps, looks = Loop(), [], []
    with Monitor(loop.model, loop.optimizer) as monitor:
        for number in range(WARM + 3 * LOOKS):
            steps.append(loop.step(Calls(at_end=monitor.step)))
            if number >= WARM and number % 3 == 0:
                begin = time.perf_counter()
                monitor.look(jacobian=jacobian)
                looks.append(time.perf_counter() - begin)
    assert monitor.failure is None, monitor.failure
    return {"steps": steps[WARM:], "looks": looks, **circumstances()}


def _row_of_look(jacobian: bool) -> Row:
    found = in_fresh_process(measured_look, jacobian)
    ratio = statistics.median(found["looks"]) / statistics.median(found["steps"])
    how = f"median of {len(found['looks'])} looks, {median_ms(found['looks'])} against "
    how += f"{median_ms(found['steps'])} a step; {found['threads']} threads, {found['allocator']}"
    name = "monitor.look(jacobian=True)" if jacobian else "monitor.look()"
    return row(f"{name}, in training steps", f"{ratio:.1f}", "–", how)


def _row(name: str, tokens: int) -> Row:
    found = in_fresh_process(measured, name, tokens)
    alone, under = zip(*found["pairs"], strict=True)
    ratios = [b / a for a, b in found["pairs"]]
    low, middle, high = statistics.quantiles(ratios, n=4)
    target = f"≤ {TARGET}" if name == OURS else "–"
    how = f"quartiles {low:.3f} and {high:.3f} of {len(ratios)} pairs; mean step "
    how += f"{1e3 * statistics.mean(under):.0f} ms against {1e3 * statistics.mean(alone):.0f} ms, medians "
    how += f"{median_ms(under)} against {median_ms(alone)}; {found['threads']} threads, {found['allocator']}"
    return row(
        f"step of {BATCH} × {tokens} tokens under {name}, relative to the step alone",
        f"{middle:.3f}",
        target,
        how,
    )
