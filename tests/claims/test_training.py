"""Shared tools of trained claims: settings, what is read off a loss curve, the plateau of a seed."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from planted_runs import Planted, planted

from normscope.claims.setup import Setup
from normscope.claims.training import (
    NEVER,
    Outcome,
    Setting,
    best,
    curves,
    fewest_steps,
    ladder,
    subjects,
    train_models,
    trained,
    unigram_losses,
)

TINY = Setting(scheme="pre", depth=1, width=16, lr=1e-2, steps=40)


def outcome(end: float, seed: int = 0, steps: int = 300) -> Outcome:
    config = Setting(scheme="pre", depth=4, steps=steps).config(seed)
    result = planted(config, end)
    return Outcome(result.losses, unigram_losses(None, seed, steps), result.unigram_entropy)


def test_a_recipe_is_a_model_spec_and_a_trial():
    setting = Setting(
        scheme="post", depth=6, init="normal", options="norm=rmsnorm", lr=1e-3, warmup=7, clip=1.0
    )
    config = setting.config(3)
    assert config.model == "nn:decoder,scheme=post,depth=6,width=32,heads=2,init=normal,norm=rmsnorm"
    assert (config.trial.seed, config.trial.lr, config.trial.warmup, config.trial.clip) == (3, 1e-3, 7, 1.0)
    assert str(setting) == "post from normal weights, 6 blocks, rate 0.001, warm-up 7, clipped at 1"


@pytest.mark.parametrize("end", [0.0, -0.05, -0.3, 0.5])
def test_the_end_of_a_run_is_measured_from_the_byte_frequencies_on_its_own_batches(end):
    for seed in (0, 4):  # whose last batches differ by 0.1 nats
        assert outcome(end, seed).excess == pytest.approx(end, abs=1e-4)
        assert outcome(end, seed).trains == (end <= -0.1)


def test_a_run_that_flew_off_ends_at_infinity():
    flown = Outcome((5.5, math.nan), unigram_losses(None, 0, 2), 3.16)
    assert flown.final == math.inf
    assert not flown.trains


def test_byte_frequencies_alone_reach_the_entropy_of_the_text():
    losses = torch.tensor(unigram_losses(None, 0, 300))
    entropy = TINY.config(0).subject().unigram_entropy
    assert float(losses.mean()) == pytest.approx(entropy, abs=0.05)


def test_byte_frequencies_on_the_very_batches_that_are_trained_on():
    """A model whose output is its bias, the log frequencies, loses the same."""
    subject = replace(TINY, options="output_bias=unigram").config(2).subject()
    with torch.no_grad():
        subject.model.head.weight.zero_()
        losses = [float(subject.loss(batch)) for batch in itertools.islice(subject.batches(), 5)]
    assert unigram_losses(None, 2, 5) == pytest.approx(losses, rel=1e-3)


def test_steps_to_a_loss():
    run = outcome(-0.5)
    assert run.steps_to(0.0) < run.steps_to(-0.3) < 300
    assert run.steps_to(-0.6) == NEVER
    assert run.progress[int(run.steps_to(-0.3)) - 20] <= -0.3


def test_the_best_recipe_and_the_fastest():
    low, high = ladder(TINY, (1e-3, 3e-3))
    outcomes = {low: {0: outcome(-0.2)}, high: {0: outcome(-0.5)}}
    assert best(outcomes, 0)[0] == high
    assert fewest_steps(outcomes, 0, -0.3) == outcome(-0.5).steps_to(-0.3)
    assert fewest_steps(outcomes, 0, -0.9) == NEVER


def test_a_curve_has_a_point_for_every_tenth_step():
    (line,) = curves("a plot", {"pre": {0: outcome(-0.5), 1: outcome(-0.5, 1)}}).lines
    assert line.x[:2] == [20, 30]
    assert line.y[-1] == pytest.approx(-0.5, abs=0.01)
    assert all(low <= y <= high for low, y, high in zip(line.low, line.y, line.high, strict=True))


def test_recipes_are_trained_once_a_seed_and_come_back_by_seed():
    outcomes = trained(
        Planted(seeds=(0, 1), plan=lambda config: -0.1 * (1 + config.trial.seed)), [TINY, TINY]
    )
    assert list(outcomes) == [TINY]
    assert outcomes[TINY][1].excess < outcomes[TINY][0].excess


def test_a_tiny_training_both_ways():
    """Models trained to be looked into lose what the same setting loses."""
    setup = Setup(seeds=(0, 1))
    models = subjects(setup, TINY)
    losses = train_models(models, TINY)
    outcomes = trained(setup, [TINY])[TINY]
    for seed in setup.seeds:
        assert losses[seed] == pytest.approx(list(outcomes[seed].losses), rel=1e-3)
        assert models[seed].loss().item() < losses[seed][0] - 1
