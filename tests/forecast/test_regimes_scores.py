"""The forecasts of the regimes and their scores, on made-up runs and on one tiny ladder."""

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.regimes import carried_over, forecasts, horizons, limit, scores, stops
from benchmarks.regimes.best_rates import share_lost
from benchmarks.regimes.case import Case
from benchmarks.regimes.cases import CASES
from benchmarks.regimes.feeds import digits

RATES = (1e-4, 1e-3, 1e-2)
OUTCOMES = {"t": "trains", "f": "collapses", "s": "slow", "?": "undecided"}


def truth(name: str, trains: list[str], replicas: int = 3, steps: int = 300) -> list[dict[str, Any]]:
    """Runs of a ladder; `trains` has a word such as "101" for each rate, a figure for each replica."""
    curve = [1.0] * (steps // 20)
    return [
        {"case": name, "replica": k, "lr": lr, "trains": word[k] == "1", "last": 1.0}
        | {"baseline": 2.0, "own_baseline": 2.0}
        | {"curve": curve, "seconds": 10.0}
        for lr, word in zip(RATES, trains, strict=True)
        for k in range(replicas)
    ]


def said(
    name: str, outcomes: str, certainties: tuple[float | None, ...] = (None,) * 3
) -> list[dict[str, Any]]:
    return [
        {"case": name, "lr": lr, "outcome": OUTCOMES[key], "reason": "why", "seconds": 1.0, "certainty": sure}
        | {"curve": []}
        for lr, key, sure in zip(RATES, outcomes, certainties, strict=True)
    ]


def figures(trains: list[str], outcomes: str, **more: Any) -> dict[str, Any]:
    found, incomplete = scores.ladders(truth("a: x", trains), said("a: x", outcomes, **more))
    assert not incomplete
    return scores.figures(found)


def test_cells_at_the_edge_are_neither_right_nor_wrong() -> None:
    found = figures(["111", "101", "000"], "ttt")
    assert (found["cells"], found["right"], found["wrong"], found["edge cells"]) == (2, 1, 1, 1)


def test_an_open_forecast_is_not_right_and_its_reason_is_shown() -> None:
    found, incomplete = scores.ladders(truth("a: x", ["111", "000", "000"]), said("a: x", "??s"))
    assert [scores.figures(found)[key] for key in ("right", "wrong", "open")] == [1, 0, 2]
    assert "2 × undecided: why" in scores.table(found, incomplete)


@pytest.mark.parametrize(
    ("trains", "outcomes", "right"),
    [
        (["111", "111", "000"], "ttf", True),
        (["111", "111", "000"], "ttt", False),
        (["111", "111", "000"], "tff", False),
        (["111", "110", "000"], "tff", True),  # the largest rate hangs on the replica: both are right
        (["111", "110", "000"], "ttf", True),
        (["000", "000", "000"], "fff", True),
        (["000", "000", "000"], "tff", False),
        (["000", "001", "000"], "fff", True),
    ],
)
def test_the_largest_rate_is_that_of_a_replica(trains: list[str], outcomes: str, right: bool) -> None:
    assert figures(trains, outcomes)["largest rates"] == right


def test_the_cost_is_a_share_of_300_steps_of_a_run_of_any_length() -> None:
    for steps, cost in ((300, 0.1), (3000, 1.0)):
        runs = truth("a: x", ["111"] * 3, steps=steps)
        (found,), _ = scores.ladders(runs, said("a: x", "ttt"))
        assert found.cost == pytest.approx(cost)


def test_the_share_of_the_steps_counts_the_longest_trial_of_each_rate() -> None:
    rungs = said("a: x", "ttf")
    for rung, steps in zip(rungs, (0, 36, 140), strict=True):
        rung["curve"] = [{"step": step} for step in (0, steps) if steps]
    (found,), _ = scores.ladders(truth("a: x", ["111", "111", "000"]), rungs)
    assert found.steps == pytest.approx(176 / 900)
    assert "20 % of their number (median)" in scores.table([found], [])


@pytest.mark.parametrize(
    ("trains", "edges", "without", "shared"),
    [
        (["111", "111", "000"], 0, "3 of 3 sure cells right; 0 of 0", "1 of 1 sure cells right; 0 of 0"),
        (["111", "101", "000"], 1, "2 of 2 sure cells right; 1 of 1", "1 of 1 sure cells right; 0 of 1"),
        (["101", "111", "111"], 0, "1 of 2 sure cells right; 1 of 1", "0 of 0 sure cells right; 1 of 1"),
    ],
)
def test_the_rates_beside_the_limit_are_counted(
    trains: list[str], edges: int, without: str, shared: str
) -> None:
    rungs = [
        rung | {"optimizer": "adamw", "warmup": 0, "steps": 36, "unigram_entropy": 2.0, "score": 1.0}
        for rung in said("a: x", "ttf", (0.97, 0.98, 0.02))
    ]
    assert limit.table(truth("a: x", trains), rungs).splitlines() == [
        f"beside the limit of 1 ladders: 2 sure cells, {edges} of them at the edge",
        f"without the share: {without} edge cells sure",
        f"with the share: {shared} edge cells sure",
    ]


def test_a_ladder_with_two_replicas_is_left_out_and_named() -> None:
    found, incomplete = scores.ladders(truth("a: x", ["111"] * 3, replicas=2), said("a: x", "ttt"))
    assert (found, incomplete) == ([], ["a: x"])
    assert "not all replicas were trained: a: x" in scores.table(found, incomplete)


def test_what_is_sure_is_counted_apart() -> None:
    found = figures(["111", "100", "000"], "ttf", certainties=(0.95, 0.92, 0.3))
    assert [found[key] for key in ("sure", "sure and right", "sure at the edge")] == [1, 1, 1]
    found = figures(["111", "111", "000"], "ttf", certainties=(0.02, 0.5, 0.05))
    assert [found[key] for key in ("sure", "sure and right")] == [2, 1]


def test_the_calibration_has_tenths_and_counts_runs() -> None:
    rungs = said("a: x", "ttf", (0.93, 1.0, 0.31))
    found, _ = scores.ladders(truth("a: x", ["111", "110", "000"]), rungs)
    assert scores.calibration(found) == [
        (0.31, 0.0, 1),
        (pytest.approx(0.965), pytest.approx(5 / 6), 2),
    ]
    assert scores.brier(found) == pytest.approx((3 * 0.31**2 + 3 * 0.07**2 + 1) / 9)


def test_the_command_shows_what_is_not_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name, rows in (("truth", truth("a: x", ["111", "111", "000"])), ("said", said("a: x", "tst"))):
        files.append(tmp_path / name)
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["scores", *map(str, files), "--cells"])
    scores.main()
    shown = capsys.readouterr().out
    assert "a: x: 2 not right\n  0.001: slow, trained [-1.0, -1.0, -1.0]\n  0.01: trains, failed" in shown
    assert "a: 1 of 3 cells right" in shown


def tiny(part: str, name: str) -> Case:
    model = next(case.build for case in CASES if case.regime == "vision")
    return Case("vision", name, model, digits("plain", "images", 4), "adamw", 1, part)


def test_forecasts_keep_every_measurement_and_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part that is held out is forecast only if it is asked for."""
    file, made = tmp_path / "found.jsonl", itertools.count()
    monkeypatch.setattr(forecasts, "RATES", (1e-3, 1e-2))
    monkeypatch.setattr(forecasts, "CASES", [tiny("seen", "seen"), tiny("held-out", "held")])
    real = forecasts.forecasts

    def counted(case: Case, *options: int) -> list[dict[str, Any]]:
        next(made)
        return real(case, *options)

    monkeypatch.setattr(forecasts, "forecasts", counted)
    threads = torch.get_num_threads()
    for part, names in (("seen", {"seen"}), ("seen", {"seen"}), ("held-out", {"seen", "held"})):
        monkeypatch.setattr(sys, "argv", ["forecasts", str(file), "--part", part])
        forecasts.main()
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert {row["case"] for row in rows} == {f"vision: {name}" for name in names}
    torch.set_num_threads(threads)
    assert next(made) == 2
    assert [row["lr"] for row in rows] == [1e-3, 1e-2] * 2
    assert all(row["curve"][-1]["recent_loss"] > 0 for row in rows)
    assert all(
        row["seconds"] > 0 and (row["part"] == "held-out") == row["case"].endswith("held") for row in rows
    )


def curves(best_first: float, best_last: float) -> list[dict[str, Any]]:
    """Runs of a ladder whose best rate is one at first, and another one at the end."""
    runs = []
    for k, lr in itertools.product(range(3), RATES):
        first, last = abs(math.log10(lr / best_first)), abs(math.log10(lr / best_last))
        curve = [first + (last - first) * i / 14 for i in range(15)]
        runs.append({"case": "a: x", "replica": k, "lr": lr, "trains": True, "last": last, "curve": curve})
    return runs


@pytest.mark.parametrize("last", RATES)
def test_the_best_rate_is_near_once_the_curves_have_crossed(last: float) -> None:
    (ladder,) = horizons.complete(curves(1e-2, last))
    near = [horizons.is_near(ladder, windows, None) for windows in range(1, 15)]
    assert near[-1]
    assert near[0] == (last == 1e-2)
    assert near == sorted(near)
    assert horizons.complete(curves(1e-2, last)[:-1]) == []


def test_a_power_law_is_extrapolated_to_its_end() -> None:
    """With all of the last doubling kept, the loss of a power law of the step is found."""
    curve = [5.0 * (20 * i + 10) ** -0.3 for i in range(15)]
    for windows in (2, 6, 10, 14):
        found = horizons._at_the_end(curve[:windows], 1.0)
        assert found == pytest.approx(curve[-1], rel=0.02)


def test_cells_that_the_loss_decides_are_counted_without_those_at_the_edge() -> None:
    runs = truth("a: x", ["111", "000", "011"])  # the loss is 1 nat under the other from the start
    assert horizons.by_loss(runs, 2) == {"a": (1, 2)}
    assert horizons.by_loss(runs, 16) == {"a": (1, 2)}, "no loss after the end: not said to train"
    for run in runs:
        run["curve"] = [1.99] * 15
    assert horizons.by_loss(runs, 15) == {"a": (1, 2)}, "not far enough under it"
    assert horizons.by_loss(runs[:-3], 15) == horizons.by_loss([*runs, *truth("b: y", ["111"] * 3, 2)], 15)


def test_runs_that_fail_later_are_counted() -> None:
    def run(at_300: float, low: float, last: float | None) -> dict[str, Any]:
        return {"curve": [2.5] * 14 + [at_300, low, low], "baseline": 2.0, "last": last}

    runs = [
        run(1.8, 1.5, 1.6),
        run(1.8, 1.5, 1.85),
        run(1.8, 1.5, 1.95),
        run(1.8, 1.5, None),
        run(2.1, 1.0, 1.0),
    ]
    assert horizons.later(runs) == (4, 2, 1)


def stored(lr: float, *losses: float, **more: Any) -> dict[str, Any]:
    """A stored forecast whose trial has these losses, 12 steps apart; none without a trial."""
    curve = [
        {
            "step": 12 * i,
            "train_loss": None,
            "loss": loss,
            "diversity": {},
            "recent_loss": loss if i else None,
        }
        for i, loss in enumerate(losses)
    ]
    settings = {"optimizer": "adam", "warmup": 0, "steps": 36, "unigram_entropy": 3.0}
    said = {"outcome": "trains", "reason": "why", "score": 1.0, "certainty": None, "seconds": 1.0}
    return {"case": "a: x", "lr": lr, "curve": curve} | settings | said | more


def _ended(
    name: str, lasts: list[float | None], steps: int = 300, early: tuple[float, ...] = ()
) -> list[Any]:
    """Runs of one replica with these last losses, and `early` ones after 300 steps."""
    runs = truth(name, ["1" if last and last < 1.9 else "0" for last in lasts], replicas=1, steps=steps)
    for run, last, loss in itertools.zip_longest(runs, lasts, early):
        run |= {"last": last, "curve": [2.0] * 14 + [loss or last] + [last] * (steps // 20 - 15)}
    return runs


def test_the_share_lost_is_interpolated_between_rates() -> None:
    losses = {1e-4: 1.5, 1e-2: 1.0}
    assert share_lost(1e-2, losses, 2.0) == pytest.approx(0)
    assert share_lost(1e-3, losses, 2.0) == pytest.approx(0.25)
    assert share_lost(2e-2, losses, 2.0) is None


def test_a_rate_is_carried_over_to_longer_runs_and_to_others() -> None:
    runs = _ended("long: x", [1.5, 1.2, 1.4], steps=1000, early=(1.9, 1.7, 1.6)) + _ended(
        "a: x", [1.5, 1.2, 1.4]
    )
    (found,) = carried_over.of_longer_runs(runs)
    assert (found.rate, found.best, found.is_near) == (1e-2, 1e-3, False)
    assert found.lost == pytest.approx(0.2 / 0.8)
    others = _ended("a: x", [1.2, 1.5, None]) + _ended("a: y", [1.2, 1.5, 1.9])
    (found,) = carried_over.of_others(carried_over.best_of(runs[3:]), others)
    assert (found.rate, found.best) == (1e-3, 1e-4)
    assert "within ×2 on 0 of 1" in carried_over.table([found])
    assert "an unknown share" in carried_over.table([found._replace(lost=None)])
    assert carried_over.table([]) == "there is no ladder of which a run trains"
    assert not carried_over.of_others({"a: x": 1e-3}, _ended("a: x", [2.0, 1.95, None])), "none trains"


def test_the_report_of_the_early_stops_has_untried_rungs() -> None:
    """A low rate is predicted by the middle one, whether or not it has a trial of its own."""
    middle, largest = stored(1e-3, 5.0, 4.0, 3.0, 2.5), stored(1e-2, 5.0, 4.0, 3.5, 3.2)
    for low, untried in ((stored(1e-4), "1 trains, trained"), (stored(1e-4, 5.0, 4.9), "")):
        found, _ = scores.ladders(truth("a: x", ["111"] * 3), [low, middle, largest])
        assert [seen[1:] for seen in stops.seen_by_larger(found[0])] == [("trains", "trained")]
        assert "their prediction is too high by 1.75 (median of 1 cells)" in stops.report(found, found)
        assert f"not tried: {untried}" in stops.report(found, found)


def test_the_report_of_the_early_stops_without_a_prediction() -> None:
    rungs = [stored(lr) for lr in RATES]
    found, _ = scores.ladders(truth("a: x", ["111"] * 3), rungs)
    lines = list(stops.report(found, found))
    assert lines[0].endswith("0 steps")
    assert not any("prediction" in line for line in lines)
