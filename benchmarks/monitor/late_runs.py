"""Small runs that go wrong late, each beside a healthy twin: how many steps before the loss the alarms come.

    python -m benchmarks.monitor.runs late TEXT [FOLDER]
    python -m benchmarks.monitor.runs rescued TEXT FOLDER [PICTURE]

Nothing is injected: each run fails by a setting that people really choose. Its twin differs in that setting
alone, and sees the same batches from the same weights. The stores stay in FOLDER; a run whose store there has
ended is judged again from it.

**When the loss moves** was fixed before any alarm was looked at. Batches are not equally hard, so that the
twin's deviation from its own median over 51 steps is subtracted from each loss. The loss has moved, from step
100 on, at the first step

- whose loss is above the median of the 50 before by 0.1 nats and by 6·1.4826·MAD of these (a jump), or
- from which on the median of 10 losses stays 10 steps above its lowest value so far by 0.1 nats (a rise), or
- for bfloat16, where no loss rises: at which the median difference to the twin over 50 steps, less its lowest
  value so far (at least 0), passes 0.1 nats, and stays there for 10 steps.

The lead is that step minus the step of the first alarm of the kind's own codes, `Kind.codes`.
"""

import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from normscope.claims.plots import COLOURS, DASHES
from normscope.monitor import Monitor, Rescue
from normscope.monitor.after.findings import facts_of
from normscope.monitor.alarms import Judges
from normscope.monitor.store import RunReader
from normscope.rules import Finding
from normscope.subjects import Subject, load

Floats = NDArray[np.float64]

EFFECT = 0.1
"""Nats by which a loss moves."""
LATE = 100
"""First step that counts."""
SETTLED = 200
"""Step from which a run that spikes has fitted its data."""
SEEDS = (10, 11, 12)


@dataclass(frozen=True)
class Setting:
    """One run.

    Attributes:
        spec: MODEL.
        lr: learning rate by step.
        qk: factor on the learning rate of queries and keys.
        beta2, decay: of AdamW.
        dtype: of the weights.
        batches: number of different batches, which are repeated; 0 for all of the text.
        steps: planned number of steps.
    """

    spec: str
    lr: Callable[[int], float]
    steps: int
    qk: float = 1.0
    beta2: float = 0.999
    decay: float = 0.0
    dtype: torch.dtype | None = None
    batches: int = 0


def ramp(to: float, over: int) -> Callable[[int], float]:
    """A warm-up, then a constant rate."""
    return lambda step: to * min(1.0, step / over)


def warm_then_linear(to: float, over: int, until: int, last: float) -> Callable[[int], float]:
    """A warm-up, then a straight line to the share `last` of the rate at step `until`."""
    return lambda step: (
        to * min(step / over, 1 - (1 - last) * min(1.0, max(0.0, (step - over) / (until - over))))
    )


DECODER = "nn:decoder,depth=4,width=32,heads=4"
SPIKE = Setting(DECODER, ramp(3e-3, 50), 800, beta2=0.98, batches=1)
LOGITS = Setting(DECODER, ramp(3e-3, 50), 500, qk=100)
COLLAPSE = Setting("nn:decoder,depth=4,width=64,heads=4", ramp(0.1, 1000), 850)
FREEZE = Setting(DECODER, warm_then_linear(1e-3, 50, 1000, 0.1), 1000, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Kind:
    """One kind of failure.

    Attributes:
        fails, healthy: the two settings.
        codes: alarms that are about this failure.
    """

    fails: Setting
    healthy: Setting
    codes: tuple[str, ...]


KINDS = {
    "spike": Kind(SPIKE, replace(SPIKE, beta2=0.999), ("NS817",)),
    "logits": Kind(LOGITS, replace(LOGITS, spec=f"{DECODER},qk_norm=head"), ("NS819",)),
    "collapse": Kind(
        COLLAPSE,
        replace(COLLAPSE, lr=lambda step: min(step * 1e-4, 3e-3)),
        ("NS807", "NS808", "NS810", "NS811"),
    ),
    "freeze": Kind(FREEZE, replace(FREEZE, dtype=None), ("NS813",)),
}


def late(text: Path, folder: Path | None = None, *names: Path) -> None:
    """Train all runs, and print the leads and the alarms."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in map(str, names or KINDS):
            kind, leads = KINDS[name], []
            for seed in SEEDS:
                stores = [folder / f"{name}-{seed}-{which}.db" for which in ("fails", "healthy")]
                for setting, store in zip((kind.fails, kind.healthy), stores, strict=True):
                    if not has_ended(store, setting.steps):
                        store.unlink(missing_ok=True)
                        train(setting, seed, text, store)
                leads.append(_say(f"{name}, seed {seed}", kind, *stores))
            known = [lead for lead in leads if lead is not None]
            if known:
                print(f"{name}: leads {known}, median {statistics.median(known):g}")


def has_ended(store: Path, steps: int) -> bool:
    """Whether a store holds a whole run."""
    if not store.exists():
        return False
    with RunReader(store) as reader:
        return reader.last_step == steps and all(rank.state == "ended" for rank in reader.ranks())


def train(setting: Setting, seed: int, text: Path | None, store: Path, **options: Any) -> None:
    """Train under a monitor with `options`, on a text or on the standard library's source."""
    subject = load(setting.spec, seed=seed, text=text, dtype=setting.dtype)
    model = subject.model.train()
    optimizer = torch.optim.AdamW(
        groups(model, setting), betas=(0.9, setting.beta2), weight_decay=setting.decay
    )
    batches = fed(subject, setting)
    entropy = None if setting.batches else subject.unigram_entropy
    with Monitor(
        model, optimizer, store=store, entropy=entropy, on_alarm=lambda _: None, **options
    ) as monitor:
        for step in range(1, setting.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = setting.lr(step) * group["factor"]
            loss = subject.loss(next(batches))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    assert monitor.failure is None, monitor.failure


def groups(model: nn.Module, setting: Setting) -> list[dict[str, Any]]:
    """Parameter groups: queries and keys, and the rest."""
    chosen = {id(p) for name, p in model.named_parameters() if ".q." in name or ".k." in name}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    mine = [p for p in model.parameters() if id(p) in chosen]
    return [{"params": rest, "factor": 1.0}, {"params": mine, "factor": setting.qk}]


def fed(subject: Subject, setting: Setting) -> Iterator[Any]:
    """The batches of a run."""
    batches = subject.batches()
    return itertools.cycle(itertools.islice(batches, setting.batches)) if setting.batches else batches


def moved(loss: Floats, twin: Floats, *, behind: bool) -> int | None:
    """Step at which the loss moves, None where it does not; see the head of this file.

    Args:
        loss, twin: [steps], the losses of step 1 on.
    """
    loss = np.nan_to_num(loss, nan=np.inf, posinf=np.inf)
    if behind:
        lags = _medians(loss - twin, 50)
        lowest = np.maximum(0.0, np.minimum.accumulate(np.where(np.isnan(lags), np.inf, lags)))
        return _lasting(lags - lowest > EFFECT)
    steady = loss - (twin - _medians(np.pad(twin, 25, mode="edge"), 51)[50:])
    smooth = _medians(steady, 10)
    lowest = np.minimum.accumulate(np.where(np.isnan(smooth), np.inf, smooth))
    found = [_lasting(smooth - lowest > EFFECT), _jump(steady)]
    return min((step for step in found if step is not None), default=None)


def _lasting(above: NDArray[np.bool_]) -> int | None:
    """First step from `LATE` on that begins 10 steps in a row."""
    for index in range(LATE - 1, len(above) - 9):
        if above[index : index + 10].all():
            return index + 1
    return None


def _jump(loss: Floats) -> int | None:
    for index in range(LATE - 1, len(loss)):
        before = loss[index - 50 : index]
        median = np.median(before)
        if loss[index] > median + max(EFFECT, 6 * 1.4826 * float(np.median(np.abs(before - median)))):
            return index + 1
    return None


def _medians(values: Floats, count: int) -> Floats:
    """Median of the last `count` values at each; NaN before there are as many."""
    windows = np.lib.stride_tricks.sliding_window_view(values, count)
    return np.concatenate([np.full(count - 1, np.nan), np.median(windows, axis=1)])


def _say(name: str, kind: Kind, fails: Path, healthy: Path) -> int | None:
    step = moved(losses(fails), losses(healthy), behind=kind.fails.dtype is not None)
    ends = " and ".join(f"{np.median(losses(store)[-50:]):.2f}" for store in (fails, healthy))
    found = judged(fails)
    first = next((step for step, each in found if each.code in kind.codes), None)
    lead = None if step is None or first is None else step - first
    print(f"{name}: the loss moves at step {step}, it ends at {ends} (twin); lead {lead}")
    for which, alarms in (("", found), ("twin, ", judged(healthy))):
        for at, finding in alarms:
            print(f"  {which}step {at}: {finding.code} {finding.message}")
    sys.stdout.flush()
    return lead


def losses(store: Path) -> Floats:
    """[steps], the losses of a run."""
    with RunReader(store) as reader:
        return reader.series("loss")[1]


def judged(store: Path) -> list[tuple[int, Finding]]:
    """Steps and alarms of a stored run, by the alarms of this version."""
    with RunReader(store) as reader:
        judges = Judges(facts_of(reader.notes(), 1))
        return [
            (row.step, finding)
            for row, layout in reader.all_rows(reader.last_step)
            for finding in judges.feed(row.step, layout, row.values)
        ]


RESCUES: dict[str, Rescue | None] = {
    "alone": None,
    "Rescue()": Rescue(),
    "Rescue(lower=0.1)": Rescue(lower=0.1),
}


def rescued(text: Path, folder: Path, picture: Path | None = None) -> None:
    """Train the runs that spike alone, with two rescues, and as twins; print a table, and draw the losses."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = KINDS["spike"]
    print(
        f"| seed | run | largest loss from step {SETTLED} on | last loss | not taken |\n|---|---|---|---|---|"
    )
    for seed in SEEDS:
        found = {}
        for number, (name, rescue) in enumerate({**RESCUES, "twin, β2 = 0.999": None}.items()):
            store = folder / f"spike-{seed}-{('fails', 'rescue', 'lower', 'healthy')[number]}.db"
            setting = kind.healthy if number == len(RESCUES) else kind.fails
            if not has_ended(store, setting.steps):
                store.unlink(missing_ok=True)
                train(setting, seed, text, store, rescue=rescue)
            with RunReader(store) as reader:
                loss = found[name] = reader.series("loss")[1]
                skipped = 0.0 if rescue is None else float((reader.series("rescued")[1] > 0).sum())
            largest, last = f"{loss[SETTLED - 1 :].max():.3g}", f"{np.median(loss[-50:]):.2g}"
            print(f"| {seed} | {name} | {largest} | {last} | {skipped:g} |", flush=True)
        if picture is not None and seed == SEEDS[0]:
            draw(found, picture)


def draw(found: Mapping[str, Floats], picture: Path) -> None:
    """Losses by step on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for (name, loss), colour, dash in zip(found.items(), COLOURS, DASHES, strict=False):
        axis.semilogy(
            np.arange(1, len(loss) + 1), loss, label=name, color=colour, linestyle=dash, linewidth=1.3
        )
    axis.set_xlabel("step")
    axis.set_ylabel("loss (nats)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(picture, dpi=150)
