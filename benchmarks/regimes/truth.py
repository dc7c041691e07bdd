"""Train the ladders of the regimes, three replicas a cell, and keep the results.

    python -m benchmarks.regimes.truth FILE [--regime NAME …] [--part PART …] [--only WORD] [--alone]
                                            [--steps N] [--schedule cosine] [--replicas N]

One line of JSON is one run; an interrupted run of this command is continued. `truth.jsonl` beside this file
has what was trained so far. Replica 0 and 1 have seeds of their own, for weights and batches. Replica 2 is
replica 0 with each weight changed by one part in a million: what differs between these two hangs on rounding.
Runs of another length or schedule belong into files of their own, see `benchmarks.regimes.carried_over`.
"""

import argparse
import itertools
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.forecast.cells import train_together
from benchmarks.process import EVERY, means, records_of, rounded
from benchmarks.regimes.case import PARTS, RATES, Case
from benchmarks.regimes.cases import CASES, REGIMES
from normscope.train import LAST, last_loss

REPLICAS = 3
OTHER, _ROUNDING = 500, 1e-6


def runs(case: Case, replica: int, *, alone: bool = False) -> list[dict[str, Any]]:
    """The runs of one replica at all learning rates.

    They are trained as a stack if that is possible, or (`alone`) one after the other, which takes less time
    and memory where a batch is large.
    """
    seed = case.seed + OTHER * (replica == 1)
    subject = case.subject(seed)
    if replica == 2:
        _shake(subject.model, seed)
    baseline, own = case.feed.baseline(), case.own_baseline(seed)
    recipes = [case.recipe(rate, seed) for rate in RATES]
    started = time.process_time()
    parts = [[recipe] for recipe in recipes] if alone else [recipes]
    trials = [train_together(subject, part) for part in parts]
    seconds = (time.process_time() - started) / len(RATES)
    return [
        {
            "case": f"{case.regime}: {case.name}",
            "replica": replica,
            "lr": rate,
            "steps": case.steps,
            "schedule": case.schedule,
            "baseline": round(baseline, 4),
            "own_baseline": round(own, 4),
            "last": rounded(last_loss(losses) if len(losses) == case.steps else math.nan),
            "trains": len(losses) == case.steps and case.trains(last_loss(losses), own),
            "curve": list(map(rounded, means(losses))),
            "seconds": round(seconds, 2),
            "way": type(trials[0]).__name__,
        }
        for rate, losses in zip(RATES, (each for part in trials for each in part.losses), strict=True)
    ]


def _shake(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + _ROUNDING * torch.randn(parameter.shape, generator=generator))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--regime", choices=REGIMES, action="append", default=[])
    parser.add_argument("--part", choices=PARTS, action="append", default=[])
    parser.add_argument("--only", default="", help="part of the names of ladders")
    parser.add_argument("--alone", action="store_true", help="each learning rate alone, not as a stack")
    parser.add_argument("--steps", type=int, help="length of a run, instead of the case's")
    parser.add_argument("--schedule", choices=("constant", "cosine"), default="constant")
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    options = parser.parse_args()
    assert LAST < EVERY + 1
    torch.set_num_threads(1)
    known = {(row["case"], row["replica"]) for row in records_of(options.file)}
    named = [c for c in CASES if c.regime in (options.regime or REGIMES) and options.only in c.name]
    wanted = [
        replace(case, steps=options.steps or case.steps, schedule=options.schedule)
        for case in named
        if case.part in (options.part or PARTS)
    ]
    for replica, case in itertools.product(range(options.replicas), wanted):  # every ladder once, then again
        if (f"{case.regime}: {case.name}", replica) in known:
            continue
        found = runs(case, replica, alone=options.alone)
        with options.file.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)
        gaps = [None if r["last"] is None else round(r["last"] - r["baseline"], 2) for r in found]
        print(found[0]["case"], replica, found[0]["way"], found[0]["seconds"], gaps, flush=True)


if __name__ == "__main__":
    main()
