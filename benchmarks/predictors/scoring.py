"""AUROC of scores against failures, with an interval over ladders; and how near the named rates are."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from benchmarks.predictors.cells import Cell, Ladder
from benchmarks.predictors.setting import Prediction

RESAMPLES = 1000


def auroc(scores: Sequence[float], fails: Sequence[bool]) -> float:
    """P(score of a failure > score of a success), ties counted half; nan without both kinds."""
    is_failure = np.asarray(fails, bool)
    failures, successes = int(is_failure.sum()), int((~is_failure).sum())
    if not failures or not successes:
        return math.nan
    ranks = rankdata(np.asarray(scores, float))
    wins = float(ranks[is_failure].sum()) - failures * (failures + 1) / 2
    return wins / (failures * successes)


Scored = Mapping[str, Sequence[tuple[float, bool]]]
"""Score and failure of each cell, by ladder."""


def interval(scored: Scored, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the AUROC over ladders, because cells of one are not independent."""
    ladders = [cells for cells in scored.values() if cells]
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(resamples if ladders else 0):
        drawn = [pair for i in generator.integers(len(ladders), size=len(ladders)) for pair in ladders[i]]
        found.append(auroc(*_columns(drawn)))
    known = [value for value in found if not math.isnan(value)]
    if not known:
        return math.nan, math.nan
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)


def difference(
    first: Scored, second: Scored, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """AUROC of `first` minus that of `second`, on the ladders that both have, with its 95 % interval.

    The bootstrap is paired: both are scored on the same drawn ladders.
    """
    names = [name for name, cells in first.items() if cells and second.get(name)]
    generator = np.random.default_rng(seed)

    def between(chosen: Sequence[str]) -> float:
        one, other = ([pair for name in chosen for pair in each[name]] for each in (first, second))
        return auroc(*_columns(one)) - auroc(*_columns(other))

    if not names:
        return math.nan, math.nan, math.nan
    draws = [
        between([names[i] for i in generator.integers(len(names), size=len(names))]) for _ in range(resamples)
    ]
    known = [value for value in draws if not math.isnan(value)]
    if not known:
        return math.nan, math.nan, math.nan
    low, high = np.quantile(known, [0.025, 0.975])
    return between(names), float(low), float(high)


def scored_cells(pairs: Sequence[tuple[Ladder, Prediction]]) -> Scored:
    """Score and failure of each cell of one predictor, by ladder; edges are left out."""
    return {
        ladder.name: [(score, bool(cell.fails)) for cell, score in _cells(ladder, prediction)]
        for ladder, prediction in pairs
    }


@dataclass(frozen=True)
class Line:
    """One predictor's figures.

    Attributes:
        cells, edges, ladders: numbers of scored cells, of cells left out as edges, and of ladders.
        auroc, low, high: over all scored cells.
        too_large: AUROC without the failures below every learning rate that trains (slow runs), and without
            those of ladders in which none trains.
        within: mean over ladders of the AUROC inside one ladder, where it has both kinds: what a predictor
            knows beyond which models are difficult.
        largest, best: share of ladders whose named largest (within ×2) and best learning rate (within ×2) are
            right; nan if it names none.
    """

    name: str
    cells: int
    edges: int
    ladders: int
    auroc: float
    low: float
    high: float
    too_large: float
    within: float
    largest: float
    best: float


def line(name: str, pairs: Sequence[tuple[Ladder, Prediction]]) -> Line:
    """The figures of one predictor over the ladders where it was measured."""
    rows = [(ladder, _cells(ladder, prediction)) for ladder, prediction in pairs]
    scored = scored_cells(pairs)
    unstable = [
        (score, bool(cell.fails))
        for ladder, cells in rows
        for cell, score in cells
        if not ladder.is_too_small(cell)
    ]
    each = [auroc(*zip(*cells, strict=True)) for cells in scored.values() if cells]
    low, high = interval(scored)
    return Line(
        name,
        sum(map(len, scored.values())),
        sum(cell.fails is None for ladder, _ in pairs for cell in ladder.cells),
        len(scored),
        auroc(*_columns([pair for cells in scored.values() for pair in cells])),
        low,
        high,
        auroc(*_columns(unstable)),
        _mean(value for value in each if not math.isnan(value)),
        _mean(_near(ladder.largest, p.largest_rate, _rates(ladder)) for ladder, p in pairs if _names(pairs)),
        _mean(
            0.499 < p.best_rate / ladder.best < 2.001
            for ladder, p in pairs
            if p.best_rate is not None and ladder.best is not None
        ),
    )


def _cells(ladder: Ladder, prediction: Prediction) -> list[tuple[Cell, float]]:
    pairs = zip(ladder.cells, prediction.scores, strict=True)
    return [(cell, score) for cell, score in pairs if cell.fails is not None]


def _columns(pairs: Sequence[tuple[float, bool]]) -> tuple[list[float], list[bool]]:
    return [score for score, _ in pairs], [fails for _, fails in pairs]


def _rates(ladder: Ladder) -> list[float]:
    return [cell.lr for cell in ladder.cells]


def _names(pairs: Sequence[tuple[Ladder, Prediction]]) -> bool:
    """Whether the predictor names a largest rate at all."""
    return any(prediction.largest_rate is not None for _, prediction in pairs)


def _near(truth: float | None, said: float | None, rates: Sequence[float]) -> bool:
    """Whether the largest rate of the ladder that `said` allows is within ×2 of the largest that trains."""
    allowed = max((rate for rate in rates if said is not None and rate <= said * 1.0001), default=None)
    if truth is None or allowed is None:
        return truth is allowed
    return 0.499 < allowed / truth < 2.001


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else math.nan


def table(lines: Sequence[Line]) -> str:
    """Markdown, the highest AUROC first."""
    head = (
        "| predictor | AUROC | 95 % | too large a rate only | within a ladder | largest ×2 | best ×2 "
        "| cells (edges left out) | ladders |\n|---|---:|---|---:|---:|---:|---:|---:|---:|"
    )
    ranked = sorted(lines, key=lambda each: -1 if math.isnan(each.auroc) else each.auroc, reverse=True)
    return "\n".join([head, *map(_row, ranked)])


def _row(each: Line) -> str:
    figures = [each.auroc, each.too_large, each.within]
    auc, too_large, within = ("–" if math.isnan(figure) else f"{figure:.3f}" for figure in figures)
    largest, best = (
        "–" if math.isnan(share) else f"{100 * share:.0f} %" for share in (each.largest, each.best)
    )
    return (
        f"| {each.name} | {auc} | {each.low:.2f} to {each.high:.2f} "
        f"| {too_large} | {within} | {largest} | {best} | {each.cells} ({each.edges}) | {each.ladders} |"
    )
