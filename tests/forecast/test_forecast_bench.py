"""Tests of the forecast's benchmark: its figures by hand, and no held-out run among those of the rule."""

import json
from pathlib import Path

import pytest

from benchmarks.forecast.bench import Held, _best_rates, _certainties
from benchmarks.forecast.cells import (
    KEPT,
    LADDERS,
    RATES,
    SEEN,
    Ladder,
    keep,
    kept,
    licences,
    name,
    text_hash,
)
from benchmarks.process import wilson
from benchmarks.regimes.best_rates import Named
from normscope.forecast import BestRate, Forecast, LadderForecast
from normscope.train import MARGIN


def held(said: list[str], trained: list[bool], certainties: list[float] | None = None) -> Held:
    rungs = tuple(
        Forecast(outcome, "so", "adamw", rate, 0, 36, 3.0, certainty=certainty)  # type: ignore[arg-type]
        for outcome, rate, certainty in zip(said, RATES, certainties or [None] * len(RATES), strict=True)
    )
    largest = max((rung.lr for rung in rungs if rung.trains), default=None)
    gaps = tuple(-1.0 if each else 0.5 for each in trained)
    return Held(LADDERS[0], LadderForecast(rungs, largest, "not needed", 0), tuple(trained), gaps, 1.0)


def test_an_edge_is_right_within_a_factor_of_two() -> None:
    def edge(said: int, trained: int) -> bool:
        outcomes = ["trains"] * said + ["collapses"] * (len(RATES) - said)
        return held(outcomes, [i < trained for i in range(len(RATES))]).edge_is_right

    assert RATES[2:6] == (2e-4, 5e-4, 1e-3, 2e-3)
    assert edge(4, 4)
    assert edge(5, 6)
    assert edge(6, 5)
    assert not edge(4, 3), "2.5 times"
    assert not edge(4, 6)
    assert edge(0, 0)
    assert not edge(0, 1)
    assert not edge(1, 0)


def test_a_slow_rung_said_to_train_is_no_hit() -> None:
    ladder = held(["slow", "trains"] + ["collapses"] * 7, [False, True] + [False] * 7)
    assert ladder.pairs[:3] == [("slow", False), ("trains", True), ("collapses", False)]
    assert ladder.edge == RATES[1]


def test_sure_cells_and_the_brier_score_by_hand() -> None:
    said = [
        "slow",
        "trains",
        "trains",
        "trains",
        "trains",
        "collapses",
        "collapses",
        "collapses",
        "undecided",
    ]
    trained = [True, False, True, True, True, False, False, True, True]
    certainties = [0.4, 0.95, 0.95, 0.9, 0.8, 0.02, 0.1, 0.05, None]
    sure, brier = _certainties([held(said, trained, certainties).scored])
    assert sure["figure"] == "66.7 %"
    assert sure["how"] == "4 of 6; sure of 6 of 9 cells"
    squares = [0.36, 0.9025, 0.0025, 0.01, 0.04, 0.0004, 0.01, 0.9025]
    assert brier["figure"] == f"{sum(squares) / 8:.3f}"
    assert "0.93: 0.67 of 3" in brier["how"]
    none, _ = _certainties([held(said, trained).scored])
    assert none["figure"] == "not measured"


def test_the_rate_to_use_is_right_within_a_factor_of_two() -> None:
    ladder = held(["trains"] * len(RATES), [True] * len(RATES)).scored

    def named(rate: float | None, *best: float) -> Named:
        return Named(ladder, BestRate(rate, None, None, "so"), best)

    assert _best_rates([named(2e-3, 1e-3), named(2.1e-3, 1e-3), named(None, 1e-3)])["how"].startswith(
        "1 of 3"
    )
    failed = held(["collapses"] * len(RATES), [False] * len(RATES)).scored
    assert _best_rates([Named(failed, BestRate(None, None, None, "so"), (1e-3,))])["figure"] == "not measured"


def test_wilsons_interval_by_hand() -> None:
    low, high = wilson(90, 100)
    assert low == pytest.approx(0.8256, abs=1e-4)
    assert high == pytest.approx(0.9448, abs=1e-4)
    assert wilson(10, 10)[0] == pytest.approx(10 / (10 + 1.96**2))


def test_the_held_out_ladders_are_not_those_of_the_rule() -> None:
    assert len({ladder.model for ladder in (*LADDERS, *SEEN)}) == len(LADDERS) + len(SEEN)
    assert all(ladder.text is licences for ladder in LADDERS)
    assert all(ladder.text is not licences for ladder in SEEN)
    schemes = {_scheme(ladder) for ladder in SEEN}
    assert not schemes & {_scheme(ladder) for ladder in LADDERS if ladder.new}
    assert len(LADDERS) * len(RATES) >= 60


def _scheme(ladder: Ladder) -> str:
    return ladder.model.split(",")[1] if ladder.model.startswith("nn:") else ladder.model.split(",")[0]


def test_what_is_kept_is_the_whole_grid_and_says_what_its_gaps_say() -> None:
    found = json.loads(KEPT.read_text())["cells"]
    assert set(found) == {name(ladder, rate) for ladder in LADDERS for rate in RATES}
    for cell in found.values():
        gap = cell["gap"]
        if gap is None:
            assert not cell["trains"]
        elif abs(gap + MARGIN) > 1e-3:
            assert cell["trains"] == (gap <= -MARGIN)


def test_a_truth_of_another_text_is_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "truth.json"
    keep({"a": {"gap": -1.0, "trains": True}}, file)
    assert kept(file) == {"a": {"gap": -1.0, "trains": True}}
    file.write_text(file.read_text().replace(text_hash(), "0" * 64))
    assert kept(file) == {}
    assert kept(tmp_path / "none.json") == {}
