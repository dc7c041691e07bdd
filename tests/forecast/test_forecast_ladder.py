"""Tests of a ladder of learning rates against single forecasts: largest rate, warm-up, restored state."""

import dataclasses
import importlib
import math
from typing import Any

import pytest
import torch
from test_forecast import Tiny, anatomy_of, next_token, subject_of
from torch import nn

from normscope.anatomy import read_anatomy
from normscope.errors import UsageError
from normscope.forecast import Forecast, ForecastStep, LadderInterrupted, forecast, forecast_ladder
from normscope.forecast.best_rate import best_rate, candidates
from normscope.forecast.ladder import ahead
from normscope.forecast.one_rate import as_forecast
from normscope.forecast.rule import Decision
from normscope.subjects import load, make_subject
from normscope.train import LoneTrials, Recipe

ladder_module: Any = importlib.import_module("normscope.forecast.ladder")
watch_module: Any = importlib.import_module("normscope.forecast.watch")
kept_module: Any = importlib.import_module("normscope.forecast.kept")
RATES = (1e-2, 1e-3, 1e-3, 4e-4)
STEPS = ladder_module.LADDER_STEPS


def laddered(model: Tiny, rates=RATES, **options):
    return forecast_ladder(subject_of(model), anatomy_of(model), Recipe(**options), rates)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "muon"])
@pytest.mark.parametrize("warmup", [0, 5])
def test_stacked_rungs_are_what_lone_ones_are(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, warmup: int
) -> None:
    model = Tiny(depth=1, dropout=0.0)
    with monkeypatch.context() as patched:
        patched.setattr(kept_module, "_on_cpu", lambda models: False)
        ladder = laddered(model, optimizer=optimizer, warmup=warmup, lr=1e-3)
    assert [rung.lr for rung in ladder.rungs] == [4e-4, 1e-3, 1e-2], "ascending, each once"
    assert all(rung.curve[0].step == 0 for rung in ladder.rungs), "the start is measured once for all"
    for rung, alone in zip(
        ladder.rungs, laddered(model, optimizer=optimizer, warmup=warmup, lr=1e-3).rungs, strict=True
    ):
        assert (rung.outcome, rung.steps, rung.warmup) == (alone.outcome, STEPS, warmup)
        assert [look.step for look in rung.curve] == [look.step for look in alone.curve]
        for ours, theirs in zip(rung.curve, alone.curve, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-3)
            assert ours.diversity == pytest.approx(theirs.diversity, rel=0.02)
            assert ours.gradients == pytest.approx(theirs.gradients, rel=0.02)
            assert ours.recent_loss == (
                None if theirs.recent_loss is None else pytest.approx(theirs.recent_loss, rel=1e-3)
            )
        ours, theirs = rung.curve[-1], alone.curve[-1]
        assert ours.update_ratio == pytest.approx(theirs.update_ratio, rel=0.02)
        assert ours.coherence == pytest.approx(theirs.coherence, abs=0.02)
        assert ours.alignment == pytest.approx(theirs.alignment, abs=0.02)


def test_a_rung_is_trained_and_looked_at_as_a_forecast_is() -> None:
    model = Tiny(depth=1, dropout=0.0)
    for rung in laddered(model, lr=1e-3).rungs:
        alone = forecast(subject_of(model), anatomy_of(model), Recipe(lr=rung.lr, steps=STEPS))
        looks = {look.step: look for look in alone.curve}
        for look in (look for look in rung.curve if look.step in (0, STEPS // 2, STEPS)):
            assert look.loss == pytest.approx(looks[look.step].loss, rel=1e-3)
            assert look.diversity == pytest.approx(looks[look.step].diversity, rel=0.02)


def test_the_best_rates_are_tried_again_for_longer() -> None:
    model, rates, longer = Tiny(depth=1, dropout=0.0), [3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2], 110
    given = (subject_of(model), anatomy_of(model), Recipe(lr=1e-3), rates)
    first, ladder = forecast_ladder(*given), forecast_ladder(*given, refine=longer)
    assert [rung.lr for rung in ladder.rungs] == rates
    again = {rung.lr: rung for rung in ladder.rungs if rung.steps == longer}
    assert again.keys() == {rung.lr for rung in candidates(first.rungs)}
    for lr, rung in again.items():
        alone = forecast(subject_of(model), anatomy_of(model), Recipe(lr=lr, steps=longer))
        looks = {look.step: look for look in alone.curve}
        assert rung.curve[-1].step == longer, "those that have learnt go on: they are compared at their ends"
        assert rung.curve[-1].loss == pytest.approx(looks[longer].loss, rel=1e-3)
        assert rung.curve[-1].recent_loss == pytest.approx(looks[longer].recent_loss, rel=1e-3)
    for short, rung in zip(first.rungs, ladder.rungs, strict=True):
        assert rung.lr in again or rung.curve == short.curve
    assert ladder.best is not None
    assert ladder.best.rate == best_rate(list(again.values())).rate


@pytest.mark.parametrize(("steps", "num"), [(100, 10), (110, 20)])
def test_the_recent_loss_is_the_mean_of_more_losses_in_a_long_trial(
    monkeypatch: pytest.MonkeyPatch, steps: int, num: int
) -> None:
    made = _made(monkeypatch)
    model = Tiny(depth=1)
    found = forecast(subject_of(model), anatomy_of(model), Recipe(lr=1e-3, steps=steps))
    losses = made[0].losses[0]
    for look in found.curve[1:]:
        assert look.recent_loss == pytest.approx(sum(losses[: look.step][-num:]) / min(num, look.step))


def test_without_a_healthy_rate_nothing_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder_module, "candidates", lambda rungs: [])
    assert all(rung.steps == STEPS for rung in _refined().rungs)


def test_an_interrupted_second_trial_leaves_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ladder_module._Ladder.try_all

    def try_all(self, configs, *, brief=False) -> None:
        if configs[0].steps > STEPS:
            self.rungs.append(_with("not measured", configs[0]))
            raise KeyboardInterrupt
        kept(self, configs, brief=brief)

    monkeypatch.setattr(ladder_module._Ladder, "try_all", try_all)
    with pytest.raises(LadderInterrupted) as stop:
        _refined()
    assert [rung.steps for rung in stop.value.ladder.rungs] == [STEPS, STEPS]
    assert all(rung.outcome != "not measured" for rung in stop.value.ladder.rungs)
    assert stop.value.ladder.best == best_rate(stop.value.ladder.rungs), "all rates were tried once"


def _refined():
    model = Tiny(depth=1, dropout=0.0)
    given = (subject_of(model), anatomy_of(model), Recipe(lr=1e-3), [3e-4, 1e-3])
    return forecast_ladder(*given, refine=60)


def test_rungs_take_turns_on_a_cpu_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _made(monkeypatch)
    monkeypatch.setattr(kept_module, "many_trials", None)
    model = Tiny(depth=1)
    size = sum(p.numel() for p in model.parameters())
    for most, parts in ((3 * size, [3]), (2 * size, [2, 1]), (size, [1, 1, 1])):
        monkeypatch.setattr(ladder_module, "MOST_PARAMETERS", most)
        assert len(laddered(model, lr=1e-3).rungs) == 3
        assert [len(trials.models) for trials in made] == parts
        made.clear()


def test_rungs_that_are_not_on_a_cpu_may_be_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "many_trials", lambda models, *others: "stack")
    models, recipes = [nn.Linear(2, 2, device="meta") for _ in range(2)], [Recipe(), Recipe()]
    subject = subject_of(Tiny(depth=1))
    assert kept_module.side_by_side(subject, models, recipes, [None, None]) == "stack"


def _made(monkeypatch: pytest.MonkeyPatch) -> list[LoneTrials]:
    """The trials that are made from now on."""
    made: list[LoneTrials] = []
    kept = watch_module.side_by_side
    monkeypatch.setattr(watch_module, "side_by_side", lambda *given: made.append(kept(*given)) or made[-1])
    return made


def test_the_largest_rate_is_the_largest_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {1e-4: "slow", 3e-4: "trains", 1e-3: "collapses", 3e-3: "trains", 1e-2: "diverges"}
    monkeypatch.setattr(ladder_module._Ladder, "try_all", _said(outcomes))
    ladder = laddered(Tiny(depth=1), outcomes, lr=3e-4)
    assert (ladder.largest_rate, ladder.warmup, ladder.warmup_steps) == (3e-3, "not needed", 0)
    assert laddered(Tiny(depth=1), [1e-4, 1e-3], lr=3e-4).largest_rate is None


def test_rungs_ascend_each_once_and_are_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def try_all(self, configs, *, brief=False) -> None:
        tried.extend((config.lr, config.steps) for config in configs)
        _said(dict.fromkeys(RATES, "trains"))(self, configs)

    monkeypatch.setattr(ladder_module._Ladder, "try_all", try_all)
    laddered(Tiny(depth=1), lr=1e-3, steps=STEPS - 1)
    laddered(Tiny(depth=1), [1e-3], lr=1e-3, steps=STEPS + 1)
    assert tried == [(4e-4, STEPS), (1e-3, STEPS), (1e-2, STEPS), (1e-3, STEPS + 1)]


def test_rungs_of_a_model_in_eval_mode_train_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder_module, "LADDER_STEPS", 2)
    model = Tiny(depth=1, dropout=0.5)
    in_train, in_eval = (laddered(model.train(mode), lr=1e-3, steps=2).rungs for mode in (True, False))
    assert in_train == in_eval


def _with(outcome: str, config: Recipe) -> Forecast:
    return Forecast(outcome, "so", config.optimizer, config.lr, config.warmup, config.steps, 2.4)


def _said(outcomes: dict[float, str]):
    """A replacement for trials that gives each learning rate a set outcome."""

    def try_all(self, configs, *, brief=False) -> None:
        self.rungs.extend(_with(outcomes[config.lr], config) for config in configs)

    return try_all


@pytest.mark.parametrize(
    ("rescued_by", "tried"),
    [
        (1, [36, 18, 9]),
        (10, [36, 18, 9]),
        (36, [36, 18]),
        (37, [36, 72]),
        (100, [36, 72]),
        (None, [36, 72]),
    ],
)
def test_a_wanted_rate_that_fails_is_tried_with_ramps(
    monkeypatch: pytest.MonkeyPatch, rescued_by: int | None, tried: list[int]
) -> None:
    seen: list[int] = []

    def ramped(subject, anatomy, config: Recipe, progress=None) -> Forecast:
        seen.append(config.warmup)
        return _with("trains" if rescued_by and config.warmup >= rescued_by else "collapses", config)

    monkeypatch.setattr(ladder_module._Ladder, "try_all", _said({1e-2: "collapses"}))
    monkeypatch.setattr(ladder_module, "forecast", ramped)
    ladder = laddered(Tiny(depth=1), [1e-2], lr=1e-2)
    assert seen == tried, "shorter ones while they help, a longer one if none does"
    shortest = min((each for each in tried if rescued_by is not None and each >= rescued_by), default=None)
    assert ladder.warmup.startswith("does not help" if shortest is None else f"{shortest} steps")
    assert ladder.warmup_steps == shortest
    assert [ramp.warmup for ramp in ladder.ramps] == tried
    assert [ramp.steps for ramp in ladder.ramps] == [max(STEPS, each + STEPS // 2) for each in tried]
    assert ladder.to_dict()["rungs"][0]["outcome"] == "collapses"
    assert len(ladder.to_dict()["ramps"]) == len(tried)


def test_a_slow_rate_wants_no_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder_module._Ladder, "try_all", _said({1e-5: "slow"}))
    ladder = laddered(Tiny(depth=1), [1e-5], lr=1e-5)
    assert (ladder.warmup, ladder.warmup_steps) == ("not tried: the trial at 1e-05 is slow", None)


def rung_of(lr: float, *losses: float, outcome: str = "trains", step: int = 10) -> Forecast:
    """A rung with a mean loss after every 10 steps."""
    looks = [ForecastStep(0, None, 5.6, {"x": 0.5})]
    for i, loss in enumerate(losses, start=1):
        looks.append(ForecastStep(step * i, loss, loss, {"x": 0.5}, 0.9, alignment=0.1, recent_loss=loss))
    return Forecast(outcome, "so", "adamw", lr, 0, 30, 3.0, tuple(looks), 0.5)


def test_a_larger_rate_is_looked_up_where_it_is_as_far_in_rate_times_steps() -> None:
    def of(rung: Forecast, rungs: list[Forecast]) -> float | None:
        return ahead(rung.lr, rung.curve[-1].recent_loss, rungs)

    low, high = rung_of(1e-4, 5.5, 5.4, 5.3), rung_of(1e-3, 5.2, 4.4, 3.8)
    assert of(low, [low, high]) == pytest.approx(3.8), "step 25 of 30, the middle of the last ten"
    assert of(low, [low, rung_of(1.25e-3, 5.2, 4.4, 3.8)]) == pytest.approx(4.1), "step 20: half way"
    assert of(low, [low, rung_of(9e-4, 5.2, 4.4, 3.8)]) is None, "not as far"
    assert of(low, [low, rung_of(2e-3, 5.2, 4.4, 3.8)]) is None, "in its first steps"
    assert of(low, [low, rung_of(1e-3, 5.2, 6.4, 7.8)]) is None, "too large a rate"
    assert of(low, [rung_of(1.1e-3, 5.0, 4.0, 3.0), high, low]) == pytest.approx(3.8), "the smallest"
    assert of(high, [low, high]) is None
    assert ahead(1e-4, None, [rung_of(1e-3, 5.2, 6.4, 7.8)]) == pytest.approx(7.8), "no loss of its own"
    assert ahead(1e-4, None, [rung_of(2e-3, 5.2, 4.4, 3.8)], 10.0) == pytest.approx(4.6), "step 12.5"


def test_a_slow_rate_is_found_out_by_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def rungs(loss: float):
        def try_all(self, configs, *, brief=False) -> None:
            self.rungs.extend([rung_of(1e-4, 5.5, 5.2, 4.6), rung_of(1e-3, 5.2, 4.5, loss)])

        return try_all

    for loss, outcome in ((3.1, "trains"), (4.5, "slow")):
        monkeypatch.setattr(ladder_module._Ladder, "try_all", rungs(loss))
        ladder = laddered(Tiny(depth=1), [1e-4, 1e-3], lr=1e-3)
        assert [rung.outcome for rung in ladder.rungs] == [outcome, "trains"]
        assert (ladder.rungs[0].score > 0) == (outcome == "trains")
        assert (ladder.rungs[0].certainty > 0.5) == (outcome == "trains")


def by_rate(outcomes: dict[float, Any], tried: list[tuple[float, bool]]):
    """A replacement for trials: losses after each 9 steps by rate; `tried` receives rates and `brief`."""

    def try_all(self, configs, *, brief=False) -> None:
        for config in configs:
            tried.append((config.lr, brief))
            self.rungs.append(rung_of(config.lr, *outcomes[config.lr], step=9))

    return try_all


FALLS = (5.2, 4.8, 4.4, 4.0)


@pytest.mark.parametrize(
    ("losses", "outcomes"),
    [
        ((3.4, 2.6, 2.5, 2.4), ["trains", "trains"]),
        ((5.6, 5.6, 5.6, 5.5), ["slow", "slow"]),
        ((5.6, 4.4, 3.6, 3.3), None),
    ],
)
def test_low_rates_are_decided_by_larger_ones_or_by_half_a_trial(
    monkeypatch: pytest.MonkeyPatch, losses: tuple[float, ...], outcomes: list[str] | None
) -> None:
    """The baseline is 3 nats. The rate 2.5e-3 is after 20 and 25 steps where the low ones are after 250."""
    tried: list[tuple[float, bool]] = []
    by = {2e-4: FALLS, 2.5e-4: FALLS, 2.5e-3: losses, 1e-2: (4.0, 3.5, 3.0, 2.0), 2e-2: (4.4, 3.9, 3.4, 2.4)}
    monkeypatch.setattr(ladder_module._Ladder, "try_all", by_rate(by, tried))
    model = Tiny(depth=1)
    subject = subject_of(model)
    subject.unigram_entropy = 3.0
    ladder = forecast_ladder(subject, anatomy_of(model), Recipe(lr=1e-2), by)
    assert [rung.lr for rung in ladder.rungs] == sorted(by)
    assert tried[:3] == [(2.5e-3, False), (1e-2, False), (2e-2, False)], "the larger ones first"
    assert tried[3:] == ([(2e-4, True), (2.5e-4, True)] if outcomes is None else [])
    if outcomes is not None:
        low = ladder.rungs[:2]
        assert [rung.outcome for rung in low] == outcomes
        assert all(rung.curve == () and rung.reason.startswith("not tried: ") for rung in low)
        assert all((rung.certainty > 0.5) == rung.trains and rung.is_sure for rung in low)


def test_brief_trials_stop_half_way_unless_they_are_hasty() -> None:
    """At 1e-6 the loss stands still. At 2e-3 it falls fast, without being under the entropy of 1 yet."""
    model = Tiny(depth=1)
    subject, anatomy = subject_of(model), anatomy_of(model)
    subject.unigram_entropy = 1.0
    configs = [Recipe(lr=lr, steps=STEPS) for lr in (1e-6, 2e-3)]
    steps = {}
    for brief in (True, False):
        ladder = ladder_module._Ladder(subject, anatomy, lambda step, steps: None, 2)
        ladder.try_all(configs, brief=brief)
        assert [rung.outcome for rung in ladder.rungs] == ["slow", "trains"]
        steps[brief] = [rung.curve[-1].step for rung in ladder.rungs]
        looks = [{look.step: look.coherence is not None for look in rung.curve} for rung in ladder.rungs]
        assert looks[0][STEPS // 2] == looks[1][STEPS // 2] == brief, "gradients decide half-way"
    assert steps[True] == [STEPS // 2, STEPS]
    assert steps[False] == [STEPS, STEPS]
    alone = ladder_module._Ladder(subject, anatomy, lambda step, steps: None, 1)
    alone.try_all(configs[:1], brief=True)
    assert alone.rungs[0].curve[-1].step == STEPS // 2, "also if it is the only one"


def test_an_interrupted_ladder_ascends(monkeypatch: pytest.MonkeyPatch) -> None:
    by = {2.5e-4: (4.2, 3.9), 2.5e-3: (5.6, 4.4, 3.6, 3.3), 1e-2: (4.0, 3.5, 3.0, 2.0)}

    def try_all(self, configs, *, brief=False) -> None:
        self.rungs.extend(rung_of(config.lr, *by[config.lr], step=9) for config in configs)
        if brief:
            raise KeyboardInterrupt

    monkeypatch.setattr(ladder_module._Ladder, "try_all", try_all)
    model = Tiny(depth=1)
    subject = subject_of(model)
    subject.unigram_entropy = 3.0
    with pytest.raises(LadderInterrupted) as stop:
        forecast_ladder(subject, anatomy_of(model), Recipe(lr=1e-2), by)
    assert [rung.lr for rung in stop.value.ladder.rungs] == sorted(by)


def test_an_interrupted_ladder_has_risks_that_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_all(self, configs, *, brief=False) -> None:
        for config, largest in zip(configs, (4000.0, 4.5), strict=True):
            rung = rung_of(config.lr, 4.2, 3.9, step=9)
            last = dataclasses.replace(rung.curve[-1], largest_loss=largest, largest_gradient=1.0)
            self.rungs.append(dataclasses.replace(rung, curve=(*rung.curve[:-1], last), divergence=0.5))
        raise KeyboardInterrupt

    monkeypatch.setattr(ladder_module._Ladder, "try_all", try_all)
    model = Tiny(depth=1)
    with pytest.raises(LadderInterrupted) as stop:
        forecast_ladder(subject_of(model), anatomy_of(model), Recipe(lr=1e-2), [1e-3, 1e-2])
    small, large = stop.value.ladder.rungs
    assert large.divergence == small.divergence != 0.5


def test_ids_that_look_random_are_undecided_on_a_ladder_too() -> None:
    """Only a failure would decide; larger rates do not change that."""
    generator = torch.Generator().manual_seed(0)
    model = load("nn:decoder,scheme=pre,depth=1,width=16,heads=2").model
    batches = [torch.randint(64, (8, 24), generator=generator) for _ in range(60)]
    subject = make_subject(model, batches)
    ladder = forecast_ladder(subject, read_anatomy(subject), Recipe(lr=1e-3), [1e-3, 3e-3])
    assert [rung.outcome for rung in ladder.rungs] == ["undecided"] * 2
    assert all("look random" in rung.reason for rung in ladder.rungs)
    assert ladder.best is not None
    assert ladder.best.rate is None, "there is no loss to beat"
    trained, anatomy = Decision("trains", "so", score=1.0), read_anatomy(subject)
    assert as_forecast(trained, subject, anatomy, Recipe(), ()).outcome == "undecided"
    subject.best_constant = 0.5  # ids in and a number out: there is one after all
    assert as_forecast(trained, subject, anatomy, Recipe(), ()).outcome == "trains"


@pytest.mark.parametrize("why", ["the input hides the targets", "a warm-up"])
def test_no_larger_rate_decides_where_progress_is_not_rate_times_steps(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    tried: list[tuple[float, bool]] = []
    by = {2.5e-4: FALLS, 2.5e-3: (3.4, 2.6, 2.5, 2.4), 1e-2: (4.0, 3.5, 3.0, 2.0)}
    monkeypatch.setattr(ladder_module._Ladder, "try_all", by_rate(by, tried))
    monkeypatch.setattr(ladder_module, "hides_targets", lambda batch: why == "the input hides the targets")
    model = Tiny(depth=1)
    subject = subject_of(model)
    subject.unigram_entropy = 3.0
    config = Recipe(lr=1e-2, warmup=5 * (why == "a warm-up"))
    forecast_ladder(subject, anatomy_of(model), config, by)
    assert (2.5e-4, True) in tried


def test_low_rates_are_tried_in_full_while_the_best_one_is_the_lowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[float, bool]] = []
    above = {3e-5: 0.0, 6e-5: 0.0, 1e-4: 0.5, 2e-4: 0.0, 4e-4: 0.1, 1e-2: 0.2, 2e-2: 0.3}
    by = {lr: tuple(loss + more for loss in FALLS) for lr, more in above.items()}
    monkeypatch.setattr(ladder_module._Ladder, "try_all", by_rate(by, tried))
    laddered(Tiny(depth=1), by, lr=1e-2)
    assert tried[:2] == [(1e-2, False), (2e-2, False)]
    assert tried[2:4] == [(2e-4, False), (4e-4, False)], "1e-2 is the best so far, and the lowest"
    assert tried[4:6] == [(6e-5, False), (1e-4, False)], "now 2e-4 is"
    assert tried[6:] == [(3e-5, False)], "and then 6e-5"


def test_a_failure_stays_one_whatever_a_larger_rate_says() -> None:
    low, high = rung_of(1e-4, 5.5, 5.2, 4.6, outcome="collapses"), rung_of(1e-3, 5.2, 4.5, 3.1)
    assert ahead(low.lr, 4.6, [low, high]) is not None
    assert ladder_module.compared(low, [low, high]) is low
    stuck = dataclasses.replace(low, outcome="plateau")
    assert ladder_module.compared(stuck, [low, high]) is stuck
    noise = dataclasses.replace(low, outcome="undecided", unigram_entropy=None)
    assert ladder_module.compared(noise, [noise, high]) is noise, "no loss to beat"
    values = dataclasses.replace(stuck, tokens=False)
    assert ladder_module.compared(values, [low, high]).outcome != "plateau", "its pull is judged again"


@pytest.mark.parametrize(
    "rates", [[], [0.0], [1e-3, -1.0], [math.nan], [math.inf], [1.0, "1e-3"], [True], [[1e-3]]]
)
def test_rates_that_are_no_rates_are_refused(rates: list[Any]) -> None:
    with pytest.raises(UsageError, match="positive number"):
        laddered(Tiny(depth=1), rates)


def test_the_model_and_the_generators_stay_as_they_were() -> None:
    model = Tiny(depth=1).eval()
    model.encoder.layers[0].train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    laddered(model, lr=1e-2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert modes == [m.training for m in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


class Uncopyable(Tiny):
    def __deepcopy__(self, memo: object) -> "Uncopyable":
        raise TypeError("a handle")


@pytest.mark.parametrize("kind", ["cannot be copied", "holds on to the original", "cannot be stepped"])
def test_what_cannot_be_stacked_is_tried_one_by_one(kind: str) -> None:
    model = (Uncopyable if kind == "cannot be copied" else Tiny)(depth=1, dropout=0.0)
    subject = subject_of(model)
    if kind == "holds on to the original":
        subject.loss_fn = lambda output, batch: next_token(model(batch), batch)
    if kind == "cannot be stepped":
        subject.loss_fn = lambda output, batch: next_token(output.detach(), batch)
    before = model.head.weight.detach().clone()
    ladder = forecast_ladder(subject, anatomy_of(model), Recipe(lr=1e-2), [1e-3, 1e-2])
    assert [rung.lr for rung in ladder.rungs] == [1e-3, 1e-2]
    for rung in ladder.rungs:
        if kind == "cannot be stepped":
            assert (rung.outcome, "does not require grad" in rung.reason) == ("not measured", True)
        else:
            config = Recipe(lr=rung.lr, steps=STEPS)
            assert rung == forecast(subject, anatomy_of(model), config)
            assert rung.curve[-1].loss < rung.curve[0].loss
    assert torch.equal(model.head.weight, before)


def test_without_a_loss_or_steps_nothing_is_measured() -> None:
    model = Tiny(depth=1)
    ladder = forecast_ladder(subject_of(model, None), anatomy_of(model), Recipe(), [1e-3, 1e-2])
    assert [rung.outcome for rung in ladder.rungs] == ["not measured"] * 2
    assert (ladder.largest_rate, ladder.warmup_steps) == (None, None)
    assert laddered(model, steps=0).rungs[0].reason == "no steps were requested"


@pytest.mark.parametrize("stacked", [True, False])
def test_an_interrupt_hands_over_the_rungs_that_were_tried(
    monkeypatch: pytest.MonkeyPatch, stacked: bool
) -> None:
    model = Tiny(depth=1)
    if not stacked:
        monkeypatch.setattr(ladder_module, "MOST_PARAMETERS", 1)
    told = []

    def interrupt(step: int, steps: int) -> None:
        told.append((step, steps))
        if step >= 0.6 * steps:
            raise KeyboardInterrupt

    with pytest.raises(LadderInterrupted) as stop:
        forecast_ladder(subject_of(model), anatomy_of(model), Recipe(), [1e-3, 1e-2], interrupt)
    rungs = stop.value.ladder.rungs
    assert told == sorted(told)
    if stacked:
        assert [rung.outcome for rung in rungs] == ["not measured"] * 2
        assert rungs[0].curve[-1].step >= 15, "what was seen is kept"
    else:
        assert [rung.outcome == "not measured" for rung in rungs] == [False, True]
    assert stop.value.ladder.warmup.startswith("not tried: interrupted after")


def test_a_lost_rung_stops_early_and_the_others_go_on() -> None:
    class Merged(Tiny):
        def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
            self.embedding.weight.data.sub_(self.embedding.weight.data.mean(0)).mul_(0).add_(1.0)
            return super().forward(ids_BT)

    model = Merged(depth=1)
    ladder = laddered(model, lr=1e-3)
    assert [(rung.outcome, rung.curve[-1].step) for rung in ladder.rungs] == [("collapses", STEPS // 2)] * 3
    healthy = laddered(Tiny(depth=1), [1e-3, 1e9], optimizer="sgd", lr=1e-3)
    assert [rung.curve[-1].step >= STEPS for rung in healthy.rungs] == [True, False]
    assert healthy.rungs[1].outcome == "diverges"
