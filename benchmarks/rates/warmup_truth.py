"""Train the ladders of warm-ups, two replicas a run, and keep the results.

    python -m benchmarks.rates.warmup_truth FILE [--only WORD] [--replicas NUMBER]

One line of JSON is one run of 300 steps; an interrupted run of this command is continued. The criterion is
that of `benchmarks.regimes`. A run stops early, and has failed, if all its tokens are alike (diversity under
1e-11 in two measurements 25 steps apart, after its warm-up): none recovers from there.
"""

import argparse
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.process import means, records_of, rounded
from benchmarks.rates.training import train_watched
from benchmarks.rates.warmup_cases import CASES, WarmupCase
from normscope.train import last_loss

REPLICAS = 2
OTHER = 500
"""Distance of the seeds of two replicas."""


def runs(of: WarmupCase, replica: int) -> list[dict[str, Any]]:
    """The runs of one replica at all learning rates and warm-ups, trained as a stack."""
    case, seed = of.case, of.case.seed + OTHER * replica
    baseline = case.feed.baseline()
    recipes = [case.recipe(rate, seed).with_warmup(warmup) for rate, warmup in of.runs]
    started = time.process_time()
    losses = train_watched(case.subject(seed), recipes)
    seconds = (time.process_time() - started) / len(recipes)
    return [
        {
            "case": case.name,
            "part": case.part,
            "replica": replica,
            "lr": recipe.lr,
            "warmup": recipe.warmup,
            "baseline": round(baseline, 4),
            "steps": len(each),
            "last": rounded(last := last_loss(each) if len(each) == case.steps else math.nan),
            "trains": case.trains(last, baseline),
            "curve": list(map(rounded, means(each))),
            "seconds": round(seconds, 2),
        }
        for recipe, each in zip(recipes, losses, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="part of the names of ladders")
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = {(row["case"], row["replica"]) for row in records_of(options.file)}
    for replica, of in itertools.product(range(options.replicas), CASES):
        if options.only not in of.case.name or (of.case.name, replica) in known:
            continue
        found = runs(of, replica)
        with options.file.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)
        print(of.case.name, replica, found[0]["seconds"], [row["trains"] for row in found], flush=True)


if __name__ == "__main__":
    main()
