"""Parts of `normscope bench cells`, each in a process of its own: `-m normscope.bench.cells_parts PART`."""

import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STEPS = 300
RATES = (1e-4, 3e-4, 1e-3, 3e-3)
SEEDS = range(4)
ROUNDS = 15


def engine() -> dict[str, Any]:
    """Seconds of the map's engine, and of a process for each cell."""
    from normscope.maps import Store, run_map
    from normscope.maps.run import num_cores

    cells, workers = _grid().cells, num_cores()
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "map.sqlite") as store:
        ours = _timed(lambda: run_map(store, cells, workers=workers, early_stop=False))
        assert store.counts().done == len(cells)
        stack = store.note("stack")["size"]
    with ThreadPoolExecutor(workers) as pool:
        lone = _timed(lambda: list(pool.map(_in_a_process, [cell.config.to_dict() for cell in cells])))
    found = {"cells": len(cells), "steps": STEPS, "workers": workers, "stack": stack}
    return found | {"ours": ours, "lone": lone}


def _grid() -> Any:
    from normscope.maps import Grid
    from normscope.train import RunConfig, TrialConfig

    base = RunConfig(model="nn:decoder,width=32,heads=2", validation=0.0, trial=TrialConfig(steps=STEPS))
    return Grid(base=base, schemes=["post"], depths=[6], lrs=RATES, seeds=SEEDS)


def _in_a_process(config: dict[str, Any]) -> None:
    words = [sys.executable, "-m", "normscope.bench.cells_parts", "cell", json.dumps(config)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the process of a cell failed:\n{done.stderr}")


def cell(config: str) -> dict[str, Any]:
    """Train one cell as the map would."""
    import torch

    from normscope.maps import Cell, train_group
    from normscope.train import RunConfig

    torch.set_num_threads(1)
    (result,) = train_group([Cell(RunConfig.from_dict(json.loads(config)))], early_stop=False)
    return {"verdict": result.verdict}


def _timed(work: Callable[[], object]) -> dict[str, float]:
    """Seconds by the clock, and of all processors, children included."""
    wall, cpu = time.perf_counter(), _cpu()
    work()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": _cpu() - cpu}


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def warm(size: int, width: int, device: str) -> dict[str, Any]:
    """Seconds a step of a stack and of as many lone trials, which take turns."""
    import torch

    from normscope.bench.process import circumstances
    from normscope.train import LoneTrials, TrialStack

    torch.set_num_threads(1)
    stack, lone = (_trials(make, size, width, device) for make in (TrialStack, LoneTrials))
    for _ in range(3):  # the first ones make states and choose kernels
        stack.advance()
        lone.advance()
    pairs = [(_step(stack, device), _step(lone, device)) for _ in range(ROUNDS)]
    return circumstances() | {
        "size": size,
        "width": width,
        "device": "the CPU" if device == "cpu" else torch.cuda.get_device_name(device),
        "rounds": ROUNDS,
        "quartiles": statistics.quantiles([alone / stacked for stacked, alone in pairs], n=4),
        "stacked_ms": 1e3 * statistics.median(stacked for stacked, _ in pairs) / size,
        "lone_ms": 1e3 * statistics.median(alone for _, alone in pairs) / size,
        "clock": "processor time" if device == "cpu" else "wall time",
    }


def _trials(make: Any, size: int, width: int, device: str) -> Any:
    from normscope.subjects import load
    from normscope.train import TrialConfig

    spec = f"nn:decoder,scheme=post,depth=6,width={width},heads=2"
    subjects = [load(spec, seed=seed, device=device) for seed in range(size)]
    configs = [TrialConfig(lr=1e-4 * (1 + k)) for k in range(size)]
    models, batches = [s.model for s in subjects], [_kept(s.batches()) for s in subjects]
    return make(models, batches, lambda model, batch: subjects[0].loss(batch, model), configs)


def _kept(batches: Iterator[Any], number: int = 4) -> Iterator[Any]:
    """The first few again and again: cutting the text is no part of a step."""
    return itertools.cycle(list(itertools.islice(batches, number)))


def _step(trials: Any, device: str) -> float:
    """Seconds of a step: of the processor for one thread of a busy machine, by the clock for a GPU."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = clock()
    trials.advance()  # ends with its losses on the host
    return clock() - began


def main(part: str, *words: str) -> dict[str, Any]:
    """Measure one part and return its figures."""
    if part == "engine":
        return engine()
    if part == "cell":
        return cell(*words)
    if part == "gpu":
        return warm(32, 64, "cuda")
    return warm(int(part.removeprefix("warm-")), 32, "cpu")


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
