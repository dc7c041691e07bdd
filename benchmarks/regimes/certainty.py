"""Fit the certainty of forecasts on runs that were trained.

    python -m benchmarks.regimes.certainty TRUTH FORECASTS

It prints the weights for `normscope.forecast.certainty`, and how they do on ladders that they were not fitted
on: each ladder is left out once. A cell counts once, with the share of its replicas that trained.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.process import records_of
from benchmarks.regimes.judged import forecast_of, judge
from normscope.forecast.certainty import features
from normscope.forecast.record import SURE

SHRINKING = 1.0
"""Weight of the square of the weights beside the log-likelihood of the cells."""
_ROUNDS = 50


def cells(
    truth: Sequence[dict[str, Any]], forecasts: Sequence[dict[str, Any]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features (N, 3), shares of runs that trained (N,), and ladders (N,) of the cells that are known.

    A cell without a trial is left out: its certainty is a share of cases, not a value of the model.
    """
    trained: dict[tuple[str, float], list[bool]] = {}
    for run in truth:
        trained.setdefault((run["case"], run["lr"]), []).append(run["trains"])
    rows, shares, names = [], [], []
    for record in judge(forecasts):
        runs = trained.get((record["case"], record["lr"]))
        if runs is not None and record["curve"] and record["certainty"] is not None:
            rows.append(features(record["score"], forecast_of(record).curve))
            shares.append(sum(runs) / len(runs))
            names.append(record["case"])
    return np.array(rows), np.array(shares), np.array(names)


def fit(rows: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Weights of a logistic model of features (N, D) and shares (N,), by Newton's method."""
    weights = np.zeros(rows.shape[1])
    for _ in range(_ROUNDS):
        chances = probability(rows, weights)
        curvature = (rows * (chances * (1 - chances))[:, None]).T @ rows + SHRINKING * np.eye(len(weights))
        weights += np.linalg.solve(curvature, rows.T @ (shares - chances) - SHRINKING * weights)
    return weights


def probability(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The model's probabilities (N,)."""
    found: np.ndarray = 1 / (1 + np.exp(-rows @ weights))
    return found


def left_out(rows: np.ndarray, shares: np.ndarray, names: np.ndarray) -> np.ndarray:
    """Probability of each cell by weights that were fitted on the other ladders, (N,)."""
    chances = np.zeros(len(rows))
    for name in np.unique(names):
        here = names == name
        chances[here] = probability(rows[here], fit(rows[~here], shares[~here]))
    return chances


def words(rows: np.ndarray, shares: np.ndarray, names: np.ndarray) -> str:
    """The weights, and how they do, as text."""
    chances, edge = left_out(rows, shares, names), (shares > 0) & (shares < 1)
    sure = np.maximum(chances, 1 - chances) >= SURE
    wrong = sure & ~edge & ((chances > 0.5) != (shares > 0.5))
    weights = ", ".join(f"{weight:.2f}" for weight in fit(rows, shares))
    brier = ((chances - shares) ** 2).mean()
    return (
        f"weights {weights}, from {len(rows)} cells of {len(np.unique(names))} ladders\n"
        f"each ladder left out once: Brier score {brier:.3f}; sure in {sure.sum()} cells, "
        f"of which {wrong.sum()} are wrong and {(sure & edge).sum()} at the edge, of {edge.sum()} there"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("truth", type=Path)
    parser.add_argument("forecasts", type=Path)
    options = parser.parse_args()
    print(words(*cells(records_of(options.truth), records_of(options.forecasts))))


if __name__ == "__main__":
    main()
