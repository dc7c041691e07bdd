"""Tools for benchmarks: new processes, records of runs, clocks, and rows of a table."""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]

Row = dict[str, Any]
"""One line of a benchmark's table: what was measured, the figure, its target, and how it was measured."""


def row(what: str, figure: str, target: str, how: str) -> Row:
    """One line of a benchmark's table."""
    return {"what": what, "figure": figure, "target": target, "how": how}


def in_fresh_process(part: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """Call `part(*arguments)` in a new process; arguments and result are passed as JSON.

    Args:
        part: a function that its module holds under its name.
        environment: additional environment variables of the new process.

    Raises:
        RuntimeError: the process failed; the message holds its stderr.
    """
    code = f"import json, sys; sys.path.insert(0, {str(ROOT)!r}); "
    code += f"from {part.__module__} import {part.__name__} as part; "
    code += "print(json.dumps(part(*json.loads(sys.argv[1]))))"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"benchmark process {part.__name__} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def circumstances() -> dict[str, Any]:
    """Settings on which a time depends besides the code: threads and allocator."""
    import torch

    allocator = os.path.basename(os.environ.get("LD_PRELOAD", "")) or "the C library's allocator"
    return {"threads": torch.get_num_threads(), "allocator": allocator}


def records_of(file: Path) -> list[dict[str, Any]]:
    """The records of a file, one line of JSON each; none if it is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def rounded(value: float) -> float | None:
    """A loss for a record, to four decimals; None if it is not finite."""
    return round(value, 4) if math.isfinite(value) else None


EVERY = 20
"""Steps whose mean loss is one point of a record's curve."""


def means(losses: Sequence[float]) -> list[float]:
    """Mean losses of each `EVERY` steps; a shorter rest at the end is left out."""
    whole = range(0, len(losses) - EVERY + 1, EVERY)
    return [float(sum(losses[i : i + EVERY])) / EVERY for i in whole]


class Seconds(NamedTuple):
    """Wall-clock and processor time of a call, in seconds; other processes affect only the former."""

    wall: float
    cpu: float


def seconds(run: Callable[[], object]) -> Seconds:
    """Time one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def median_ratio(above: Sequence[float], below: Sequence[float], digits: int = 2) -> tuple[str, str]:
    """Median over the rounds of the ratio of two times of a round, and its quartiles, as text."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    low, median, high = (f"{figure:.{digits}f}" for figure in statistics.quantiles(ratios, n=4))
    return median, f"quartiles {low} and {high} of {len(ratios)} rounds"


def median_ms(times: Sequence[float], digits: int = 0) -> str:
    """Median of times in seconds, as text in milliseconds."""
    return f"{1e3 * statistics.median(times):.{digits}f} ms"


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion."""
    if trials == 0:
        return 0.0, 1.0
    z, share = 1.96, hits / trials
    middle = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
