"""Fit the weights of normscope's risk of divergence on the set-on ladders of `divergence`.

    nice -n 19 python -m benchmarks.predictors.risk TRUTH FEATURES [--ladders N]

FEATURES keeps one line of JSON for each ladder: the five numbers of each learning rate's trial of 36 steps.
Ladders are taken in an order that `SHUFFLE` fixes, so that the first N are a sample. Printed are the weights,
and the AUROC of the fit, and with each ladder left out once, on both criteria.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize

from benchmarks.predictors.cells import Ladder, read
from benchmarks.predictors.divergence import CRITERIA
from benchmarks.predictors.of_normscope import forecast_of
from benchmarks.predictors.scoring import auroc
from benchmarks.process import records_of
from normscope.forecast.divergence import features, rates_blown_up

SHUFFLE, RIDGE = 0, 0.3
"""Seed of the ladders' order; weight of the squares of all weights but the intercept."""


def fitted(x_NF: np.ndarray, y_N: np.ndarray, ridge: float = RIDGE) -> np.ndarray:
    """Weights (F,) of a logistic model of the shares `y_N`; the first feature is the intercept."""

    def loss(weights: np.ndarray) -> float:
        odds = x_NF @ weights
        misfit = (np.logaddexp(0, odds) - y_N * odds).sum()
        return float(misfit + ridge / 2 * (weights[1:] ** 2).sum())

    return np.asarray(minimize(loss, np.zeros(x_NF.shape[1])).x)


def left_out(x_NF: np.ndarray, y_N: np.ndarray, ladders: Sequence[str]) -> np.ndarray:
    """Log-odds (N,) of each cell by weights that were fitted on the other ladders."""
    names, odds = np.array(ladders), np.zeros(len(y_N))
    for name in dict.fromkeys(ladders):
        own = names == name
        odds[own] = x_NF[own] @ fitted(x_NF[~own], y_N[~own])
    return odds


def shares(path: Path) -> dict[tuple[str, float], float]:
    """Share of a cell's replicas that diverge by either criterion."""
    runs: dict[tuple[str, float], list[bool]] = defaultdict(list)
    for row in records_of(path):
        runs[row["case"], row["lr"]].append(any(judge(row) for judge in CRITERIA.values()))
    return {cell: sum(found) / len(found) for cell, found in runs.items()}


def _features(ladder: Ladder) -> dict[str, object]:
    setting = ladder.make()
    rungs = forecast_of(setting).rungs
    blown_up = rates_blown_up(rungs)
    found = [features(rung.lr, rung.curve, setting.anatomy, blown_up) for rung in rungs]
    return {"case": ladder.name, "rates": [rung.lr for rung in rungs], "features": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("truth", type=Path)
    parser.add_argument("features", type=Path)
    parser.add_argument("--ladders", type=int, help="the first N; all by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ladders = [ladder for ladder in read(options.truth) if not ladder.held_out]
    random.Random(SHUFFLE).shuffle(ladders)
    ladders = ladders[: options.ladders]
    known = {row["case"] for row in records_of(options.features)}
    for ladder in ladders:
        if ladder.name not in known:
            with options.features.open("a") as file:
                file.write(json.dumps(_features(ladder)) + "\n")
    names, wanted = {ladder.name for ladder in ladders}, shares(options.truth)
    rows = [
        (row["case"], lr, found, wanted[row["case"], lr])
        for row in records_of(options.features)
        if row["case"] in names
        for lr, found in zip(row["rates"], row["features"], strict=True)
        if found is not None
    ]
    cases = [case for case, *_ in rows]
    x_NF, y_N = (np.array([row[i] for row in rows], float) for i in (2, 3))
    weights = fitted(x_NF, y_N)
    print(f"{len(names)} ladders, {len(rows)} cells; weights: {', '.join(f'{w:.2f}' for w in weights)}")
    for criterion in CRITERIA:
        cells = {
            (ladder.name, cell.lr): cell.fails
            for ladder in read(options.truth, criterion)
            for cell in ladder.cells
        }
        truth = [cells[case, lr] for case, lr, *_ in rows]
        for how, odds in (("fitted", x_NF @ weights), ("left out", left_out(x_NF, y_N, cases))):
            known_cells = [
                (score, fails) for score, fails in zip(odds, truth, strict=True) if fails is not None
            ]
            print(f"{criterion}, {how}: AUROC {auroc(*zip(*known_cells, strict=True)):.3f}")


if __name__ == "__main__":
    main()
