"""Remedies against truth on other data than bytes: rank them on each failing run, and train the first-ranked.

    python -m benchmarks.remedies.regimes_grid rank --part seen        # or held-out, fresh; forecasts all
    python -m benchmarks.remedies.regimes_grid train --part seen       # trains by rank until one rescues
    python -m benchmarks.remedies.regimes_grid both --part seen        # does both, one run after another
    python -m benchmarks.remedies.regimes_grid another --part seen     # the same with another seed
    python -m benchmarks.remedies.regimes_grid train NAME … --part seen --only WORD   # trains these remedies

Lines are appended to benchmarks/remedies/regimes.jsonl; lines that are there are not made again. After a
change of the ranking, delete the lines of kind "ranking" before `rank`.
"""

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.process import means, records_of, rounded
from benchmarks.regimes import truth
from benchmarks.remedies.cells import losses_of
from benchmarks.remedies.regimes import FRESH, HELD_OUT, SEEN, FailingRun
from benchmarks.remedies.regimes_kept import add, known
from normscope.anatomy import Anatomy, read_anatomy
from normscope.forecast import Forecast, forecast, with_baseline
from normscope.rules.remedies import NotApplicable, Rescue, apply_all, try_remedies, trying
from normscope.subjects import Subject
from normscope.train import CRITERION_STEPS, Recipe, last_loss

TRUTH = Path(truth.__file__).parent / "truth.jsonl"
"""The outcomes of the ladders' runs."""
MOST = 4
"""Most remedies that are trained on a run by `train`, one after another until one rescues it."""
PARTS = {"seen": SEEN, "held-out": HELD_OUT, "fresh": FRESH}
Read = tuple[Subject, Anatomy, Recipe]


def read(run: FailingRun, seed: int | None = None) -> Read:
    """The subject as `check` makes it, its anatomy, and the settings of the run; at another seed if given."""
    case = run.case
    seed = case.seed if seed is None else seed
    subject, _ = with_baseline(case.subject(seed))
    recipe = Recipe(optimizer=case.optimizer, lr=run.lr, seed=seed, precision=case.precision)
    return subject, read_anatomy(subject), recipe


def ranked_now(run: FailingRun) -> tuple[str, Rescue]:
    """Outcome of the unchanged run's forecast, and every remedy forecast on the run, whatever it is."""
    subject, anatomy, recipe = read(run)
    before = forecast(subject, anatomy, recipe)
    return before.outcome, try_remedies(subject, anatomy, recipe, before, whatever=True)


def with_short_trials(run: FailingRun) -> tuple[str, Rescue, dict[tuple[str, ...], Forecast]]:
    """`ranked_now`, and the short trial of what was tried longer."""
    short: dict[tuple[str, ...], Forecast] = {}
    attempt = trying._Tries.attempt

    def kept(self: Any, names: tuple[str, ...], *rest: Any) -> trying.Attempt:
        made = attempt(self, names, *rest)
        if made.forecast is not None:
            short.setdefault(names, made.forecast)
        return made

    with mock.patch.object(trying._Tries, "attempt", kept):
        before, rescue = ranked_now(run)
    return before, rescue, short


def rank(run: FailingRun) -> None:
    """Rank the remedies of a run."""
    if known().ranking(run) is not None:
        return
    start = time.process_time()
    before, rescue, short = with_short_trials(run)
    seconds = round(time.process_time() - start, 1)
    attempts = [_line(attempt, short.get(attempt.names)) for attempt in rescue.attempts]
    add("ranking", run, before=before, seconds=seconds, attempts=attempts)
    shown = [(a["names"], a["status"], a["certainty"]) for a in attempts if a["status"] == "rescues"]
    print(run.words, before, seconds, shown, flush=True)


def _line(attempt: trying.Attempt, short: Forecast | None) -> dict[str, Any]:
    """An attempt for the file; `short` is its first trial where a longer one came after it."""
    kept: dict[str, Any] = {"names": list(attempt.names), "status": attempt.status}
    if attempt.forecast is None:
        return kept | {"reason": attempt.reason}
    kept |= _said(attempt.forecast)
    if attempt.longer and short is not None:
        kept |= {"longer": True, "learnt": attempt.has_learnt, "short": _said(short)}
    return kept


def _said(forecast: Forecast) -> dict[str, Any]:
    last = forecast.curve[-1] if forecast.curve else None
    return {
        "outcome": forecast.outcome,
        "score": None if forecast.score is None else round(forecast.score, 3),
        "certainty": forecast.certainty,
        "loss": None if last is None or last.recent_loss is None else rounded(last.recent_loss),
    }


def train(run: FailingRun, names: Sequence[str]) -> None:
    """Train a run with each of `names`, or else with its remedies by rank until one rescues it."""
    given = None
    for each in [(name,) for name in names] or known().order(run)[:MOST]:
        if known().truth(run, each) is None:
            given = given or read(run)
            _train("truth", run, each, given)
        if not names and known().trains(run, each):
            break


def train_another(run: FailingRun) -> None:
    """Train a run of another seed with the remedy that was ranked first.

    A remedy that a whole run decided was chosen on the very run that `train` trains. The run with this seed,
    replica 1 of the ladder, fails without a remedy too.
    """
    if (order := known().order(run)) and not known().another(run):
        _train("other seed", run, order[0], read(run, run.case.seed + truth.OTHER))


def _train(kind: str, run: FailingRun, names: tuple[str, ...], given: Read) -> None:
    start = time.process_time()
    try:
        changed, recipe = apply_all(names, *given)
        losses = losses_of(changed, recipe)
    except NotApplicable as error:
        add(kind, run, names=list(names), not_applicable=error.reason)
        return
    last = last_loss(losses) if len(losses) == CRITERION_STEPS else float("nan")
    row = {
        "last": rounded(last),
        "trains": run.case.trains(last, run.case.feed.baseline()),
        "curve": list(map(rounded, means(losses))),
        "seconds": round(time.process_time() - start, 1),
    }
    add(kind, run, names=list(names), **row)
    print(run.words, names, row["last"], row["trains"], row["seconds"], flush=True)


def _in_turn(runs: Sequence[FailingRun]) -> list[FailingRun]:
    """The runs in an order that lets an interrupted command have seen most ladders.

    The first run of each ladder comes before the second, ladders that train at some rate before those that do
    not, and of these the cheapest first.
    """
    trained = records_of(TRUTH)
    ladders = [run.ladder for run in runs]

    def turn(run: FailingRun) -> tuple[bool, bool, float]:
        rows = [row for row in trained if row["case"] == run.ladder]
        at_none = not any(row["trains"] for row in rows)
        return runs.index(run) > ladders.index(run.ladder), at_none, rows[0]["seconds"]

    return sorted(runs, key=turn)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("rank", "train", "both", "another"))
    parser.add_argument("names", nargs="*", help="remedies to train with")
    parser.add_argument("--part", choices=PARTS, default="seen")
    parser.add_argument("--only", default="", help="part of the runs' names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [run for run in PARTS[options.part] if options.only in run.words]
    if options.part == "fresh":
        random.Random(0).shuffle(runs)  # the first N are a sample
    else:
        runs = _in_turn(runs)
    for run in runs:
        if options.command in ("rank", "both"):
            rank(run)
        if options.command in ("train", "both"):
            train(run, options.names)
        if options.command == "another":
            train_another(run)


if __name__ == "__main__":
    main()
