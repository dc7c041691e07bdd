"""`normscope bench train`: a step of `normscope train` against a plain PyTorch loop with the same model.

Ours is a whole turn of `Run.go`: the batch, the step in `Trial`, the line in `losses.jsonl`, the checks for
Ctrl-C and for a checkpoint that is due, the view of a pipe. Theirs is what one writes by hand: a batch of
random windows, `zero_grad`, forward, loss, `backward`, AdamW, `loss.item()`. They take turns in one process,
one thread, so that a slow spell of the machine falls on both; the figure is the median over the rounds of the
ratio of two steps of a round.
"""

import statistics
from typing import Any

from normscope.bench.process import in_fresh_process

_PARTS = "normscope.bench.train_parts"
SIZES = ("128,6,240", "256,12,60")
"""Width, depth and rounds."""


def bench_train() -> list[dict[str, Any]]:
    """A row a size."""
    return [_row(in_fresh_process(_PARTS, size, {"OMP_NUM_THREADS": "1"})) for size in SIZES]


def _row(measured: dict[str, Any]) -> dict[str, Any]:
    ours, plain = measured["ours"], measured["plain"]
    low, median, high = statistics.quantiles([a / b for a, b in zip(ours, plain, strict=True)], n=4)
    return {
        "what": f"training step of {measured['model']}, in steps of a plain PyTorch loop",
        "figure": f"{median:.3f}",
        "target": "≤ 1.05",
        "how": f"quartiles {low:.3f} and {high:.3f} of {len(ours)} rounds; medians {_ms(ours)} against "
        f"{_ms(plain)}; {measured['threads']} thread, {measured['allocator']}",
    }


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.2f} ms"
