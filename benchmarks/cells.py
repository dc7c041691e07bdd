"""`normscope bench cells`: cells of a map per hour, against one process for each cell.

The cells are runs of 300 steps of one shape (Post-LN decoder, depth 6, d = 32), four learning rates by four
seeds, without early stop. normscope is the local engine of `normscope map` with all its work: measuring the
stack, starting workers, writing the store. The alternative is a new process of one thread for each cell, as
many at once as there are cores, each training one cell as the map would. Stacking is also measured alone: in
one process, a step of a stack of K replicas takes turns with a step of K single trials.
"""

import itertools
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.process import Row, circumstances, in_fresh_process, median_ms, median_ratio, row
from normscope.maps import Cell, Grid, Store, run_map, train_group
from normscope.maps.run import num_cores
from normscope.subjects import load
from normscope.train import LoneTrials, Recipe, RunConfig, TrialStack

STEPS, ROUNDS = 300, 15
RATES, SEEDS = (1e-4, 3e-4, 1e-3, 3e-3), range(4)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def bench_cells() -> list[Row]:
    """Rows for the engine, for stacking alone, and for a GPU if there is one."""
    return [
        _engine_row(in_fresh_process(engine, **_ONE_THREAD)),
        *(_warm_row(in_fresh_process(warm, size, 32, "cpu", **_ONE_THREAD), "—") for size in (4, 8, 16)),
        _gpu_row(),
    ]


def _engine_row(measured: dict[str, Any]) -> Row:
    cells, ours, lone = measured["cells"], measured["ours"], measured["lone"]
    an_hour, lone_an_hour = (f"{3600 * cells / each['wall_s']:.0f}" for each in (ours, lone))
    return row(
        "cells an hour at d = 32 on the CPU, relative to one process for each cell",
        f"{lone['wall_s'] / ours['wall_s']:.2f}",
        "≥ 1.4",
        f"{an_hour} against {lone_an_hour} an hour; CPU seconds a cell {ours['cpu_s'] / cells:.2f} against "
        f"{lone['cpu_s'] / cells:.2f}; stacks of {measured['stack']}, {measured['workers']} workers, "
        f"{cells} cells of {STEPS} steps",
    )


def _warm_row(measured: dict[str, Any], target: str) -> Row:
    stacked, lone, size = measured["stacked"], measured["lone"], measured["size"]
    figure, quartiles = median_ratio(lone, stacked)
    return row(
        f"stacking alone: a step of {size} single trials, relative to a step of their stack, "
        f"d = {measured['width']} on {measured['device']}",
        figure,
        target,
        f"{quartiles}; a step and cell {median_ms([s / size for s in stacked], 2)} against "
        f"{median_ms([s / size for s in lone], 2)} ({measured['clock']}); {measured['threads']} thread, "
        f"{measured['allocator']}",
    )


def _gpu_row() -> Row:
    if torch.cuda.is_available():
        return _warm_row(in_fresh_process(warm, 32, 64, "cuda"), "≥ 10")
    what = "stacking alone: a step of 32 single trials, relative to a step of their stack, d = 64 on a GPU"
    return row(what, "—", "≥ 10", "not measured: no GPU")


def engine() -> dict[str, Any]:
    """Time of the map's engine, and of a process for each cell, in seconds."""
    base = RunConfig(model="nn:decoder,width=32,heads=2", validation=0.0, trial=Recipe(steps=STEPS))
    cells = Grid(base=base, schemes=["post"], depths=[6], lrs=RATES, seeds=SEEDS).cells
    workers = num_cores()
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "map.sqlite") as store:
        ours = _spent(lambda: run_map(store, cells, workers=workers, early_stop=False))
        assert store.counts().done == len(cells)
        stack = store.note("stack")["size"]
    configs = [cell.config.to_dict() for cell in cells]
    with ThreadPoolExecutor(workers) as pool:
        lone = _spent(lambda: list(pool.map(partial(in_fresh_process, train_cell), configs)))
    return {"cells": len(cells), "workers": workers, "stack": stack, "ours": ours, "lone": lone}


def train_cell(config: dict[str, Any]) -> str:
    """Train one cell as the map would."""
    torch.set_num_threads(1)
    (result,) = train_group([Cell(RunConfig.from_dict(config))], early_stop=False)
    return result.verdict


def _spent(work: Callable[[], object]) -> dict[str, float]:
    """Wall-clock time and processor time of `work`, including child processes, in seconds."""
    wall, cpu = time.perf_counter(), _cpu()
    work()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": _cpu() - cpu}


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def warm(size: int, width: int, device: str) -> dict[str, Any]:
    """Seconds per step of a stack and of the same number of single trials, which take turns."""
    torch.set_num_threads(1)
    stack, lone = (_trials(make, size, width, device) for make in (TrialStack, LoneTrials))
    for _ in range(3):  # the first steps create states and choose kernels
        stack.advance()
        lone.advance()
    pairs = [(_step(stack, device), _step(lone, device)) for _ in range(ROUNDS)]
    return circumstances() | {
        "size": size,
        "width": width,
        "device": "the CPU" if device == "cpu" else torch.cuda.get_device_name(device),
        "stacked": [stacked for stacked, _ in pairs],
        "lone": [alone for _, alone in pairs],
        "clock": "processor time" if device == "cpu" else "wall time",
    }


def _trials(make: Any, size: int, width: int, device: str) -> Any:
    spec = f"nn:decoder,scheme=post,depth=6,width={width},heads=2"
    subjects = [load(spec, seed=seed, device=device) for seed in range(size)]
    # The same four batches are repeated, because cutting the text is not part of a step.
    batches = [itertools.cycle(list(itertools.islice(subject.batches(), 4))) for subject in subjects]
    configs = [Recipe(lr=1e-4 * (1 + k)) for k in range(size)]
    models = [subject.model for subject in subjects]
    return make(models, batches, lambda model, batch: subjects[0].loss(batch, model), configs)


def _step(trials: Any, device: str) -> float:
    """Seconds of a step: processor time for one thread on a busy machine, wall-clock time for a GPU."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = clock()
    trials.advance()  # returns the losses, so the device has finished
    return clock() - began
