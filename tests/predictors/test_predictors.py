"""Tests of the published predictors on models whose answer is known in closed form."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.predictors import baselines, rksp
from benchmarks.predictors import dyt_saturation as dyt
from benchmarks.predictors.catalogue import CHEAP, PREDICTORS
from benchmarks.predictors.critical_sharpness import critical_sharpness
from benchmarks.predictors.of_normscope import RISE, RISK, WORST, _rise, _score, as_predictions
from benchmarks.predictors.range_test import range_test, steepest
from benchmarks.predictors.rksp import whitened_dmd
from benchmarks.predictors.setting import BROKEN, NotMeasuredError, Setting
from benchmarks.predictors.sharpness import sharpness
from normscope.anatomy import Anatomy, read_anatomy
from normscope.forecast import Forecast, LadderForecast
from normscope.forecast.range_test import RampPlan, ramp
from normscope.forecast.record import ForecastStep
from normscope.subjects import load, make_subject
from normscope.train import Recipe, Trial, endless

CURVATURE = torch.tensor([4.0, 1.0, 0.5, 0.25], dtype=torch.float64)
POINT = torch.tensor([0.3, -0.2, 1.0, 2.0], dtype=torch.float64)
RATES = (1e-2, 0.1, 1.0)


class Bowl(nn.Module):
    """½ Σ hᵢwᵢ² in float64; its gradient is h⊙w and its Hessian diag h."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(POINT.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (CURVATURE * self.weight.square()).sum() / 2 + 0 * x.sum()


def bowl(optimizer: str = "sgd", rates: tuple[float, ...] = RATES, **options: float) -> Setting:
    subject = make_subject(Bowl(), torch.zeros(1, 1), lambda output, batch: output)
    return Setting(subject, Anatomy(()), Recipe(optimizer=optimizer, lr=rates[0], **options), rates)


def decoder(scheme: str, depth: int = 2) -> Setting:
    subject = load(f"nn:decoder,scheme={scheme},depth={depth},width=16,heads=2", seed=0)
    return Setting(subject, read_anatomy(subject), Recipe(optimizer="adam", lr=1e-3, seed=3), (1e-3, 1e-2))


def test_the_critical_rate_of_gradient_descent_on_a_quadratic() -> None:
    g = CURVATURE * POINT
    exact = float(2 * (g @ g) / (g @ (CURVATURE * g)))
    [found] = critical_sharpness(bowl())
    assert found.largest_rate == pytest.approx(exact, rel=1 / 16)
    assert found.facts["critical sharpness"] == pytest.approx(2 / exact, rel=1 / 16)
    assert found.scores == pytest.approx([math.log2(rate / found.largest_rate) for rate in RATES])


def test_the_critical_rate_of_adam_whose_first_step_is_the_sign() -> None:
    g = CURVATURE * POINT
    [found] = critical_sharpness(bowl("adam"))
    assert found.largest_rate == pytest.approx(float(2 * g.abs().sum() / CURVATURE.sum()), rel=1 / 16)


def test_weight_decay_is_a_part_of_the_update() -> None:
    g, decay = CURVATURE * POINT, 0.5
    step = g.sign() + decay * POINT
    [found] = critical_sharpness(bowl("adamw", weight_decay=decay))
    exact = float(2 * (step @ g) / (step @ (CURVATURE * step)))
    assert found.largest_rate == pytest.approx(exact, rel=1 / 16)


def test_sharpness_is_the_largest_curvature() -> None:
    [found] = sharpness(bowl())
    assert found.scores == pytest.approx([rate * 4 / 2 for rate in RATES], rel=1e-2)
    assert found.largest_rate == pytest.approx(0.5, rel=1e-2)


def test_preconditioned_sharpness_is_that_of_adams_first_step() -> None:
    plain, adam = sharpness(bowl("adam"))
    largest = float((CURVATURE / (0.1 * (CURVATURE * POINT).abs())).max())  # h/((1 − β₁)|hw|)
    assert plain.facts["λ_max"] == pytest.approx(4, rel=1e-2)
    assert adam.facts["λ_max"] == pytest.approx(largest, rel=1e-2)
    assert adam.largest_rate == pytest.approx(38 / largest, rel=1e-2)


def test_the_spectrum_of_a_linear_layer_is_that_of_its_matrix() -> None:
    generator = np.random.default_rng(0)
    basis = generator.normal(size=(4, 4))
    matrix = basis @ np.diag([1.2, 1.0, 0.93, 0.5]) @ np.linalg.inv(basis)
    x = generator.normal(size=(300, 4)) @ generator.normal(size=(4, 4)) + 7
    found = whitened_dmd(x, x @ matrix.T + 2, epsilon=1e-12)
    assert sorted(found.eigenvalues.real) == pytest.approx([0.5, 0.93, 1.0, 1.2], abs=1e-6)
    assert found.residuals.max() < 1e-6
    assert found.near_unit_mass() == found.near_unit_mass(reliable=True) == 0.5
    assert found.radius == pytest.approx(1.2)


def test_modes_that_are_not_linear_are_unreliable() -> None:
    generator = np.random.default_rng(0)
    x, noise = generator.normal(size=(2, 500, 3))
    found = whitened_dmd(x, x + noise)
    assert found.residuals.min() > 0.5
    assert found.near_unit_mass(reliable=True) is None


def test_branches_that_start_at_zero_have_a_near_unit_mass_of_one() -> None:
    figures = {found.name: found.scores for found in rksp.rksp(decoder("rezero"))}
    assert figures["RKSP near-unit mass"] == (1.0, 1.0)
    assert figures["RKSP spectral radius"] == pytest.approx((1.0, 1.0), abs=1e-5)


def test_a_model_without_a_stream_has_no_profile() -> None:
    with pytest.raises(NotMeasuredError, match="no residual stream"):
        rksp.rksp(bowl())


def test_the_gradient_norm() -> None:
    [found] = PREDICTORS["gradient_norm"](bowl())
    assert found.scores == pytest.approx([float((CURVATURE * POINT).norm())] * 3)


def test_the_range_test_of_gradient_descent_on_a_quadratic() -> None:
    weight, curvature = 1.0, 20.0

    def step(rate: float) -> float:
        nonlocal weight
        loss = curvature * weight**2 / 2
        weight *= 1 - rate * curvature
        return loss

    found = ramp(step, RampPlan(1e-7, 200))
    assert 2 / curvature <= found.turns < found.diverged < 1
    assert steepest(found) < found.turns
    assert found.losses[1] == pytest.approx(0.025 * 10 * (1 - 1e-7 * 20) ** 2 + 0.975 * 10)


def test_the_range_test_ends_at_a_loss_that_is_not_finite() -> None:
    found = ramp(lambda rate: math.inf if rate > 1e-3 else 1.0)
    assert 1e-3 < found.diverged < 1.3e-3
    assert ramp(lambda rate: math.nan).rates == (1e-7,)
    flat = ramp(lambda rate: 1.0)
    assert flat.diverged == pytest.approx(10.0)


def test_the_range_test_steps_the_recipes_optimizer() -> None:
    turns, diverges = range_test(bowl("adam"))
    assert turns.largest_rate is not None
    assert diverges.largest_rate is not None
    assert 0.1 < turns.largest_rate <= diverges.largest_rate
    assert turns.scores == pytest.approx([math.log2(rate / turns.largest_rate) for rate in RATES])


def test_dyt_saturation_against_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = decoder("dyt")
    with torch.no_grad():
        for name, parameter in setting.subject.model.named_parameters():
            if name.endswith(".scale"):
                parameter.mul_(40)
    shares: list[float] = []
    modules = [m for m in setting.subject.model.modules() if type(m).__name__ == "DyT"]
    hooks = [
        m.register_forward_hook(
            lambda m, given, out: shares.append(float(((m.scale * given[0]).abs() > 2).double().mean()))
        )
        for m in modules
    ]
    setting.subject.forward()
    for hook in hooks:
        hook.remove()
    monkeypatch.setattr(dyt, "STEPS", 2)
    first, later = PREDICTORS["dyt_saturation"](setting)
    assert len(shares) == len(modules) == 5
    assert 0 < first.scores[0] < 1
    assert first.scores == pytest.approx([sum(shares) / 5] * 2)
    assert len({*first.scores, *later.scores}) == 3, "the copies have moved, each at its rate"


def test_dyt_saturation_without_dyt() -> None:
    with pytest.raises(NotMeasuredError, match="no DyT"):
        PREDICTORS["dyt_saturation"](decoder("pre"))


@pytest.mark.parametrize(("scheme", "bare"), [("residual-no-norm", 1.0), ("pre", 0.0), ("post", 0.0)])
def test_baselines_without_a_forward(scheme: str, bare: float) -> None:
    rate, depth, none = PREDICTORS["baselines"](decoder(scheme))
    assert rate.scores == (1e-3, 1e-2)
    assert depth.scores == (2e-3, 2e-2)
    assert none.scores == (bare, bare)


def test_loss_after_steps_is_that_of_lone_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "STEPS", 12)
    setting = decoder("pre")
    found, share = PREDICTORS["loss_after_steps"](setting)
    for rate, score, relative in zip(setting.rates, found.scores, share.scores, strict=True):
        subject = decoder("pre").subject
        trial = Trial(
            subject.model,
            endless(subject.batches),
            lambda model, batch, subject=subject: subject.loss(batch, model),
            Recipe(optimizer="adam", lr=rate),
        )
        losses = [trial.advance() for _ in range(12)]
        assert score == pytest.approx(sum(losses[-10:]) / 10, rel=1e-4)
        assert relative == pytest.approx(score / losses[0], rel=1e-4)
    assert found.best_rate == setting.rates[found.scores.index(min(found.scores))]


def test_the_loss_of_a_broken_run() -> None:
    assert baselines._recent([1.0, math.inf]) == BROKEN
    assert baselines._recent([2.0] * baselines.STEPS) == 2.0


def test_scores_of_forecasts_are_larger_for_failures() -> None:
    def forecast(outcome: str, score: float | None) -> Forecast:
        return Forecast(outcome, "so", "adam", 1e-3, 0, 36, 3.0, score=score)

    assert _score(forecast("trains", 1.5)) == -1.5
    assert _score(forecast("diverges", None)) == WORST
    assert _score(forecast("undecided", None)) == 0.0


def test_an_untried_rung_has_the_smallest_risk_and_rise_of_larger_rates() -> None:
    def rung(lr: float, *losses: float, outcome: str = "trains", risk: float | None = None) -> Forecast:
        curve = tuple(ForecastStep(18 * i, loss if i else None, loss, {}) for i, loss in enumerate(losses))
        return Forecast(outcome, "so", "adam", lr, 0, 36, 3.0, curve, divergence=risk)

    rungs = (
        rung(1e-5, 4.0, 2.0, risk=0.01),
        rung(1e-4),
        rung(3e-4, outcome="not measured"),
        rung(1e-3, 4.0, 3.6, risk=0.2),
        rung(1e-2, 4.0, 3.2, risk=0.3),
        rung(1e-1, 4.0, math.nan, outcome="diverges", risk=0.9),
    )
    scores = {each.name: each.scores for each in as_predictions(LadderForecast(rungs, 1e-2, "", 0))}
    assert scores[RISK] == (0.01, 0.2, 1.0, 0.2, 0.3, 0.9)
    assert scores[RISE] == (0.5, 0.8, 1.0, 0.9, 0.8, BROKEN)


def test_the_rise_of_a_trial_is_its_largest_loss_over_the_first() -> None:
    def rise(*losses: float) -> float | None:
        curve = tuple(ForecastStep(18 * i, loss if i else None, loss, {}) for i, loss in enumerate(losses))
        return _rise(Forecast("trains", "so", "adam", 1e-3, 0, 36, 3.0, curve))

    assert rise(4.0, 6.0, 5.0) == 1.5
    assert rise(4.0, 3.0, 2.0) == 0.75
    assert rise(4.0, math.nan) == BROKEN
    assert rise(4.0) is None


@pytest.mark.parametrize("predictor", CHEAP, ids=lambda each: each.__name__)
def test_predictors_leave_the_model_as_it_was(predictor) -> None:
    setting = decoder("post")
    model = setting.subject.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = predictor(setting)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [found.scores for found in predictor(setting)] == [found.scores for found in first]
    assert all(len(found.scores) == 2 and all(map(math.isfinite, found.scores)) for found in first)
