"""The risk of divergence: its formula by hand, what it sees of a trial, and its order over a ladder."""

import math
from collections.abc import Sequence

import pytest
import torch

from normscope.anatomy import Anatomy, read_anatomy
from normscope.forecast import Forecast, LadderForecast, divergence_risk, forecast, forecast_ladder
from normscope.forecast.divergence import (
    GRADIENT,
    RISE,
    WEIGHTS,
    features,
    with_neighbours,
)
from normscope.forecast.hidden import HiddenStates
from normscope.forecast.record import ForecastStep
from normscope.forecast.watch import WatchedTrial
from normscope.report.rescue import ladder_table
from normscope.report.words import RISKY, forecast_in_words, risk_in_words
from normscope.subjects import load
from normscope.train import Recipe, Trial, endless

NORMED, BARE = (
    read_anatomy(load(f"nn:decoder,scheme={scheme},depth=1,width=8,heads=1", seed=0))
    for scheme in ("pre", "residual-no-norm")
)


def curve(largest_loss: float = 4.0, gradient: float | None = 10.0, first: float = 4.0) -> list[ForecastStep]:
    last = ForecastStep(36, 3.0, 3.0, {"layers": 0.1}, largest_loss=largest_loss, largest_gradient=gradient)
    return [ForecastStep(0, None, first, {"layers": 1.0}), last]


def rung(lr: float, risk: float | None, steps: Sequence[ForecastStep] = ()) -> Forecast:
    return Forecast("trains", "so", "adamw", lr, 0, 36, 3.0, tuple(steps), divergence=risk)


def tried(lr: float, steps: list[ForecastStep]) -> Forecast:
    return rung(lr, divergence_risk("adamw", lr, steps, NORMED), steps)


def test_the_risk_is_a_logistic_model_of_five_numbers() -> None:
    assert features(1e-2, curve(40.0, 1e3), NORMED) == pytest.approx((1.0, 1.0, 3.0, -2.0, 0.0, 0.0))
    assert features(1e-2, curve(40.0, 1e3), BARE) == pytest.approx((1.0, 1.0, 3.0, -2.0, 1.0, 0.0))
    odds = WEIGHTS[0] + WEIGHTS[1] + 3 * WEIGHTS[2] - 2 * WEIGHTS[3] + 0.5 * WEIGHTS[5]
    risk = divergence_risk("AdamW", 1e-2, curve(40.0, 1e3), NORMED, [1e-3, 10**-1.5, 0.1])
    assert risk == pytest.approx(1 / (1 + math.exp(-odds)), abs=1e-4)
    assert all(weight > 0 for weight in WEIGHTS[1:])


def test_a_rate_near_one_that_blew_up() -> None:
    def near(lr: float, loss: float, *blown_up: float) -> float:
        return features(lr, curve(loss), NORMED, blown_up)[5]

    assert near(1e-3, 4.0) == 0
    assert near(1e-3, 4.0 * 33) == 1
    assert near(1e-3, 4.0 * 31) == 0
    assert near(1e-3, math.inf) == 1
    assert near(1e-3, 4.0, 1e-2) == 0
    assert near(1e-3, 4.0, 1e-4) == 0
    assert near(1e-3, 4.0, 5e-2, 2e-3) == pytest.approx(1 - math.log10(2))


def test_each_of_them_raises_the_risk_and_infinity_is_the_limit() -> None:
    calm = divergence_risk("adam", 1e-3, curve(), NORMED)
    assert calm < divergence_risk("adam", 1e-2, curve(), NORMED)
    assert calm < divergence_risk("adam", 1e-3, curve(largest_loss=12.0), NORMED)
    assert calm < divergence_risk("adam", 1e-3, curve(gradient=500.0), NORMED)
    assert calm < divergence_risk("adam", 1e-3, curve(), BARE)
    assert calm < divergence_risk("adam", 1e-3, curve(), NORMED, [2e-3])
    assert features(1e-3, curve(math.inf, math.inf), BARE)[1:3] == (RISE[1], GRADIENT[1])
    assert features(1e-3, curve(1e9, math.nan), BARE)[1:3] == (RISE[1], GRADIENT[1])
    assert features(1e-3, curve(2.0, 0.0), BARE)[1:3] == (RISE[0], GRADIENT[0])


def test_a_rise_from_no_positive_loss_is_unknown() -> None:
    for first in (-0.5, 0.0, math.nan):
        assert divergence_risk("adam", 1e-3, curve(4.0, first=first), NORMED) is None
        assert features(1e-3, curve(math.inf, first=first), NORMED)[1] == RISE[1]


@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [
        ("sgd", curve()),
        ("Muon + AdamW", curve()),
        ("adamw", []),
        ("adamw", curve()[:1]),
        ("adamw", curve(gradient=None)),
    ],
)
def test_an_unknown_risk(optimizer: str, steps: list[ForecastStep]) -> None:
    assert divergence_risk(optimizer, 1e-3, steps, NORMED) is None
    assert divergence_risk("adamw", 1e-3, curve(), Anatomy(())) is None


def test_a_larger_rate_has_at_least_the_risk_of_a_smaller_one() -> None:
    rungs = [tried(1e-4, curve()), tried(1e-3, curve(30.0, 5e3)), tried(2e-3, []), tried(3e-3, curve())]
    found = with_neighbours(rungs, NORMED)
    assert [each.divergence for each in found[:3]] == [rungs[0].divergence, rungs[1].divergence, None]
    assert found[3].divergence == rungs[1].divergence > rungs[3].divergence


def test_a_trial_that_blew_up_raises_the_risk_of_smaller_rates_within_a_factor_of_ten() -> None:
    rungs = [tried(5e-4, curve()), tried(2e-3, curve()), tried(1e-2, curve(math.inf, math.inf))]
    found = with_neighbours(rungs, NORMED)
    assert found[0].divergence == rungs[0].divergence
    assert rungs[1].divergence < found[1].divergence < found[2].divergence == rungs[2].divergence
    assert found[1].divergence == divergence_risk("adamw", 2e-3, curve(), NORMED, [1e-2])


def test_a_trial_records_the_largest_loss_and_gradient_of_all_its_steps() -> None:
    """Against a lone trial that keeps both at every step."""
    given = load("nn:decoder,scheme=residual-no-norm,depth=2,width=16,heads=2", seed=0)
    recipe = Recipe(lr=3e-2, steps=12)
    said = forecast(given, read_anatomy(given), recipe)
    again = load("nn:decoder,scheme=residual-no-norm,depth=2,width=16,heads=2", seed=0)
    torch.manual_seed(recipe.seed)
    trial = Trial(
        again.model.train(),
        endless(again.batches),
        lambda model, batch: again.loss(batch, model),
        recipe,
        keeps_norms=True,
    )
    for _ in range(recipe.steps):
        trial.advance()
    last = said.curve[-1]
    assert last.step == 12
    assert last.largest_loss == pytest.approx(max(trial.losses), rel=1e-4)
    assert last.largest_gradient == pytest.approx(max(trial.gradient_norms), rel=1e-4)
    assert max(trial.gradient_norms) > 1.2 * trial.gradient_norms[-1], "else the last would do"
    assert said.curve[0].largest_loss is None
    assert said.divergence == divergence_risk("adamw", 3e-2, said.curve, BARE)
    assert said.to_dict()["divergence"] == said.divergence


def test_a_skipped_step_and_an_unknown_norm_are_no_large_gradient() -> None:
    """A scaler of float16 skips a step whose scaled gradients overflow; sparse gradients have no norm."""
    given = load("nn:decoder,scheme=pre,depth=1,width=8,heads=1", seed=0)
    anatomy = read_anatomy(given)

    def largest(norms: list[float], losses: list[float], precision: str = "float32") -> float | None:
        recipe = Recipe(lr=1e-3, steps=9, precision=precision)
        trial = WatchedTrial(given, anatomy, given.model, recipe, [], True, HiddenStates(anatomy))
        trial.measure(3, losses, None, {}, norms)
        return trial.curve[0].largest_gradient

    losses = [4.0, 4.0, 3.9]
    assert largest([2.0, math.inf, 1.0], losses, "float16") == 2.0
    assert largest([2.0, math.inf, 1.0], losses) == math.inf
    assert largest([2.0, math.nan, 1.0], losses) == 2.0
    assert largest([math.nan] * 3, losses) is None
    assert largest([2.0, 3.0, math.nan], [4.0, 4.0, math.nan], "float16") == math.inf, "the run diverged"


def test_a_ladder_of_a_stack_has_the_risks_of_lone_trials() -> None:
    given = load("nn:decoder,scheme=residual-no-norm,depth=2,width=16,heads=2", seed=0)
    anatomy = read_anatomy(given)
    said = forecast_ladder(given, anatomy, Recipe(lr=1e-3), (1e-3, 10.0))
    small, large = said.rungs
    alone = forecast(given, anatomy, Recipe(lr=1e-3, steps=36))
    assert small.divergence == pytest.approx(alone.divergence, abs=0.02)
    assert small.divergence < 0.3 < 0.9 < large.divergence


def test_reports_mention_a_risk_that_matters() -> None:
    assert risk_in_words(rung(1e-3, RISKY / 2)) == risk_in_words(rung(1e-3, None)) == ""
    assert risk_in_words(rung(1e-3, 0.42)) == "risk of divergence 0.42"
    assert "; risk of divergence 0.42" in forecast_in_words(rung(1e-3, 0.42))

    def columns(*risks: float | None) -> list[str]:
        rungs = tuple(rung(10.0 ** (number - 4), risk) for number, risk in enumerate(risks))
        table = ladder_table(LadderForecast(rungs, None, "not needed", 0))
        return [str(column) for column in table.columns]

    assert "diverges" in columns(0.01, 0.5)
    assert "diverges" not in columns(0.01, None)
