"""Forecast the ladders of warm-ups: the shortest one that helps, and the rate to use.

    python -m benchmarks.rates.warmup_forecasts FILE [--part seen|held-out] [--only WORD]

One line of JSON is one case: `normscope check --forecast` at the wanted learning rate, a half and a quarter
of it, with the seed of replica 0. An interrupted run of this command is continued.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.process import records_of
from benchmarks.rates.warmup_cases import CASES, SHARES, WarmupCase
from normscope.anatomy import read_anatomy
from normscope.forecast import Forecast, forecast_ladder, with_baseline
from normscope.forecast.best_rate import end_loss
from normscope.train import Recipe


def said_of(of: WarmupCase) -> dict[str, Any]:
    """The forecast of one case, as a record."""
    case = of.case
    subject, _ = with_baseline(case.subject(case.seed))
    config = Recipe(optimizer=case.optimizer, lr=of.wanted, seed=case.seed)
    started = time.process_time()
    said = forecast_ladder(subject, read_anatomy(subject), config, [of.wanted * share for share in SHARES])
    return {
        "case": case.name,
        "part": case.part,
        "wanted": of.wanted,
        "warmup": said.warmup_steps,
        "words": said.warmup,
        "best": None if said.best is None else vars(said.best),
        "rungs": [_row(rung) for rung in said.rungs],
        "ramps": [_row(ramp) for ramp in said.ramps],
        "seconds": round(time.process_time() - started, 2),
    }


def _row(rung: Forecast) -> dict[str, Any]:
    end = end_loss(rung)
    steps = rung.curve[-1].step if rung.curve else 0
    said = {"lr": rung.lr, "warmup": rung.warmup, "outcome": rung.outcome, "steps": steps}
    return said | {"score": rung.score, "end": None if end is None else round(end, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--part", choices=("seen", "held-out"), default="seen")
    parser.add_argument("--only", default="", help="part of the names of ladders")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = {row["case"] for row in records_of(options.file)}
    for of in CASES:
        case = of.case
        if case.part != options.part or options.only not in case.name or case.name in known:
            continue
        found = said_of(of)
        with options.file.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(case.name, found["seconds"], found["words"], found["best"], flush=True)


if __name__ == "__main__":
    main()
