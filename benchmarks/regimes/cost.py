"""Processor time of the forecast of a ladder as a share of the training that it saves.

    python -m benchmarks.regimes.cost [WORD …] [--part seen|held-out|fresh|last] [--every N]
                                      [--refine N] [--keep FORECASTS]

A forecast includes everything: the loss without the input, the anatomy, trials, and warm-ups where the wanted
rate fails. The training that it saves is 300 steps at each of the learning rates, alone or as a stack. Both
are timed in the same run, 20 steps before the forecast and 20 after it, on one thread.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.forecast.cells import train_together
from benchmarks.regimes.case import PARTS, RATES, STEPS, Case
from benchmarks.regimes.cases import CASES
from benchmarks.regimes.forecasts import forecasts, name_of

TIMED = 20
"""Steps of training that are timed, before and after a forecast."""
RATE = 1e-4


class Shares(NamedTuple):
    """Cost of a forecast as a share of lone runs and of stacked ones, and the steps of its trials."""

    lone: float
    stacked: float
    steps: int


def seconds(case: Case, replicas: int) -> float:
    """Processor seconds of a step of one replica."""
    subject = case.subject(case.seed)
    recipe = dataclasses.replace(case.recipe(RATE, case.seed), steps=TIMED)
    started = time.process_time()
    train_together(subject, [recipe] * replicas)
    return (time.process_time() - started) / TIMED / replicas


def shares(case: Case, refine: int = 0, keep: Path | None = None) -> Shares:
    """Cost of the forecast of a ladder; `keep` is a file to which its forecasts are added."""
    before = seconds(case, 1), seconds(case, len(RATES))
    rungs = forecasts(case, refine=refine)
    if keep is not None:
        with keep.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rungs)
    after = seconds(case, 1), seconds(case, len(RATES))
    lone, stacked = (STEPS * (a + b) / 2 for a, b in zip(before, after, strict=True))
    spent = rungs[0]["seconds"]  # of a learning rate
    steps = sum(rung["curve"][-1]["step"] for rung in rungs if rung["curve"])
    return Shares(spent / lone, spent / stacked, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", default=[""], help="parts of the names of ladders")
    parser.add_argument("--part", choices=PARTS, default="held-out")
    parser.add_argument("--every", type=int, default=1, help="only each N-th ladder")
    parser.add_argument("--refine", type=int, default=0, help="as `check --refine`")
    parser.add_argument("--keep", type=Path, help="file of forecasts to add to, for `scores`")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [
        case
        for case in CASES
        if case.part == options.part and any(word in name_of(case) for word in options.words)
    ]
    found = []
    for case in cases[:: options.every]:
        found.append(shares(case, options.refine, options.keep))
        lone, stacked, steps = found[-1]
        print(
            f"{name_of(case)}: {100 * lone:.1f} % of lone runs, {100 * stacked:.1f} % of stacked ones, "
            f"{steps} steps of trials",
            flush=True,
        )
    if found:
        lone, stacked = (
            statistics.median(each) for each in zip(*((s.lone, s.stacked) for s in found), strict=True)
        )
        print(
            f"median of {len(found)}: {100 * lone:.1f} % of lone runs, {100 * stacked:.1f} % of stacked ones"
        )


if __name__ == "__main__":
    main()
