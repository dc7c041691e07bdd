"""`normscope bench script-steps`: a training script's steps under `check --`, against the script alone.

The script is a plain loop of a GPT-like model (Pre-LN, GELU, causal attention, AdamW, clipping). It notes the
processor time of each turn, which other work on the machine hardly changes. Runs with and without
`normscope check --` take turns, each in new processes and one thread. Between some steps normscope measures
the model; the turns in which it does are left out, and so are the first ones. A run's figure is its median
turn; the row's is the median over pairs of runs of their ratio.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.process import ROOT, Row, circumstances, median_ms, row
from normscope.forecast.watch import measured_steps

SIZES = ((256, 6, 5), (64, 6, 5))
"""Width, depth and pairs of runs."""
STEPS, WARM = 60, 10
"""Steps of a run, and the first ones, which are not counted."""
SCRIPT = Path(__file__).parent / "gpt_like.py"
TARGET = 1.15


def bench_script_steps() -> list[Row]:
    """A row for each size."""
    return [_row(*size) for size in SIZES]


def _row(width: int, depth: int, pairs: int) -> Row:
    alone, under = [], []
    for _ in range(pairs):
        alone.append(_median(width, depth, []))
        under.append(_median(width, depth, _CHECK))
    ratios = [a / b for a, b in zip(under, alone, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    what = f"step of a script under check --, relative to its own: GPT-like, width {width}, depth {depth}"
    times = f"medians {median_ms(under, 2)} against {median_ms(alone, 2)} of processor time"
    how = f"quartiles {low:.3f} and {high:.3f} of {pairs} pairs of runs; {times}; 1 thread, "
    how += circumstances()["allocator"]
    return row(what, f"{middle:.3f}", f"≤ {TARGET}", how)


_CHECK = [sys.executable, "-m", "normscope", "check", "--budget", "fast", "--steps", str(STEPS), "--format"]
_CHECK += ["json", "--fail-on", "never", "--"]


def _median(width: int, depth: int, before: list[str]) -> float:
    """Median processor time, in seconds, of a turn of the script, which the command `before` runs."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times.json"
        words = [*before, sys.executable, str(SCRIPT), *map(str, (width, depth, STEPS, times))]
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{words} failed:\n{done.stderr}")
        turns = json.loads(times.read_text())
    # Turn i ends after step i; measurements at a step lie before and after it, in its turn.
    measured = {*measured_steps(STEPS), STEPS}
    return statistics.median(turns[i] for i in range(WARM, len(turns)) if i + 1 not in measured)
