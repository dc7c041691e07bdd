"""`normscope bench cells`: cells of a map an hour, against one process for each cell.

The cells are runs of 300 steps of one shape (Post-LN decoder, depth 6, d = 32), four rates by four seeds,
none stopped early. Ours is the local engine of `normscope map` with everything it does: measuring the stack,
starting its workers, writing the store. Theirs is a fresh process of one thread for each cell, as many at
once as there are cores, each training one cell as the map would. Stacking alone is shown too: K replicas in
one warm process, one step of the stack in turn with one step of K lone trials.
"""

from typing import Any

from normscope.bench.process import in_fresh_process

_PARTS = "normscope.bench.cells_parts"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def bench_cells() -> list[dict[str, Any]]:
    """Rows of the engine, of stacking alone, and of a GPU where there is one."""
    return [
        _engine(in_fresh_process(_PARTS, "engine", _ONE_THREAD)),
        *(_warm(in_fresh_process(_PARTS, f"warm-{size}", _ONE_THREAD), "—") for size in (4, 8, 16)),
        _gpu(),
    ]


def _engine(measured: dict[str, Any]) -> dict[str, Any]:
    cells, ours, lone = measured["cells"], measured["ours"], measured["lone"]
    return {
        "what": "cells an hour at d = 32 on the CPU, in those of one process for each cell",
        "figure": f"{lone['wall_s'] / ours['wall_s']:.2f}",
        "target": "≥ 1.4",
        "how": f"{_an_hour(cells, ours)} against {_an_hour(cells, lone)} an hour; CPU seconds a cell "
        f"{ours['cpu_s'] / cells:.2f} against {lone['cpu_s'] / cells:.2f}; stacks of {measured['stack']}, "
        f"{measured['workers']} workers, {cells} cells of {measured['steps']} steps",
    }


def _warm(measured: dict[str, Any], target: str) -> dict[str, Any]:
    low, median, high = measured["quartiles"]
    return {
        "what": f"stacking alone: a step of {measured['size']} lone trials, in steps of their stack, "
        f"d = {measured['width']} on {measured['device']}",
        "figure": f"{median:.2f}",
        "target": target,
        "how": f"quartiles {low:.2f} and {high:.2f} of {measured['rounds']} rounds; a step and cell "
        f"{measured['stacked_ms']:.2f} ms against {measured['lone_ms']:.2f} ms ({measured['clock']}); "
        f"{measured['threads']} thread, {measured['allocator']}",
    }


def _gpu() -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        return _warm(in_fresh_process(_PARTS, "gpu"), "≥ 10")
    what = "stacking alone: a step of 32 lone trials, in steps of their stack, d = 64 on a GPU"
    return {"what": what, "figure": "—", "target": "≥ 10", "how": "not measured: no GPU"}


def _an_hour(cells: int, measured: dict[str, float]) -> str:
    return f"{3600 * cells / measured['wall_s']:.0f}"
