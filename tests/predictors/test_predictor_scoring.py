"""Tests of the comparison of predictors: AUROC, truth files, the grid of divergence, the command."""

import itertools
import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.predictors import __main__ as command
from benchmarks.predictors import divergence, risk, rows
from benchmarks.predictors.cells import Cell, Ladder, read
from benchmarks.predictors.scoring import auroc, difference, interval, line, table
from benchmarks.predictors.setting import Cost, NotMeasuredError, Prediction, Setting
from normscope.anatomy import Anatomy
from normscope.forecast import Forecast, LadderForecast
from normscope.train import Recipe


def brute_force(scores: list[float], fails: list[bool]) -> float:
    pairs = [
        (x > y) + (x == y) / 2
        for (x, failed), (y, other_failed) in itertools.product(zip(scores, fails, strict=True), repeat=2)
        if failed and not other_failed
    ]
    return sum(pairs) / len(pairs)


def test_auroc_with_ties_against_all_pairs() -> None:
    draw = random.Random(0)
    for _ in range(50):
        scores = [float(draw.randint(0, 5)) for _ in range(20)]
        fails = [True, False] + [draw.random() < 0.4 for _ in range(18)]
        assert auroc(scores, fails) == pytest.approx(brute_force(scores, fails))
    assert auroc([2.0, 1.0], [True, False]) == 1.0
    assert auroc([1.0, 1.0], [True, False]) == 0.5
    assert math.isnan(auroc([1.0, 2.0], [True, True]))


def test_the_interval_draws_whole_ladders() -> None:
    right, wrong = [(1.0, True), (0.0, False)], [(0.0, True), (1.0, False)]
    assert interval({"a": right, "b": right}) == (1.0, 1.0)
    assert interval({"a": right, "b": wrong}) == (0.0, 1.0)
    assert all(map(math.isnan, interval({"a": [(1.0, True)]})))


RATES = (1e-4, 1e-3, 1e-2, 1e-1)


def ladder(name: str, truth: str, last: tuple[float, ...] = (4.0, 3.0, 2.0, 1.0)) -> Ladder:
    """T trains, F fails, e is an edge."""
    fails = {"T": False, "F": True, "e": None}
    cells = tuple(Cell(lr, fails[letter], loss) for lr, letter, loss in zip(RATES, truth, last, strict=True))
    return Ladder(name, cells, "set-on", lambda: Setting(None, Anatomy(()), Recipe(lr=1e-4), RATES))


def test_a_ladder_knows_its_largest_and_best_rate_and_its_slow_runs() -> None:
    found = ladder("a", "FTTF")
    assert (found.largest, found.best) == (1e-2, 1e-2)
    assert [found.is_too_small(cell) for cell in found.cells] == [True, False, False, False]
    assert all(ladder("b", "FFFF").is_too_small(cell) for cell in ladder("b", "FFFF").cells)


def test_the_figures_of_a_predictor_by_hand() -> None:
    prediction = Prediction("lr", RATES, Cost(), largest_rate=2e-2, best_rate=1e-3)
    found = line("lr", [(ladder("a", "FTTF"), prediction), (ladder("b", "TTeF"), prediction)])
    assert (found.cells, found.edges, found.ladders) == (7, 1, 2)
    assert found.auroc == pytest.approx(
        brute_force([1e-4, 1e-3, 1e-2, 0.1, 1e-4, 1e-3, 0.1], [1, 0, 0, 1, 0, 0, 1])
    )
    assert found.too_large == 1.0
    assert found.within == pytest.approx((0.5 + 1) / 2)
    assert found.largest == 0.5, "1e-2 of 1e-2, and 1e-2 of 1e-3"
    assert found.best == 0.5
    assert "| lr | 0.708 |" in table([found])


@pytest.mark.parametrize(
    ("said", "right"), [(1e-2, 1.0), (5e-2, 1.0), (0.1, 0.0), (5e-3, 0.0), (1e-3, 0.0), (1e-5, 0.0)]
)
def test_a_named_largest_rate_is_the_largest_rate_of_the_ladder_that_it_allows(
    said: float, right: float
) -> None:
    prediction = Prediction("lr", RATES, Cost(), largest_rate=said)
    assert line("lr", [(ladder("a", "FTTF"), prediction)]).largest == right


def test_a_predictor_without_rates_has_none() -> None:
    found = line("norm", [(ladder("a", "FTTF"), Prediction("norm", (1.0,) * 4, Cost()))])
    assert math.isnan(found.largest)
    assert math.isnan(found.best)
    assert found.auroc == 0.5


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_replicas_that_disagree_are_an_edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SimpleNamespace(
        regime="tokens", name="x", optimizer="adam", seed=1, part="held-out", subject=lambda seed: None
    )
    monkeypatch.setitem(sys.modules, "benchmarks.regimes", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "benchmarks.regimes.cases", SimpleNamespace(CASES=[case]))
    rows = [
        {"case": "tokens: x", "replica": replica, "lr": lr, "trains": trains, "last": last}
        for lr, replicas in {
            1e-2: [(True, 1.0), (False, 2.0), (True, 1.0)],
            1e-3: [(True, 1.0), (True, 2.0), (True, 3.0)],
            1e-1: [(False, None), (False, 4.0), (False, 4.0)],
            1.0: [(False, 4.0)],
        }.items()
        for replica, (trains, last) in enumerate(replicas)
    ]
    [found] = read(write(tmp_path / "truth.jsonl", rows))
    assert found.held_out
    assert found.cells == (Cell(1e-3, False, 2.0), Cell(1e-2, None, 4 / 3), Cell(1e-1, True, math.inf))


def test_the_forecasts_own_grid_is_held_out() -> None:
    found = read(Path("benchmarks/forecast/truth.json"))
    assert all(each.held_out and len(each.cells) == 9 for each in found)


def test_the_grid_of_divergence_has_norms_and_none() -> None:
    assert len(divergence.CASES) >= 24
    assert len({case.name for case in divergence.CASES}) == len(divergence.CASES)
    assert len({case.seed for case in divergence.CASES}) == len(divergence.CASES)


def test_the_target_of_recall_is_the_value_of_the_key_that_is_asked() -> None:
    batch = next(divergence.recall(3))
    ids, [targets] = batch["ids"], batch[divergence.LOSS_INPUTS]
    for row, target in zip(ids.tolist(), targets.tolist(), strict=True):
        values = dict(zip(row[0:8:2], row[1:8:2], strict=True))
        assert len(values) == 4
        assert values[row[-1]] == target
        assert set(row[8:-1]) == {divergence.PAD}
    assert torch.equal(next(divergence.recall(3))["ids"], ids)


@pytest.mark.parametrize("task", divergence.TASKS)
def test_a_run_of_the_grid_and_its_truth(task: str, tmp_path: Path) -> None:
    case = next(case for case in divergence.CASES if case.task == task)
    rows = divergence.run(case, (0, 1), (1e-3, 1e-2), steps=2)
    assert all(row["steps"] == 2 and row["largest gradient"] > 0 for row in rows)
    rows[0]["last"], rows[2]["last"] = None, rows[2]["first"] + 1
    path = write(tmp_path / "divergence.jsonl", rows[:4])
    assert [cell.fails for cell in read(path)[0].cells] == [True, False]
    assert [cell.fails for cell in read(path, "paper")[0].cells] == [None, False]


def test_both_criteria_of_divergence() -> None:
    row = {"first": 5.0, "last": 5.1, "largest loss": 6.0, "largest gradient": 501.0}
    assert divergence.diverged_from_start(row)
    assert divergence.diverged_as_published(row)
    calm = row | {"last": 4.0, "largest gradient": 2.0}
    assert not divergence.diverged_from_start(calm)
    assert not divergence.diverged_as_published(calm)
    assert divergence.diverged_as_published(calm | {"largest loss": 51.0})


def test_an_interrupted_command_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def rate(setting: Setting) -> list[Prediction]:
        calls.append("rate")
        return [Prediction("rate", setting.rates, Cost(forwards=1))]

    def none(setting: Setting) -> list[Prediction]:
        raise NotMeasuredError("no such layer")

    monkeypatch.setattr(command, "PREDICTORS", {"rate": rate, "none": none})
    monkeypatch.setattr(command, "read", lambda path, criterion: [ladder("a", "FTTF"), ladder("b", "TTeF")])
    monkeypatch.setattr(sys, "argv", ["predictors", str(tmp_path / "truth.jsonl")])
    command.main()
    command.main()
    assert calls == ["rate", "rate"]
    assert len((tmp_path / "truth.scores.jsonl").read_text().splitlines()) == 4
    said = capsys.readouterr().out
    assert "| rate | 0.708 |" in said
    assert "not measured, none: 2 ladders; a: NotMeasuredError: no such layer" in said
    (tmp_path / "truth.scores.jsonl").write_text("")
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--only", "b", "--part", "held-out"])
    command.main()
    assert calls == ["rate", "rate"], "the ladders are set on"


def test_rows_of_the_bench_compare_the_forecast_with_the_best_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rate(setting: Setting) -> list[Prediction]:
        return [Prediction("rate", setting.rates, Cost(), largest_rate=2e-2)]

    def none(setting: Setting) -> list[Prediction]:
        raise NotMeasuredError("no such layer")

    def said(*scores: float) -> LadderForecast:
        rungs = tuple(
            Forecast("trains" if score > 0 else "collapses", "so", "adam", lr, 0, 36, 3.0, score=score)
            for lr, score in zip(RATES, scores, strict=True)
        )
        largest = max((rung.lr for rung in rungs if rung.trains), default=None)
        return LadderForecast(rungs, largest, "not needed", 0)

    monkeypatch.setattr(rows, "BESIDE", (rate, none))
    forecasts = [(ladder("a", "FTTF"), said(-1, 1, 1, -1)), (ladder("b", "TTeF"), said(1, 1, 1, -2))]
    ours, risk, rise, theirs, gap = rows.auroc_rows(forecasts)
    assert ours["figure"] == "1.000"
    assert ours["target"] == "≥ 0.708, the best of the others"
    assert "largest rate within ×2 in 50 %" in ours["how"]
    assert risk["target"] == rise["target"] == ""
    assert theirs["what"] == "AUROC of failures: rate"
    assert theirs["figure"] == "0.708"
    assert gap["what"] == "AUROC of failures: none"
    assert gap["how"] == "on 2 ladders; a: no such layer"


@pytest.mark.parametrize(
    ("truth", "words"), [("TTTe", "no run fails"), ("FFFF", "all runs fail"), ("eeee", "all cells are edges")]
)
def test_a_row_without_both_kinds_of_runs_says_so(
    truth: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BESIDE", ())
    rungs = tuple(Forecast("trains", "so", "adam", lr, 0, 36, 3.0, score=1.0) for lr in RATES)
    found = rows.auroc_rows([(ladder("a", truth), LadderForecast(rungs, 0.1, "not needed", 0))])
    assert [each["figure"] for each in found] == [f"not measured: {words}"] * 3
    assert not any("nan" in each["how"] + each["target"] for each in found)


def test_the_grid_of_divergence_is_complete() -> None:
    """Every ladder has all its rates and replicas, and both outcomes occur under both criteria."""
    for criterion in divergence.CRITERIA:
        found = read(rows.DIVERGENCE, criterion)
        cases = {case.name: case for case in divergence.CASES}
        assert cases.keys() == {each.name for each in found}
        assert all(tuple(cell.lr for cell in each.cells) == cases[each.name].rates for each in found)
        assert all(each.part == cases[each.name].part for each in found)
        for part in divergence.PARTS:
            kinds = {cell.fails for each in found for cell in each.cells if each.part == part}
            assert kinds >= {True, False}


@pytest.mark.parametrize("part", ["held-out", "last"])
def test_a_held_out_part_shares_nothing_with_the_rest(part: str) -> None:
    fresh = divergence.PARTS[part]
    set_on = [case for case in divergence.CASES if case.part != part]
    assert not {(case.scheme, case.depth) for case in set_on} & {(case.scheme, case.depth) for case in fresh}
    assert not {case.seed for case in set_on} & {case.seed for case in fresh}
    assert not {rate for case in set_on for rate in case.rates} & {r for case in fresh for r in case.rates}
    assert not {(case.task, case.pairs) for case in set_on} & {(case.task, case.pairs) for case in fresh}
    assert len(fresh) >= 20


def test_the_fit_of_the_risk_is_at_its_minimum_and_leaves_whole_ladders_out() -> None:
    generator = np.random.default_rng(0)
    x_NF = np.hstack([np.ones((40, 1)), generator.normal(size=(40, 2))])
    y_N = (x_NF[:, 1] + generator.normal(size=40) > 0).astype(float)
    weights = risk.fitted(x_NF, y_N)
    pull = x_NF.T @ (1 / (1 + np.exp(-x_NF @ weights)) - y_N) + risk.RIDGE * np.array([0, *weights[1:]])
    assert np.abs(pull).max() < 1e-3
    ladders = ["a"] * 20 + ["b"] * 20
    odds = risk.left_out(x_NF, x_NF, y_N, ladders)
    assert odds[:20] == pytest.approx(x_NF[:20] @ risk.fitted(x_NF[20:], y_N[20:]))


def test_the_paired_difference_draws_the_same_ladders_of_both() -> None:
    right, wrong = [(1.0, True), (0.0, False)], [(0.0, True), (1.0, False)]
    assert difference({"a": right, "b": right}, {"a": wrong, "b": wrong}) == (1.0, 1.0, 1.0)
    assert difference({"a": right, "b": wrong}, {"a": right, "b": wrong}) == (0.0, 0.0, 0.0)
    assert difference({"a": right, "c": wrong}, {"a": wrong, "b": right}) == (1.0, 1.0, 1.0)
    assert all(map(math.isnan, difference({"a": right}, {"b": right})))
