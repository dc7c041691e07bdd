"""AUROC, lead and false alarms of what was observed at a step, for failures after it.

Scored at step S are the runs that are healthy at step 300 and have not failed by S. A figure's direction, the
weights of the logistic models and all thresholds come from the runs of the part "set-on"; the tables are of
the part "held-out". A threshold is the lowest at which at most 5 % of the set-on runs that do not fail are
above it. Intervals are 95 % bootstrap intervals over runs.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.later.failures import Failure, failure_of, is_healthy, steadier
from benchmarks.later.watched import NEAR
from benchmarks.predictors.scoring import auroc
from benchmarks.regimes.certainty import fit, probability

Run = dict[str, Any]
FALSE_ALARMS = 0.05
RESAMPLES = 2000
RATE, LOSS = "learning rate", "loss minus entropy"
OF_KIND, OF_LADDER = (
    "learning rate / largest healthy of its kind",
    "learning rate / largest healthy of its ladder",
)
BASELINES = (RATE, OF_KIND, OF_LADDER, LOSS)
"""Trivial predictors; a rate is healthy if its run is at step 300. The best one of the set-on runs counts."""
SMALL = (
    "recent/gradient-jump",
    "recent/gradient",
    "attention/max-logit",
    "logit/rms",
    "sharpness",
    "update/median",
    "lag/max",
    "stream/rms: growth",
)
"""Figures of the logistic model, chosen before any run of the grid was trained."""
_LINEAR = ("loss", "recent/loss", "recent/loss-jump", "recent/loss-spread")


@dataclass(frozen=True)
class Sample:
    """A run at a step.

    Attributes:
        figures: what was seen until then, by name; baselines too.
        failure: its late failure, None without one.
    """

    figures: dict[str, float]
    failure: Failure | None

    @property
    def fails(self) -> bool:
        return self.failure is not None


@dataclass(frozen=True)
class Line:
    """Score of one predictor on the held-out runs at a step.

    Attributes:
        auroc, low, high: with the interval; `seton` on the runs that it was set on.
        more, more_low, more_high: AUROC minus that of the baseline that is best on the set-on runs.
        found, failures: failures above the threshold, and all.
        false, others: runs without a failure above the threshold, and all.
        lead: median steps from the observation to the failures that are found; nan without any.
    """

    name: str
    auroc: float
    low: float
    high: float
    seton: float
    more: float
    more_low: float
    more_high: float
    found: int
    failures: int
    false: int
    others: int
    lead: float


def judged(runs: Sequence[Run], *, strict: bool = False) -> list[tuple[Run, Failure | None]]:
    """The runs that are healthy at step 300, and how they fail; the references are left out."""
    curves = {id(run): [math.inf if loss is None else loss for loss in run["curve"]] for run in runs}
    references = {run["ladder"]: curves[id(run)] for run in runs if run["kind"] == "reference"}
    found = []
    for run in (run for run in runs if run["kind"] != "reference"):
        curve = curves[id(run)]
        if strict and run["kind"] != "by heart":
            curve = steadier(curve, references[run["ladder"]])
        if is_healthy(curve, run["entropy"], strict=strict):
            found.append((run, failure_of(curve, run["entropy"], strict=strict)))
    return found


def samples(runs: Sequence[Run], step: int, *, lasting: bool = False, strict: bool = False) -> list[Sample]:
    """The runs that are scored at a step; with `lasting` only collapses are failures."""
    healthy = judged(runs, strict=strict)
    largest: dict[tuple[str, ...], float] = defaultdict(float)
    for run, _ in healthy:
        for key in ((run["ladder"],), (run["ladder"], run["kind"])):
            largest[key] = max(largest[key], run["lr"])
    found = []
    for run, failure in healthy:
        if failure is not None and failure.step < step:
            continue
        figures = figures_of(run, step)
        figures[OF_KIND] = math.log(run["lr"] / largest[run["ladder"], run["kind"]])
        figures[OF_LADDER] = math.log(run["lr"] / largest[run["ladder"],])
        is_mild = lasting and failure is not None and not failure.lasts
        found.append(Sample(figures, None if is_mild else failure))
    return found


def figures_of(run: Run, step: int) -> dict[str, float]:
    """Figures seen by a step: values, their growth since the earlier step, and since the start.

    Values are logarithms, but those of losses. Growth is per step. What is not finite is as large as can be.
    "At the full rate" is what a value that is proportional to the rate becomes when the warm-up has ended.
    """
    seen = run["seen"]
    now, near, start = seen[str(step)], seen[str(NEAR[step])], seen["0"]
    found = {name: _scaled(name, value) for name, value in now.items()}
    for name in now:
        if name in near and not name.startswith("recent/"):
            growth = found[name] - _scaled(name, near[name])
            found[f"{name}: growth"] = growth / (step - NEAR[step])
        if name in start and name != "loss":
            found[f"{name}: since the start"] = found[name] - _scaled(name, start[name])
    left = math.log(max(1.0, run["warmup"] / step))  # how much the rate still grows, as a logarithm
    for name in ("sharpness", "update/median"):
        if name in found:
            found[f"{name}: at the full rate"] = found[name] + left
    found[RATE] = math.log(run["lr"])
    found[LOSS] = found["recent/loss"] - run["entropy"]
    return found


def _scaled(name: str, value: float | None) -> float:
    if value is None:
        return 50.0
    return value if name in _LINEAR else math.log(max(value, 1e-20))


Score = Callable[[Sample], float]


def direction(name: str, seton: Sequence[Sample]) -> float:
    """1 if larger values of a figure go with failures on these runs, else −1."""
    area = auroc([each.figures[name] for each in seton], [each.fails for each in seton])
    return -1.0 if area < 0.5 else 1.0


def logistic(names: Sequence[str], seton: Sequence[Sample]) -> Score:
    """The log-odds of a logistic model of standardised figures, fitted on these runs."""
    rows = np.array([[each.figures[name] for name in names] for each in seton])
    middle, spread = rows.mean(0), rows.std(0) + 1e-12

    def standard(values: np.ndarray) -> np.ndarray:
        clipped = ((values - middle) / spread).clip(-4, 4)
        return np.concatenate([clipped, np.ones((*clipped.shape[:-1], 1))], -1)

    weights = fit(standard(rows), np.array([float(each.fails) for each in seton]))

    def score(sample: Sample) -> float:
        row = standard(np.array([sample.figures[name] for name in names]))
        return float(probability(row[None], weights)[0])

    return score


def lines(seton: Sequence[Sample], held: Sequence[Sample], step: int) -> list[Line]:
    """A line for each figure, each baseline, and the logistic models, by the AUROC of the set-on runs."""
    names = sorted(set.intersection(*(set(each.figures) for each in [*seton, *held])))
    scores: dict[str, Score] = {name: _figure(name, direction(name, seton)) for name in names}
    base = max(BASELINES, key=lambda name: _area(scores[name], seton))
    scores["baselines, logistic"] = logistic(BASELINES, seton)
    scores["8 figures, logistic"] = logistic([name for name in SMALL if name in names], seton)
    scores["8 figures and baselines, logistic"] = logistic(
        [*(name for name in SMALL if name in names), *BASELINES], seton
    )
    found = [_line(name, score, scores[base], seton, held, step) for name, score in scores.items()]
    return sorted(found, key=lambda each: -each.seton)


def _figure(name: str, sign: float) -> Score:
    return lambda sample: sign * sample.figures[name]


def _area(score: Score, runs: Sequence[Sample]) -> float:
    return auroc([score(each) for each in runs], [each.fails for each in runs])


def threshold(score: Score, seton: Iterable[Sample]) -> float:
    """The lowest value with at most 5 % of the set-on runs that do not fail above it; −inf without them."""
    values = sorted(score(each) for each in seton if not each.fails)
    return values[-1 - int(FALSE_ALARMS * len(values))] if values else -math.inf


def _line(
    name: str, score: Score, base: Score, seton: Sequence[Sample], held: Sequence[Sample], step: int
) -> Line:
    limit = threshold(score, seton)
    alarmed = [each for each in held if score(each) > limit]
    leads = [each.failure.step - step for each in alarmed if each.failure is not None]
    fails = np.array([each.fails for each in held])
    areas, others = (resampled(np.array([each(run) for run in held]), fails) for each in (score, base))
    gaps = areas - others
    (low, high), (more_low, more_high) = map(_interval, (areas, gaps))
    return Line(
        name,
        _area(score, held),
        low,
        high,
        _area(score, seton),
        _area(score, held) - _area(base, held),
        more_low,
        more_high,
        len(leads),
        int(fails.sum()),
        len(alarmed) - len(leads),
        int((~fails).sum()),
        statistics.median(leads) if leads else math.nan,
    )


def _interval(values: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of bootstrap values; nan without any."""
    low, high = np.quantile(values, [0.025, 0.975]) if len(values) else (math.nan, math.nan)
    return float(low), float(high)


def resampled(scores: np.ndarray, fails: np.ndarray) -> np.ndarray:
    """AUROC of bootstrap samples of runs; scores and failures (N,), the same samples for the same N.

    A sample without a failure, or without another run, has none.
    """
    generator = np.random.default_rng(0)
    counts_RN = generator.multinomial(len(fails), np.full(len(fails), 1 / len(fails)), size=RESAMPLES)
    rows = counts_RN[:, fails].sum(1) * counts_RN[:, ~fails].sum(1) > 0
    bad, good = counts_RN[rows][:, fails], counts_RN[rows][:, ~fails]
    pairs = scores[fails][:, None] - scores[~fails][None]
    wins = (pairs > 0) + 0.5 * (pairs == 0)
    found: np.ndarray = ((bad @ wins) * good).sum(1) / (bad.sum(1) * good.sum(1))
    return found
