"""The range test: its rate on a quadratic, what it depends on, and its part in a refined ladder."""

import importlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_forecast import Tiny, anatomy_of, next_token, subject_of
from torch import Tensor, nn

from normscope.forecast import LadderForecast, LadderInterrupted, divergence_risk, forecast_ladder
from normscope.forecast.divergence import AWAY, RANGE_TEST, distance, with_neighbours
from normscope.forecast.range_test import LAST, PUBLISHED, SHORT, RampPlan, ramp, range_test
from normscope.report.rescue import ladder_sentences, range_test_in_words
from normscope.subjects import Run, make_subject
from normscope.train import Recipe, Trial, endless

ladder_module: Any = importlib.import_module("normscope.forecast.ladder")
RATES = [1e-3, 1e-2, 1.0]


class Bowl(nn.Module):
    """½‖w/size‖² + 1 from `w = size`, in float64: gradient descent is the same at a rate of size² times."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), size, dtype=torch.float64))
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight / self.size).square().sum() / 2 + 1 + 0 * x.sum()


def bowl(size: float = 1.0) -> Any:
    return make_subject(Bowl(size), torch.zeros(1, 1), lambda output, batch: output)


def refined(model: Tiny, progress: Any = None, **options: Any) -> LadderForecast:
    recipe = Recipe(**{"lr": 1e-3, **options})
    return forecast_ladder(subject_of(model), anatomy_of(model), recipe, RATES, progress, refine=60)


@pytest.mark.parametrize("plan", [SHORT, PUBLISHED])
def test_a_hundredth_of_the_curvature_diverges_at_a_hundred_times_the_rate(plan: RampPlan) -> None:
    small, large = (range_test(bowl(size), Recipe(optimizer="sgd"), test=plan) for size in (0.02, 0.2))
    per_step = (LAST / plan.first) ** (1 / (plan.steps - 1))
    assert small is not None
    assert large is not None
    assert large.diverged < LAST
    assert large.diverged / small.diverged == pytest.approx(100, rel=1.01 * per_step - 1)


@pytest.mark.parametrize("plan", [SHORT, PUBLISHED])
def test_the_rates_grow_evenly_from_the_first_to_the_last(plan: RampPlan) -> None:
    found = ramp(lambda rate: 1.0, plan)
    assert len(found.rates) == plan.steps
    assert (found.rates[0], found.rates[-1], found.diverged) == pytest.approx((plan.first, LAST, LAST))
    assert found.rates[1] / found.rates[0] == pytest.approx(found.rates[-1] / found.rates[-2])
    rising = ramp(lambda rate: rate, plan)
    weight = 0.05 * PUBLISHED.steps / plan.steps
    assert rising.losses[1] == pytest.approx((1 - weight) * rising.rates[0] + weight * rising.rates[1])


@pytest.mark.parametrize("plan", [SHORT, PUBLISHED])
def test_a_loss_has_diverged_at_five_times_the_lowest_smoothed_one_or_if_it_is_not_finite(
    plan: RampPlan,
) -> None:
    weight = 0.05 * PUBLISHED.steps / plan.steps
    for factor, ends in ((4.9, False), (5.1, True)):
        jump = (factor - 1 + weight) / weight  # raises the smoothed loss to `factor` in one step
        losses = iter([1.0, 1.0, jump, *[1.0] * plan.steps])
        found = ramp(lambda rate, losses=losses: next(losses), plan)
        assert (len(found.rates) == 2) == ends
    losses = iter([10.0, *[1.0] * (plan.steps - 3), 300.0, 1.0])
    found = ramp(lambda rate: next(losses), plan)
    assert len(found.rates) == plan.steps - 2, "the lowest, not the first"
    for broken in (math.inf, math.nan):
        found = ramp(lambda rate, broken=broken: broken if rate > 1e-2 else 1.0, plan)
        assert 1e-2 < found.diverged < 1e-2 * (LAST / plan.first) ** (1 / (plan.steps - 1))


def test_the_steps_are_those_of_a_trial_at_the_same_rates() -> None:
    """A trial whose learning rate is set before each step gives the same losses."""
    model = Tiny(depth=1)
    subject, recipe = subject_of(model), Recipe(lr=1e-3, seed=5, clip=0.5, accumulation=2)
    found = range_test(subject, recipe)
    torch.manual_seed(5)
    again = Tiny(depth=1)
    again.load_state_dict(model.state_dict())
    torch.manual_seed(5)
    trial = Trial(again, endless(subject.batches), lambda model, batch: subject.loss(batch, model), recipe)
    losses: list[float] = []
    assert found is not None
    for rate in found.rates:
        for group in trial.optimizers[0].param_groups:
            group["full_lr"] = rate
        loss = trial.advance()
        losses.append(loss if not losses else loss / 6 + losses[-1] * 5 / 6)
    assert found.losses == pytest.approx(losses, rel=1e-3)


def test_neither_the_rate_of_the_recipe_nor_its_warmup_and_schedule_matter() -> None:
    subject = subject_of(Tiny(depth=1))
    plain = range_test(subject, Recipe(lr=1e-3))
    for other in (Recipe(lr=1.0), Recipe(warmup=7), Recipe(schedule="cosine", steps=20, run_steps=20)):
        assert range_test(subject, other) == plain
    assert range_test(subject, Recipe(optimizer="sgd")) != plain
    assert range_test(subject, Recipe(seed=1)) != plain, "dropout"


def test_a_model_in_eval_mode_is_tested_in_train_mode() -> None:
    model = Tiny(depth=1)
    assert model.training
    found = range_test(subject_of(model), Recipe())
    assert range_test(subject_of(model.eval()), Recipe()) == found, "dropout"
    model.train().encoder.eval()
    assert range_test(subject_of(model), Recipe()) != found, "parts keep their own mode"


def test_a_users_optimizer_is_ramped_from_a_copy() -> None:
    model = Tiny(depth=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    given = Recipe.of(Run(model=model, batches=None, optimizer=optimizer, scheduler=scheduler))
    found, plain = (range_test(subject_of(model), recipe) for recipe in (given, Recipe()))
    assert found is not None
    assert plain is not None
    assert found.losses == pytest.approx(plain.losses, rel=1e-3)
    assert optimizer.param_groups[0]["lr"] == 3e-4
    assert not optimizer.state


class Uncopyable(Tiny):
    def __deepcopy__(self, memo: object) -> "Uncopyable":
        raise TypeError("a handle")


@pytest.mark.parametrize("kind", ["copied", "cannot be copied", "holds on to the original", "interrupted"])
def test_the_model_is_as_before(kind: str) -> None:
    model = (Uncopyable if kind == "cannot be copied" else Tiny)(depth=1, dropout=0.0).eval()
    subject = subject_of(model)
    if kind == "holds on to the original":
        subject.loss_fn = lambda output, batch: next_token(model(batch), batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    again = Tiny(depth=1, dropout=0.0)
    again.load_state_dict(before)
    state = torch.get_rng_state()

    def progress(step: int, steps: int) -> None:
        if kind == "interrupted" and step == 10:
            raise KeyboardInterrupt

    if kind == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            range_test(subject, Recipe(), progress)
    else:
        assert range_test(subject, Recipe(), progress) == range_test(subject_of(again), Recipe())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_does_not_learn_has_no_range_test() -> None:
    subject = bowl()
    subject.loss_fn = lambda output, batch: torch.ones((), requires_grad=True) * 2
    assert range_test(subject, Recipe()) is None


def test_a_first_loss_that_is_not_finite_diverges_at_the_first_rate() -> None:
    subject = bowl()
    subject.loss_fn = lambda output, batch: output * math.nan
    found = range_test(subject, Recipe())
    assert found is not None
    assert found.diverged == SHORT.first


def test_a_refined_ladder_has_the_rate_of_the_range_test_and_a_risk_from_it() -> None:
    model = Tiny(depth=1, dropout=0.0)
    alone = range_test(subject_of(model), Recipe())
    ladder = refined(model)
    assert alone is not None
    assert ladder.range_test == ladder.to_dict()["range_test"] == alone.diverged
    expected = with_neighbours(ladder.rungs, anatomy_of(model), alone.diverged)
    without = with_neighbours(ladder.rungs, anatomy_of(model))
    assert [rung.divergence for rung in ladder.rungs] == [rung.divergence for rung in expected]
    assert [rung.divergence for rung in ladder.rungs] != [rung.divergence for rung in without]
    quick = forecast_ladder(subject_of(model), anatomy_of(model), Recipe(lr=1e-3), RATES)
    assert quick.range_test is None


@pytest.mark.parametrize("lr", [1e-4, 1e-2])
def test_the_risk_is_the_mean_of_two_in_log_odds(lr: float) -> None:
    model = Tiny(depth=1, dropout=0.0)
    anatomy = anatomy_of(model)
    curve = forecast_ladder(subject_of(model), anatomy, Recipe(lr=1e-2), [1e-2]).rungs[0].curve

    def odds(diverged: float | None) -> float:
        risk = divergence_risk("adamw", lr, curve, anatomy, (), diverged)
        assert risk is not None
        return math.log(risk / (1 - risk))

    for times in (1.0, 10.0, 100.0):
        other = RANGE_TEST[0] - RANGE_TEST[1] * math.log10(times)
        assert odds(times * lr) == pytest.approx((odds(None) + other) / 2, abs=0.1)
    assert distance(1e-9, 1.0) == AWAY[0]
    assert distance(1e3, 1.0) == AWAY[1]
    assert RANGE_TEST[1] > 0


def test_an_interrupted_range_test_leaves_the_rungs() -> None:
    done: list[int] = []

    def progress(step: int, steps: int) -> None:
        if steps == SHORT.steps:
            done.append(step)
            if step == 9:
                raise KeyboardInterrupt

    model = Tiny(depth=1, dropout=0.0)
    with pytest.raises(LadderInterrupted) as stop:
        refined(model, progress)
    found = stop.value.ladder
    assert done == list(range(10))
    assert found.range_test is None
    assert [rung.outcome != "not measured" for rung in found.rungs] == [True] * 3
    assert any(rung.steps == 60 for rung in found.rungs)


@pytest.mark.parametrize("why", ["an optimiser that the risk does not know", "a model that raises"])
def test_without_a_range_test_the_ladder_goes_on(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    called = []

    def failing(*given: Any) -> None:
        called.append(given)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(ladder_module, "range_test", failing)
    found = refined(Tiny(depth=1), optimizer="sgd" if why.startswith("an optimiser") else "adamw")
    assert found.range_test is None
    assert len(called) == (why == "a model that raises")
    assert (found.rungs[0].divergence is None) == why.startswith("an optimiser")
    assert found.best is not None


def test_out_of_memory_is_no_reason_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(ladder_module, "range_test", failing)
    with pytest.raises(torch.OutOfMemoryError):
        refined(Tiny(depth=1))


def test_the_report_names_the_rate() -> None:
    ladder = LadderForecast((), None, "not needed", 0)
    assert range_test_in_words(ladder) == ""
    said = range_test_in_words(replace(ladder, range_test=0.4251))
    assert said.startswith("in a range test the loss diverged at learning rate 0.43; ")
    assert said in ladder_sentences(None, replace(ladder, range_test=0.4251))
    assert "did not diverge below learning rate 10" in range_test_in_words(replace(ladder, range_test=LAST))
