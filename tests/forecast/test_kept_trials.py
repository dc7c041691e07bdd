"""Tests of trials that go on: they are what a trial from the start is, and take its steps only once."""

import copy
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_forecast import Tiny, anatomy_of, counting_batches, subject_of
from test_forecast_ladder import Uncopyable
from torch import nn

from normscope.forecast import ForecastStep, forecast_ladder
from normscope.forecast.kept import KeptTrial, is_room_for
from normscope.forecast.rule import Decision
from normscope.forecast.watch import train_copies
from normscope.subjects import Subject, untouched
from normscope.subjects.without_input import LossesWithoutInput
from normscope.train import LoneTrials, Recipe, Trial, in_flushed_thread, lone_trial

kept_module: Any = importlib.import_module("normscope.forecast.kept")
watch_module: Any = importlib.import_module("normscope.forecast.watch")
ladder_module: Any = importlib.import_module("normscope.forecast.ladder")
RATES = (1e-3, 3e-3)


def trained(
    subject: Subject,
    steps: int,
    kept: dict[float, KeptTrial] | None,
    rates: Sequence[float] = RATES,
    **options,
) -> tuple[list[Decision], list[list[ForecastStep]]]:
    configs = [Recipe(lr=lr, steps=steps, **options) for lr in rates]
    curves: list[list[ForecastStep]] = [[] for _ in configs]
    train = functools.partial(
        train_copies,
        subject,
        anatomy_of(subject.model),
        configs,
        curves,
        lambda step, steps: None,
        sparse=True,
        kept=kept,
    )
    with untouched(subject.model):
        decisions = in_flushed_thread(train)
    assert decisions is not None
    return decisions, curves


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        ((16, 24, 40), {}),
        ((10, 20), {"optimizer": "sgd", "clip": 0.1}),
        ((10, 20), {"optimizer": "muon", "warmup": 12}),
        ((10, 20), {"precision": "bfloat16", "accumulation": 2}),
    ],
    ids=str,
)
def test_a_trial_that_goes_on_is_one_from_the_start(parts: tuple[int, ...], options: dict[str, Any]) -> None:
    """To the bit, in each loss and figure, wherever both are measured."""
    kept: dict[float, KeptTrial] = {}
    subject = subject_of(Tiny(depth=1, dropout=0.0))
    for steps in parts:
        decisions, curves = trained(subject, steps, kept, **options)
    whole, expected = trained(subject, parts[-1], None, **options)
    assert decisions == whole
    assert kept.keys() == set(RATES)
    for ours, theirs in zip(curves, expected, strict=True):
        known = {each.step: each for each in ours}
        assert all(known[each.step] == each for each in theirs if each.step in known)
        assert ours[-1].step == theirs[-1].step
        assert known.keys() >= {each.step for each in theirs if each.step > parts[-2]}
        assert [each.step for each in ours] == sorted(known)


def test_trials_that_go_on_may_stand_beside_new_ones() -> None:
    """The new one starts from step 0; the others wait for it."""
    kept: dict[float, KeptTrial] = {}
    subject = subject_of(Tiny(depth=1, dropout=0.0))
    trained(subject, 16, kept, RATES[1:])
    decisions, curves = trained(subject, 40, kept)
    whole, expected = trained(subject, 40, None)
    assert decisions == whole
    assert [each.step for each in curves[0]] == [each.step for each in expected[0]]
    assert [each.step for each in curves[1]] == [0, 4, 6, 8, 16, 20, 30, 40], "none while it waits"
    assert [curve[-1] for curve in curves] == [curve[-1] for curve in expected]


def test_trials_of_several_calls_know_the_losses_to_beat_of_all_their_batches() -> None:
    """The second one goes on with the first, which began in another call, and then alone."""
    kept: dict[float, KeptTrial] = {}
    subject = subject_of(Tiny(depth=1, dropout=0.0))
    numbers = itertools.count()
    found = LossesWithoutInput(lambda batch: float(next(numbers)))
    subject = dataclasses.replace(subject, without_input=found)
    for rate in RATES:
        trained(subject, 16, kept, [rate])
    curves = trained(subject, 30, kept)[1] + trained(subject, 40, kept, RATES[1:])[1]
    for curve in curves:
        for each in curve[1:]:
            seen = range(max(0, each.step - 10), each.step)
            assert each.recent_baseline == pytest.approx(sum(seen) / len(seen))
    assert curves[-1][-1].step == 40


def test_measurements_are_those_of_a_longer_trial() -> None:
    """A trial over 100 steps has means of 20 losses, and no gradients compared before its end."""
    look = ForecastStep(
        step=30, train_loss=1.0, loss=1.0, diversity={}, recent_loss=7.0, coherence=0.5, alignment=0.5
    )
    trial, config = SimpleNamespace(losses=[*range(36)]), Recipe()
    found = LossesWithoutInput(lambda batch: batch + 0.5)
    list(found.seen(iter(range(36))))
    subject = dataclasses.replace(subject_of(Tiny(depth=1)), without_input=found)
    kept = KeptTrial(trial, (dataclasses.replace(look, step=0), look), torch.get_rng_state())
    for steps, mean in ((100, 24.5), (140, 19.5)):
        start, later = kept.measurements(subject, dataclasses.replace(config, steps=steps))
        assert start.recent_loss is None
        assert start.recent_baseline is None
        expected = dataclasses.replace(look, recent_loss=mean, recent_baseline=mean + 0.5)
        assert later == dataclasses.replace(expected, coherence=None, alignment=None)


def test_dropout_goes_on_with_new_masks() -> None:
    """The second part has the random numbers that a trial from the start would have, if it is alone."""
    subject = subject_of(Tiny(depth=1, dropout=0.5))
    kept: dict[float, KeptTrial] = {}
    trained(subject, 20, kept, RATES[:1])
    state = kept[RATES[0]].random
    trained(subject, 40, kept, RATES[:1])
    again: dict[float, KeptTrial] = {}
    trained(subject, 20, again, RATES[:1])
    going = again[RATES[0]].trial
    with torch.random.fork_rng():
        torch.set_rng_state(state)
        expected = [going.advance() for _ in range(5)]
    assert kept[RATES[0]].trial.losses[20:25] == pytest.approx(expected)


def test_a_ladder_takes_each_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Trial] = []
    advance = Trial.advance
    monkeypatch.setattr(Trial, "advance", lambda self: taken.append(self) or advance(self))
    monkeypatch.setattr(ladder_module._Ladder, "test_range", lambda self, config: None)
    model = Tiny(depth=1, dropout=0.0)
    given = (subject_of(model), anatomy_of(model), Recipe(lr=1e-3), [3e-4, 1e-3, 3e-3])
    ladder = forecast_ladder(*given, refine=60)
    assert {rung.steps for rung in ladder.rungs} == {60}
    assert len(taken) == sum(rung.last_step for rung in ladder.rungs)
    taken.clear()
    monkeypatch.setattr(kept_module, "available_bytes", lambda device: 0)
    again = forecast_ladder(*given, refine=60)
    assert len(taken) >= sum(rung.last_step for rung in again.rungs) + 3 * 18, "without room they start anew"
    assert [rung.outcome for rung in again.rungs] == [rung.outcome for rung in ladder.rungs]
    assert again.best.rate == pytest.approx(ladder.best.rate, rel=0.02), "half is measured at 26, or at 30"


def test_a_ladder_without_longer_trials_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(watch_module, "kept_trials", lambda *given: seen.append(given) or {})
    model = Tiny(depth=1)
    given = (subject_of(model), anatomy_of(model), Recipe(lr=1e-3), [3e-4, 1e-3])
    forecast_ladder(*given)
    assert not seen
    forecast_ladder(*given, refine=60)
    assert seen


def test_what_diverged_or_was_trained_in_place_is_not_kept() -> None:
    kept: dict[float, KeptTrial] = {}
    subject = subject_of(Tiny(depth=1, dropout=0.0))
    decisions, _ = trained(subject, 16, kept, (1e-3, 1e30), optimizer="sgd")
    assert decisions[1].outcome == "diverges"
    assert list(kept) == [1e-3]
    kept.clear()
    model = Uncopyable(depth=1)
    trained(subject_of(model), 16, kept, (1e-3,))
    assert not kept, "its weights were restored"


def test_room_is_for_five_copies_a_trial_in_a_quarter_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(10, 10, bias=False)  # 400 bytes
    monkeypatch.setattr(kept_module, "available_bytes", lambda device: 4 * 3 * 5 * 400)
    assert is_room_for(3, model)
    assert not is_room_for(4, model)
    assert not is_room_for(1, model.to("meta"))
    monkeypatch.setattr(kept_module, "available_bytes", lambda device: None)
    assert not is_room_for(1, nn.Linear(1, 1))


def test_trials_ahead_wait_and_repeat_their_losses() -> None:
    def made() -> list[Trial]:
        torch.manual_seed(0)
        models = [Tiny(depth=1, dropout=0.0)]
        models.append(copy.deepcopy(models[0]))
        subject = subject_of(models[0])
        return [
            lone_trial(model, counting_batches(k), lambda m, batch: subject.loss(batch, m), Recipe(lr=1e-3))
            for k, model in enumerate(models)
        ]

    ahead, alone = made(), made()
    for _ in range(3):
        ahead[1].advance()
    trials = LoneTrials.of(ahead)
    ways = []
    for _ in range(5):
        ways.append([trials.is_ahead(k) for k in trials.live])
        trials.advance()
    expected = [[trial.advance() for _ in range(5)] for trial in alone]
    assert trials.losses == expected
    assert [trial.step for trial in ahead] == [5, 5]
    assert ways == [[False, step < 3] for step in range(5)]
    assert trials.gradient_norms == [trial.gradient_norms for trial in alone]
