"""Runs under `normscope.Monitor`, by hand: `python -m benchmarks.monitor.runs healthy TEXT [FOLDER [SEED]]`.

`healthy` trains 20 models of width 64 for 2,000 steps each and counts alarms, and notes apart; there should
be no alarm. The table was fixed before the first run: ten schemes that train at that depth, with two
settings of the loop each. Runs of the seeds from 0 to 3000 on raised alarms by which criteria were
changed (docs/alarms.md). The stores stay in
FOLDER; a run whose store there has ended is judged again from it, so that a second call goes on where the
first was stopped.

`late` and `rescued` train runs that go wrong late, see `late_runs.py`.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.monitor import late_runs
from normscope.monitor import Monitor
from normscope.rules import Severity
from normscope.subjects import load

STEPS, BATCH, TOKENS, FIRST_SEED = 2000, 4, 64, 6000
SCHEMES = ("pre", "peri", "gpt2", "deepnorm", "res-post", "normformer", "rezero", "sub-ln", "olmo2", "post")
LOOPS = ((1e-3, 0.01, 100, 1.0), (3e-4, 0.1, 0, None))
"""Learning rate, weight decay, steps of warm-up, clipping."""


def healthy(text: Path, folder: Path | None = None, first_seed: int | str | Path = FIRST_SEED) -> None:
    """Train and print a line for each run, with its alarms."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for number, scheme in enumerate(SCHEMES):
            for which, (lr, decay, warmup, clip) in enumerate(LOOPS):
                depth = 2 if scheme == "post" else 6
                spec = f"nn:decoder,scheme={scheme},depth={depth},width=64,heads=4"
                seed = int(str(first_seed)) + 10 * number + which
                store = folder / f"{seed:02}-{scheme}.db"
                if not late_runs.has_ended(store, STEPS):
                    store.unlink(missing_ok=True)
                    _run(spec, seed, text, store, lr, decay, warmup, clip)
                _say(f"{spec} lr {lr:g}", store)


def _say(name: str, store: Path) -> None:
    alarms = late_runs.judged(store)
    loss = float(late_runs.losses(store)[-100:].mean())
    notes = sum(finding.severity is Severity.NOTE for _, finding in alarms)
    print(f"{name}: loss {loss:.3f}, {len(alarms) - notes} alarms, {notes} notes")
    for step, finding in alarms:
        print(f"  step {step}, {finding.severity}: {finding.code} {finding.message}")
    sys.stdout.flush()


def _run(
    spec: str, seed: int, text: Path, store: Path, lr: float, decay: float, warmup: int, clip: float | None
) -> None:
    subject = load(spec, seed=seed, text=text, batch_size=BATCH, seq_len=TOKENS)
    model = subject.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1)) * (1 - 0.9 * step / STEPS)
    )
    batches = subject.batches()
    with Monitor(
        model, optimizer, store=store, entropy=subject.unigram_entropy, on_alarm=lambda _: None
    ) as monitor:
        for _ in range(STEPS):
            loss = subject.loss(next(batches))
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                monitor.see_gradients()
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            monitor.step(loss)
    assert monitor.failure is None, monitor.failure


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs: dict[str, Callable[..., None]] = {
        "healthy": healthy,
        "late": late_runs.late,
        "rescued": late_runs.rescued,
    }
    runs[sys.argv[1]](*map(Path, sys.argv[2:]))
