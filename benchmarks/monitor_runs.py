"""Runs under `normscope.Monitor`, by hand: `python -m benchmarks.monitor_runs healthy TEXT`.

`healthy` trains 20 models of width 64 for 2,000 steps each and counts alarms; there should be none. The table
was fixed before the first run: ten schemes that train at that depth, with two settings of the loop each.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

from normscope.monitor import Monitor
from normscope.subjects import load

STEPS, BATCH, TOKENS = 2000, 4, 64
SCHEMES = ("pre", "peri", "gpt2", "deepnorm", "res-post", "normformer", "rezero", "sub-ln", "olmo2", "post")
LOOPS = ((1e-3, 0.01, 100, 1.0), (3e-4, 0.1, 0, None))
"""Learning rate, weight decay, steps of warm-up, clipping."""


def healthy(text: Path) -> None:
    """Train and print a line for each run, with its alarms."""
    for number, scheme in enumerate(SCHEMES):
        for seed, (lr, decay, warmup, clip) in enumerate(LOOPS):
            begin = time.time()
            depth = 2 if scheme == "post" else 6
            spec = f"nn:decoder,scheme={scheme},depth={depth},width=64,heads=4"
            monitor, loss = _run(spec, 10 * number + seed, text, lr, decay, warmup, clip)
            took = f"{time.time() - begin:.0f} s"
            print(f"{spec} lr {lr:g}: loss {loss:.3f}, {len(monitor.alarms)} alarms, {took}")
            for raised in monitor.alarms:
                print(f"  step {raised.step}: {raised.finding.code} {raised.finding.message}")
            sys.stdout.flush()


def _run(
    spec: str, seed: int, text: Path, lr: float, decay: float, warmup: int, clip: float | None
) -> tuple[Monitor, float]:
    subject = load(spec, seed=seed, text=text, batch_size=BATCH, seq_len=TOKENS)
    model = subject.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1)) * (1 - 0.9 * step / STEPS)
    )
    batches = subject.batches()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "run.db"
        with Monitor(
            model, optimizer, store=store, entropy=subject.unigram_entropy, on_alarm=lambda _: None
        ) as monitor:
            for _ in range(STEPS):
                loss = subject.loss(next(batches))
                optimizer.zero_grad()
                loss.backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                schedule.step()
                monitor.step(loss)
    assert monitor.failure is None, monitor.failure
    return monitor, float(loss.detach())


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"healthy": healthy}[sys.argv[1]](Path(sys.argv[2]))
