"""Forecasts, ladders and remedies of a user's run, against those of the same run from options."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from normscope import Run, load
from normscope.anatomy import Anatomy, read_anatomy
from normscope.forecast import forecast, forecast_ladder
from normscope.rules.remedies import try_remedies
from normscope.subjects import Subject
from normscope.train import Recipe

SPEC = "nn:decoder,scheme=post,depth=4,width=32,heads=2"


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load(SPEC)


@pytest.fixture(scope="module")
def anatomy(subject: Subject) -> Anatomy:
    return read_anatomy(subject)


def recipe_of(
    model: nn.Module, schedule: Callable[[Any], Any] | None = None, *, lr: float = 3e-3, **given: Any
) -> Recipe:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)  # as `build_optimizers` on the CPU
    schedulers = [schedule(optimizer)] if schedule else []
    return Recipe.of(Run(model=model, batches=None, optimizer=optimizer, scheduler=schedulers), **given)


def test_the_forecast_is_that_of_the_same_options(subject: Subject, anatomy: Anatomy) -> None:
    live = forecast(subject, anatomy, recipe_of(subject.model, steps=12))
    options = forecast(subject, anatomy, Recipe(lr=3e-3, steps=12))
    assert live.curve == options.curve
    assert live.optimizer == "AdamW"
    assert dataclasses.replace(live, optimizer="adamw") == options


def test_a_schedule_of_the_run_is_kept(subject: Subject, anatomy: Anatomy) -> None:
    def ramp(optimizer: Any) -> Any:
        return lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 6))

    live = forecast(subject, anatomy, recipe_of(subject.model, ramp, steps=12))
    options = forecast(subject, anatomy, Recipe(lr=3e-3, steps=12, warmup=6))
    assert live.curve == options.curve
    assert live.warmup == 6


def test_a_warmup_longer_than_the_trial_is_tried_without_it_first(subject: Subject, anatomy: Anatomy) -> None:
    def ramp(optimizer: Any) -> Any:
        return lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 500))

    live = forecast(subject, anatomy, recipe_of(subject.model, ramp, steps=12))
    without = forecast(subject, anatomy, Recipe(lr=3e-3, steps=12))
    assert live.curve == without.curve
    assert live.warmup == 500


def test_an_optimizer_that_needs_a_closure_has_no_forecast(subject: Subject, anatomy: Anatomy) -> None:
    run = Run(model=subject.model, batches=None, optimizer=torch.optim.LBFGS(subject.model.parameters()))
    tried = forecast(subject, anatomy, Recipe.of(run))
    assert (tried.outcome, "closure" in tried.reason) == ("not measured", True)


def test_a_ladder_scales_the_run(subject: Subject, anatomy: Anatomy) -> None:
    """The rungs take the same steps; from options they are stacked, so that rounding differs."""
    live = forecast_ladder(subject, anatomy, recipe_of(subject.model, steps=12), [1e-4, 3e-3])
    options = forecast_ladder(subject, anatomy, Recipe(lr=3e-3, steps=12), [1e-4, 3e-3])
    for ours, theirs in zip(live.rungs, options.rungs, strict=True):
        assert (ours.lr, ours.outcome) == (theirs.lr, theirs.outcome)
        assert ours.curve[-1].loss == pytest.approx(theirs.curve[-1].loss, abs=2e-2)


def test_remedies_change_copies_of_the_run(subject: Subject, anatomy: Anatomy) -> None:
    recipe = recipe_of(subject.model, steps=12)
    (optimizer,) = recipe.optimizer.optimizers  # type: ignore[union-attr]
    before = copy.deepcopy(optimizer.state_dict())
    names = ("warm-up", "lower-rate", "clip", "adam-eps", "final-norm", "qk-norm", "small-init")
    rescue = try_remedies(
        subject, anatomy, recipe, forecast(subject, anatomy, recipe), names=names, whatever=True
    )
    options = Recipe(lr=3e-3, steps=12)
    expected = try_remedies(
        subject, anatomy, options, forecast(subject, anatomy, options), names=names, whatever=True
    )
    outcomes = {attempt.name: attempt for attempt in expected.attempts}
    for attempt in rescue.attempts:
        other = outcomes[attempt.name]
        assert (attempt.status, attempt.longer) == (other.status, other.longer), attempt.name
        if attempt.forecast is not None and other.forecast is not None:
            assert attempt.forecast.curve == other.forecast.curve, attempt.name
    assert any(attempt.forecast is not None for attempt in rescue.attempts)
    assert optimizer.state_dict() == before
