"""The probability that a run trains: its limits, its place in the report, and the fit of its weights."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from benchmarks.regimes import certainty as fitting
from benchmarks.regimes.judged import forecast_of, judge
from normscope.forecast.certainty import ALIVE, MOST, SPREAD, UNSHOWN, WEIGHTS, certainty, features
from normscope.forecast.record import SURE, Forecast, ForecastStep
from normscope.forecast.rule import Decision
from normscope.forecast.thresholds import SUNK, WORST
from normscope.report.rescue import probability
from normscope.report.words import NEAR_LIMIT, certainty_in_words, forecast_in_words


def curve(diversity: float | None) -> list[ForecastStep]:
    return [ForecastStep(36, 3.0, 3.0, {} if diversity is None else {"x": diversity})]


def chance(score: float | None, diversity: float | None = 0.1, outcome: str = "trains") -> float | None:
    return certainty(Decision(outcome, "", score=score), curve(diversity))  # type: ignore[arg-type]


def test_it_grows_with_the_score_and_with_the_diversity() -> None:
    by_score = [chance(score) for score in np.linspace(WORST, -WORST, 31)]
    by_life = [chance(0.3, diversity) for diversity in SUNK * 10 ** np.linspace(-2 * ALIVE, 2 * ALIVE, 31)]
    for found in (by_score, by_life):
        assert None not in found
        assert found == sorted(found)  # type: ignore[type-var]
        assert len(set(found)) > 15
    assert by_score[0] < 1 - SURE < SURE < by_score[-1]  # type: ignore[operator]


def test_beyond_the_limits_nothing_changes() -> None:
    assert chance(WORST) == chance(10 * WORST)
    assert chance(-WORST) == chance(-10 * WORST)
    assert chance(0.3, SUNK * 10 ** (2 * ALIVE)) == chance(0.3, 1.0)
    assert chance(0.3, SUNK * 10 ** (-2 * ALIVE)) == chance(0.3, 1e-14)
    assert features(0.3, curve(None))[2] == 0.0, "no stack was read"


def test_what_the_loss_does_not_show_is_not_sure() -> None:
    for score in (-0.5, 0.3, 3.0):
        shown, open_ = (
            Decision("trains", "", score=score),
            Decision("trains", "", score=score, is_shown=False),
        )
        assert certainty(open_, curve(0.1)) == min(UNSHOWN, certainty(shown, curve(0.1)) or 0.0)
    assert 0.5 < UNSHOWN < SURE


@pytest.mark.parametrize(
    ("outcome", "score"), [("undecided", 1.0), ("not measured", 1.0), ("diverges", None)]
)
def test_what_is_open_has_none(outcome: str, score: float | None) -> None:
    assert chance(score, outcome=outcome) is None


def test_the_report_shows_it() -> None:
    said = Forecast("trains", "", "adamw", 1e-3, 0, 36, 3.0, tuple(curve(0.1)), score=1.0, certainty=0.953)
    assert said.is_sure
    assert "36 steps → trains (probability of training 0.95)" in forecast_in_words(said)
    assert said.to_dict()["certainty"] == 0.953
    assert probability(said) == "0.95"
    for value in (0.11, 0.5, 0.89):
        doubtful = dataclasses.replace(said, certainty=value)
        assert not doubtful.is_sure
        near = "" if value >= 0.5 else f": {NEAR_LIMIT}"
        assert certainty_in_words(doubtful) == f"probability of training {value:.2f}, not sure{near}"
    assert dataclasses.replace(said, certainty=0.02).is_sure
    unknown = dataclasses.replace(said, certainty=None)
    assert certainty_in_words(unknown) == ""
    assert "probability" not in forecast_in_words(unknown)


def test_the_fit_finds_the_weights_that_made_the_cells() -> None:
    dice = np.random.default_rng(0)
    scores, alive = dice.uniform(-3, 3, 4000), dice.uniform(-2, 2, 4000)
    rows = np.stack([np.ones(4000), scores, alive], 1)
    shares = (dice.random(4000) < fitting.probability(rows, np.array(WEIGHTS))).astype(float)
    assert fitting.fit(rows, shares) == pytest.approx(np.array(WEIGHTS), abs=0.2)
    names = np.array([f"ladder {k % 5}" for k in range(4000)])
    chances = fitting.left_out(rows, shares, names)
    assert 0 < ((chances - shares) ** 2).mean() < 0.12
    assert "from 4000 cells of 5 ladders" in fitting.words(rows, shares, names)


def test_a_ladder_is_not_judged_by_weights_that_saw_it() -> None:
    """One ladder is the opposite of the others: left out, it is all wrong."""
    rows = np.stack([np.ones(40), np.tile([-2.0, 2.0], 20), np.zeros(40)], 1)
    shares, names = np.tile([0.0, 1.0], 20), np.repeat(["a", "b"], [36, 4])
    shares[36:] = 1 - shares[36:]
    chances = fitting.left_out(rows, shares, names)
    assert ((chances[36:] > 0.5) != (shares[36:] > 0.5)).all()


def record(case: str = "a: x", lr: float = 1e-3, **more: Any) -> dict[str, Any]:
    """A stored forecast with three measurements."""
    steps = [
        {"step": step, "train_loss": 3.0, "loss": 3.0, "diversity": {"x": 0.1}, "recent_loss": 3.0}
        for step in (0, 18, 36)
    ]
    settings = {"optimizer": "adam", "warmup": 0, "steps": 36, "unigram_entropy": 4.0}
    said = {"outcome": "trains", "reason": "", "score": 0.1, "curve": steps}
    return {"case": case, "lr": lr} | settings | said | more


def test_cells_have_the_share_of_their_replicas() -> None:
    runs = [{"case": "a: x", "lr": 1e-3, "trains": trains} for trains in (True, False, True)]
    rows, shares, names = fitting.cells(runs, [record(), record("a: not trained")])
    assert shares == pytest.approx([2 / 3])
    assert rows[0][0] == 1
    assert list(names) == ["a: x"]


def test_an_untried_rung_keeps_its_certainty_and_is_not_fitted_on() -> None:
    untried = record(lr=1e-4, curve=[], certainty=0.95, divergence=0.01)
    said = forecast_of(untried)
    assert (said.certainty, said.divergence, said.is_untried) == (0.95, 0.01, True)
    again, tried = judge([untried, record(certainty=0.123)])
    assert again == untried
    assert tried["certainty"] not in (None, 0.123)
    runs = [{"case": "a: x", "lr": lr, "trains": True} for lr in (1e-4, 1e-3)]
    assert len(fitting.cells(runs, [untried, record()])[0]) == 1


def test_a_whole_run_is_as_certain_as_its_margin_is_large() -> None:
    def of(score: float) -> float:
        found = certainty(Decision("slow", "", score=score, is_whole=True), curve(0.1))
        assert found is not None
        return found

    assert of(0.0) == 0.5
    assert of(SPREAD) == pytest.approx(1 / (1 + math.exp(-1)), abs=1e-3)
    assert (of(1.0), of(-1.0)) == (MOST, pytest.approx(1 - MOST))
    assert of(-0.03) == pytest.approx(1 - of(0.03), abs=2e-3)
