"""Train models of several widths around their best learning rate, and keep the results.

    python -m benchmarks.rates.scale_truth FILE [--only WORD] [--seeds NUMBER] [--widest WIDTH]

One line of JSON is one run of 300 steps; an interrupted run of this command is continued. Three rates a
factor of two apart are trained first; while the lowest loss is at an end, one more is trained beyond it.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.process import records_of, rounded
from benchmarks.rates.scale_cases import FAMILIES, Family
from benchmarks.rates.training import train_watched
from benchmarks.regimes.case import Case
from normscope.train import last_loss

SEEDS = 2
OTHER = 500
"""Distance of two seeds."""
MOST = 8
"""Most learning rates of one model and seed."""


def runs(family: Family, depth: int, width: int, number: int) -> list[dict[str, Any]]:
    """The runs of one shape and seed, until the lowest loss has a neighbour on both sides."""
    case = family.case(depth, width)
    middle = family.first_rate(width)
    found = _trained(case, number, [middle / 2, middle, 2 * middle])
    while len(found) < MOST:
        rates = sorted(found)
        lowest = min(rates, key=lambda rate: _loss(found[rate]))
        if lowest not in (rates[0], rates[-1]):
            break
        found |= _trained(case, number, [rates[0] / 2 if lowest == rates[0] else 2 * rates[-1]])
    about: dict[str, Any] = {"family": family.name, "part": family.part}
    about |= {"parametrisation": family.parametrisation, "depth": depth, "width": width, "seed": number}
    return [about | found[rate] for rate in sorted(found)]


def _loss(run: dict[str, Any]) -> float:
    """The last loss of a run; inf if it failed."""
    return math.inf if run["last"] is None else float(run["last"])


def _trained(case: Case, number: int, rates: Sequence[float]) -> dict[float, dict[str, Any]]:
    seed, baseline = case.seed + OTHER * number, case.feed.baseline()
    started = time.process_time()
    losses = train_watched(case.subject(seed), [case.recipe(rate, seed) for rate in rates])
    seconds = (time.process_time() - started) / len(rates)
    ends = [last_loss(each) if len(each) == case.steps else math.nan for each in losses]
    return {
        rate: {
            "lr": rate,
            "baseline": round(baseline, 4),
            "last": rounded(end),
            "trains": case.trains(end, baseline),
            "seconds": round(seconds, 2),
        }
        for rate, end in zip(rates, ends, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="part of the names of models")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--widest", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = {(r["family"], r["depth"], r["width"], r["seed"]) for r in records_of(options.file)}
    shapes = [(family, *shape) for family in FAMILIES for shape in family.shapes()]
    for number, (family, depth, width) in itertools.product(range(options.seeds), shapes):
        done = (family.name, depth, width, number) in known
        if done or options.only not in family.name or width > options.widest:
            continue
        found = runs(family, depth, width, number)
        with options.file.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)
        seconds = round(sum(row["seconds"] for row in found), 1)
        print(family.name, depth, width, number, seconds, {r["lr"]: r["last"] for r in found}, flush=True)


if __name__ == "__main__":
    main()
