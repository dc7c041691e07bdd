"""Fit the weights of normscope's risk of divergence on ladders of `divergence`.

    nice -n 19 python -m benchmarks.predictors.risk TRUTH FEATURES [--ladders N]

FEATURES keeps one line of JSON for each ladder: the five numbers of each learning rate's trial of 36 steps,
those of a refined ladder, and the rate at which the loss diverged in a range test. The five weights are
fitted on the short trials of the set-on ladders; the two of the range test on these and on the held-out ones,
which had been seen by then. None is fitted on the last ones. Ladders are taken in an order that `SHUFFLE`
fixes, so that the first N are a sample. Printed are the weights, and the AUROC of the fit, and with each
ladder left out once, on both criteria.
"""

import argparse
import json
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize

from benchmarks.predictors.cells import Ladder, read
from benchmarks.predictors.divergence import CRITERIA
from benchmarks.predictors.of_normscope import REFINE, forecast_of
from benchmarks.predictors.scoring import auroc
from benchmarks.process import records_of
from normscope.forecast.divergence import distance, features, rates_blown_up
from normscope.forecast.range_test import range_test

SHUFFLE, RIDGE = 0, 0.3
"""Seed of the ladders' order; weight of the squares of all weights but the intercept."""


def fitted(x_NF: np.ndarray, y_N: np.ndarray, ridge: float = RIDGE) -> np.ndarray:
    """Weights (F,) of a logistic model of the shares `y_N`; the first feature is the intercept."""

    def loss(weights: np.ndarray) -> float:
        odds = x_NF @ weights
        misfit = (np.logaddexp(0, odds) - y_N * odds).sum()
        return float(misfit + ridge / 2 * (weights[1:] ** 2).sum())

    return np.asarray(minimize(loss, np.zeros(x_NF.shape[1])).x)


def left_out(x_NF: np.ndarray, seen_NF: np.ndarray, y_N: np.ndarray, ladders: Sequence[str]) -> np.ndarray:
    """Log-odds (N,) of `seen_NF` of each cell by weights that were fitted on `x_NF` of the other ladders."""
    names, odds = np.array(ladders), np.zeros(len(y_N))
    for name in dict.fromkeys(ladders):
        own = names == name
        odds[own] = seen_NF[own] @ fitted(x_NF[~own], y_N[~own])
    return odds


def shares(path: Path) -> dict[tuple[str, float], float]:
    """Share of a cell's replicas that diverge by either criterion."""
    runs: dict[tuple[str, float], list[bool]] = defaultdict(list)
    for row in records_of(path):
        runs[row["case"], row["lr"]].append(any(judge(row) for judge in CRITERIA.values()))
    return {cell: sum(found) / len(found) for cell, found in runs.items()}


@dataclass(frozen=True)
class Cells:
    """Cells of ladders with what the risk knows of them.

    Attributes:
        keys: ladder and learning rate.
        short, refined: the five numbers, after 1, of the short trial and of the refined ladder's (N, 6).
        tested: 1, and the distance to the rate of the range test (N, 2).
        shares: share of the replicas that diverge by either criterion.
    """

    keys: list[tuple[str, float]]
    short: np.ndarray
    refined: np.ndarray
    tested: np.ndarray
    shares: np.ndarray

    @property
    def ladders(self) -> list[str]:
        """The ladder of each cell."""
        return [case for case, _ in self.keys]

    def combined(self, own: np.ndarray, tested: np.ndarray) -> np.ndarray:
        """Log-odds as `with_neighbours` has them: the mean of two; no rate has less than a smaller one."""
        highest: dict[str, float] = {}
        odds = (own + tested) / 2
        for i, (case, _) in enumerate(self.keys):
            odds[i] = highest[case] = max(odds[i], highest.get(case, -math.inf))
        return odds

    def auroc(self, odds: np.ndarray, criterion: str, path: Path) -> float:
        """AUROC by a criterion; cells whose replicas disagree are left out."""
        fails = {(each.name, cell.lr): cell.fails for each in read(path, criterion) for cell in each.cells}
        known = [
            (odd, fails[key]) for odd, key in zip(odds, self.keys, strict=True) if fails[key] is not None
        ]
        return auroc(*zip(*known, strict=True))


def cells_of(rows: Sequence[dict[str, Any]], path: Path) -> Cells:
    """The cells of rows of FEATURES whose trials were made."""
    wanted = shares(path)
    found = [
        ((row["case"], lr), short, refined or short, (1.0, distance(lr, row["diverged"])))
        for row in rows
        for lr, short, refined in zip(row["rates"], row["features"], row["refined"], strict=True)
        if short is not None
    ]
    short, refined, tested = (np.array([row[i] for row in found], float) for i in (1, 2, 3))
    keys = [key for key, *_ in found]
    return Cells(keys, short, refined, tested, np.array([wanted[key] for key in keys]))


def _features(ladder: Ladder) -> dict[str, Any]:
    setting = ladder.make()
    short, refined = (
        [features(rung.lr, rung.curve, setting.anatomy, rates_blown_up(said.rungs)) for rung in said.rungs]
        for said in (forecast_of(setting), forecast_of(setting, REFINE))
    )
    found = range_test(setting.subject, setting.recipe)
    return {
        "case": ladder.name,
        "rates": setting.rates,
        "features": short,
        "refined": refined,
        "diverged": None if found is None else found.diverged,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("truth", type=Path)
    parser.add_argument("features", type=Path)
    parser.add_argument("--ladders", type=int, help="the first N; all by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ladders = [ladder for ladder in read(options.truth) if ladder.part != "last"]
    random.Random(SHUFFLE).shuffle(ladders)
    ladders = ladders[: options.ladders]
    known = {row["case"] for row in records_of(options.features)}
    for ladder in ladders:
        if ladder.name not in known:
            with options.features.open("a") as file:
                file.write(json.dumps(_features(ladder)) + "\n")
    parts = {ladder.name: ladder.part for ladder in ladders}
    rows = [row for row in records_of(options.features) if row["case"] in parts]
    set_on = cells_of([row for row in rows if parts[row["case"]] == "set-on"], options.truth)
    weights = fitted(set_on.short, set_on.shares)
    print(f"{len(set_on.keys)} set-on cells; weights: {', '.join(f'{w:.2f}' for w in weights)}")
    for criterion in CRITERIA:
        alone = left_out(set_on.short, set_on.short, set_on.shares, set_on.ladders)
        for how, odds in (("fitted", set_on.short @ weights), ("left out", alone)):
            print(f"{criterion}, {how}: AUROC {set_on.auroc(odds, criterion, options.truth):.3f}")
    both = cells_of(rows, options.truth)
    weights = fitted(both.tested, both.shares)
    print(f"{len(both.keys)} cells; range test: {', '.join(f'{w:.2f}' for w in weights)}")
    tested = left_out(both.tested, both.tested, both.shares, both.ladders)
    for name, trials in (("short trials", both.short), ("refined", both.refined)):
        odds = both.combined(left_out(both.short, trials, both.shares, both.ladders), tested)
        for criterion in CRITERIA:
            print(f"{criterion}, {name}, left out: AUROC {both.auroc(odds, criterion, options.truth):.3f}")


if __name__ == "__main__":
    main()
