"""The benchmarks by name."""

from collections.abc import Callable

from benchmarks.cells import bench_cells
from benchmarks.check import bench_check
from benchmarks.diff.bench import bench_diff
from benchmarks.forecast.bench import bench_forecast
from benchmarks.fuse import bench_fuse
from benchmarks.kernels import bench_kernels
from benchmarks.monitor.bench import bench_monitor
from benchmarks.nn import bench_nn
from benchmarks.plan import bench_plan
from benchmarks.process import Row
from benchmarks.quantisation import bench_quantisation
from benchmarks.remedies.bench import bench_remedies
from benchmarks.script_steps import bench_script_steps
from benchmarks.sharded import bench_sharded
from benchmarks.slopes import bench_slopes
from benchmarks.spectra.bench import bench_spectra
from benchmarks.train import bench_train
from normscope.errors import UsageError, suggest

BENCHES: dict[str, Callable[[], list[Row]]] = {
    "cells": bench_cells,
    "check": bench_check,
    "diff": bench_diff,
    "forecast": bench_forecast,
    "fuse": bench_fuse,
    "kernels": bench_kernels,
    "monitor": bench_monitor,
    "nn": bench_nn,
    "plan": bench_plan,
    "quantisation": bench_quantisation,
    "remedies": bench_remedies,
    "script-steps": bench_script_steps,
    "sharded": bench_sharded,
    "slopes": bench_slopes,
    "spectra": bench_spectra,
    "train": bench_train,
}


def bench(name: str) -> list[Row]:
    """Run one benchmark; UsageError if the name is unknown."""
    if name not in BENCHES:
        known = ", ".join(BENCHES)
        raise UsageError(
            f"benchmark {name!r}", f"one of {known}", suggest(name, BENCHES, "choose one of these")
        )
    return BENCHES[name]()
