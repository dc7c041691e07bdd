"""Every benchmark by name, and how they are run."""

from collections.abc import Callable

from normscope.bench.cells import bench_cells
from normscope.bench.check import bench_check
from normscope.bench.forecast import bench_forecast
from normscope.bench.nn import bench_nn
from normscope.bench.process import Row
from normscope.bench.remedies import bench_remedies
from normscope.bench.slopes import bench_slopes
from normscope.bench.spectra import bench_spectra
from normscope.bench.train import bench_train
from normscope.errors import UsageError, suggest

BENCHES: dict[str, Callable[[], list[Row]]] = {
    "cells": bench_cells,
    "check": bench_check,
    "forecast": bench_forecast,
    "nn": bench_nn,
    "remedies": bench_remedies,
    "slopes": bench_slopes,
    "spectra": bench_spectra,
    "train": bench_train,
}


def bench(name: str) -> list[Row]:
    """Run one benchmark; UsageError where none has that name."""
    if name not in BENCHES:
        known = ", ".join(BENCHES)
        raise UsageError(
            f"benchmark {name!r}", f"one of {known}", suggest(name, BENCHES, "choose one of these")
        )
    return BENCHES[name]()
