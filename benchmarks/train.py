"""`normscope bench train`: a step of `normscope train` against a plain PyTorch loop with the same model.

A step of normscope is a whole turn of `Run.go`: the batch, the step in `Trial`, the line in `losses.jsonl`,
the checks for Ctrl-C and for a checkpoint that is due, the view of a pipe. The plain loop has a batch of
random windows, `zero_grad`, forward, loss, `backward`, AdamW and `loss.item()`. They take turns in one
process and one thread, so that a slow phase of the machine affects both. The figure is the median over rounds
of the ratio of two steps of a round.
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.process import Row, circumstances, in_fresh_process, median_ms, median_ratio, row
from normscope.subjects.text import load_text
from normscope.train import RunConfig, Trial, prepared
from normscope.train.view import Lines

SIZES = ((128, 6, 240), (256, 12, 60))
"""Width, depth and rounds."""
BATCH, TOKENS = 4, 64
WARM = 10
"""First steps, which are not counted."""


def bench_train() -> list[Row]:
    """A row for each size."""
    return [_row(in_fresh_process(measure, *size, OMP_NUM_THREADS="1")) for size in SIZES]


def _row(measured: dict[str, Any]) -> Row:
    ours, plain = measured["ours"], measured["plain"]
    figure, quartiles = median_ratio(ours, plain, 3)
    what = f"training step of {measured['model']}, relative to a plain PyTorch loop"
    how = f"{quartiles}; medians {median_ms(ours, 2)} against {median_ms(plain, 2)}"
    return row(what, figure, "≤ 1.05", f"{how}; {measured['threads']} thread, {measured['allocator']}")


def plain_loop(model: nn.Module, data: Tensor) -> Callable[[], float]:
    """A step of a plain PyTorch loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> float:
        starts = torch.randint(len(data) - TOKENS, (BATCH,))
        x = torch.stack([data[i : i + TOKENS] for i in starts])
        y = torch.stack([data[i + 1 : i + 1 + TOKENS] for i in starts])
        optimizer.zero_grad()
        logits = model(x).logits
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


class Turns:
    """An observer that takes a plain step after each step of normscope, and times both."""

    def __init__(self, plain: Callable[[], float]) -> None:
        self._plain = plain
        self.ours: list[float] = []
        self.plain: list[float] = []
        self._left = 0.0

    def __call__(self, trial: Trial) -> None:
        """Record the time since the last call, which is normscope's step, then time a plain step."""
        came = time.perf_counter()
        self._plain()
        ended = time.perf_counter()
        if trial.step > WARM:
            self.ours.append(came - self._left)
            self.plain.append(ended - came)
        self._left = time.perf_counter()


def measure(width: int, depth: int, rounds: int) -> dict[str, Any]:
    """Seconds of each step, normscope's and plain, on one thread."""
    torch.set_num_threads(1)
    model = f"nn:decoder,width={width},depth={depth}"
    config = RunConfig.from_dict({"model": model, "validation": 0.0, "steps": WARM + rounds})
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):
        text = load_text()
        data = torch.from_numpy(text.read(0, len(text)).astype("int64"))
        turns, view = Turns(plain_loop(config.subject().model, data)), Lines()
        with prepared(config, folder=Path(folder) / "run", observers=[view, turns]) as run:
            view.watch(run)
            run.go()
    return {"model": model, "ours": turns.ours, "plain": turns.plain, **circumstances()}
