"""Tests of remedies tried on the intended run: they are ranked, and no result is lost."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from remedy_subjects import CONFIG, fingerprint, given, same

from normscope.errors import BatchesError, UsageError
from normscope.forecast import Forecast, ForecastStep
from normscope.rules.remedies import REMEDIES, RemediesInterrupted, Rescue, try_remedies, trying
from normscope.subjects.feed import Replay
from normscope.train import CRITERION_STEPS, Recipe

SETTINGS = ("warm-up", "lower-rate", "clip", "adam-eps")
Say = Callable[[Recipe], Forecast]


def said(outcome: str, score: float | None = None, certainty: float | None = None, **rest) -> Forecast:
    """A forecast; its certainty is that of its score unless given."""
    if certainty is None and score is not None:
        certainty = 1 / (1 + math.exp(-score))
    made = Forecast(outcome, "because", "adamw", 1e-2, 0, 4, 3.0, (), score)  # type: ignore[arg-type]
    return dataclasses.replace(made, certainty=certainty, **rest)


def at_loss(loss: float, outcome: str = "trains", certainty: float = 0.6) -> Forecast:
    """A forecast whose trial ends at this loss; the entropy is 3."""
    return said(outcome, 1.0, certainty, curve=(ForecastStep(20, loss, loss, {}, recent_loss=loss),))


HEALTHY = {
    "trains": "nothing to rescue: the forecast of the run as it is says trains",
    "slow": "nothing to rescue: the forecast of the run as it is says slow",
    "undecided": "nothing was tried: whether the run trains is undecided, so that no remedy can be judged",
    "not measured": "no forecast (because)",
}
FAILS = said("collapses", -4.0)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Say], list[Recipe]]:
    """A function that replaces `forecast` and returns the list of settings it was called with."""
    asked: list[Recipe] = []

    def install(say: Say) -> list[Recipe]:
        def forecast(subject, anatomy, config, progress=None):
            asked.append(config)
            if progress is not None:
                progress(0, config.steps)
            return dataclasses.replace(say(config), steps=config.steps)

        monkeypatch.setattr(trying, "forecast", forecast)
        return asked

    return install


def names(rescue: Rescue) -> list[str]:
    return [attempt.name for attempt in rescue.attempts]


def tried(*remedies: str, before: Forecast = FAILS, **options) -> Rescue:
    return try_remedies(*given("nn-post"), CONFIG, before, names=remedies or SETTINGS, **options)


def by_setting(config: Recipe) -> Forecast:
    if config.clip:
        return said("trains", 5.0)
    if config.lr < CONFIG.lr:
        return said("trains", 0.2)
    return said("slow", 1.0) if config.eps else said("collapses", -4.0)


def test_the_surest_comes_first_then_slow_then_failing_then_what_does_not_apply(stand_in) -> None:
    stand_in(by_setting)
    rescue = tried(*SETTINGS, "final-norm")
    assert names(rescue) == ["clip", "lower-rate", "adam-eps", "warm-up", "final-norm"]
    assert [a.status for a in rescue.attempts] == ["rescues", "rescues", "slow", "fails", "not applicable"]
    assert rescue.best is rescue.attempts[0]


def test_of_two_that_are_as_sure_the_smaller_change_comes_first(stand_in) -> None:
    stand_in(lambda config: said("trains", 1.0))
    assert names(tried("qk-norm", "lower-rate")) == ["lower-rate", "qk-norm"]


def test_nothing_is_tried_on_a_run_that_does_not_fail(stand_in) -> None:
    for outcome, words in HEALTHY.items():
        asked = stand_in(by_setting)
        rescue = tried(before=said(outcome))
        assert (rescue.attempts, asked) == ((), [])
        assert words in rescue.reason
        assert rescue.best is None


def test_a_run_that_needs_warm_up_is_tried(stand_in) -> None:
    stand_in(by_setting)
    assert len(tried(before=said("needs-warmup")).attempts) == len(SETTINGS)


def test_a_long_warm_up_is_compressed_into_the_trial(stand_in) -> None:
    asked = stand_in(by_setting)
    tried("warm-up")
    assert [(c.warmup, c.steps) for c in asked] == [(CONFIG.steps, CONFIG.steps * 3 // 2)]


def test_pairs_are_tried_where_nothing_helps_alone_and_only_there(stand_in, monkeypatch) -> None:
    few = {name: REMEDIES[name] for name in ("warm-up", "small-init")}
    monkeypatch.setattr(trying, "REMEDIES", few)
    monkeypatch.setattr(trying, "COMBINED", [("small-init", "warm-up")])
    stand_in(lambda config: said("trains", 1.0) if config.warmup else FAILS)
    assert "small-init + warm-up" not in names(try_remedies(*given("nn-post"), CONFIG, FAILS))
    stand_in(lambda config: FAILS)
    rescue = try_remedies(*given("nn-post"), CONFIG, FAILS)
    assert sorted(names(rescue)) == ["small-init", "small-init + warm-up", "warm-up"]
    assert rescue.best is None


def test_ctrl_c_keeps_what_was_tried(stand_in) -> None:
    def say(config: Recipe) -> Forecast:
        if config.clip:
            raise KeyboardInterrupt
        return by_setting(config)

    stand_in(say)
    with pytest.raises(RemediesInterrupted) as caught:
        tried()
    assert names(caught.value.rescue) == ["lower-rate", "warm-up"]
    assert caught.value.rescue.reason == "interrupted after 2 of 4 remedies"


@pytest.mark.parametrize(
    ("outcome", "place"),
    [
        ("trains", "after all 2 remedies, while the best was tried over a longer trial"),
        ("fails", "after 2 of 3"),
    ],
)
def test_ctrl_c_counts_longer_trials_and_remedies_in_combination(
    stand_in, monkeypatch, outcome: str, place: str
) -> None:
    few = {name: REMEDIES[name] for name in ("warm-up", "small-init")}
    monkeypatch.setattr(trying, "REMEDIES", few)
    monkeypatch.setattr(trying, "COMBINED", [("small-init", "warm-up")])

    def say(config: Recipe) -> Forecast:
        if len(asked) > len(few):
            raise KeyboardInterrupt
        return said("trains", 1.0) if outcome == "trains" else FAILS

    asked = stand_in(say)
    with pytest.raises(RemediesInterrupted) as caught:
        try_remedies(*given("nn-post"), CONFIG, FAILS)
    assert f"interrupted {place}" in caught.value.rescue.reason


def test_progress_names_the_remedy_and_its_place(stand_in) -> None:
    stand_in(by_setting)
    seen: list[tuple[str, int, int]] = []
    tried("warm-up", "clip", progress=lambda *said: seen.append(said))
    assert seen[0] == ("remedy warm-up", 0, 2)
    assert (f"remedy clip, step 0 of {CONFIG.steps}", 1, 2) in seen
    longer = trying.LONGER * CONFIG.steps
    assert (f"clip, longer, step 0 of {longer}", 0, trying.MOST_LONGER) in seen
    assert seen[-1] == (f"clip, a whole run, step 0 of {CRITERION_STEPS}", 0, trying.MOST_WHOLE)


def test_what_does_not_hold_over_a_longer_trial_gives_way_to_what_does(stand_in) -> None:
    def say(config: Recipe) -> Forecast:
        if config.clip:  # surest in the short trial, lost in the longer
            return said("trains", 6.0) if config.steps == CONFIG.steps else FAILS
        return by_setting(config)

    asked = stand_in(say)
    rescue = tried()
    assert names(rescue)[0] == "lower-rate"
    held = {attempt.name: (attempt.status, attempt.longer) for attempt in rescue.attempts}
    assert held["clip"] == ("fails", True)
    assert held["lower-rate"] == ("rescues", True)
    assert held["warm-up"] == ("fails", False)
    assert sum(config.steps == trying.LONGER * CONFIG.steps for config in asked) == 2


def test_what_a_trial_flatters_has_to_be_surer(stand_in) -> None:
    score = 1.0
    stand_in(lambda config: said("trains", score) if config.clip or config.lr < CONFIG.lr else FAILS)
    assert tried("clip", "lower-rate").best.names == ("lower-rate",)


def test_a_probability_decides_not_the_score(stand_in) -> None:
    sure = {None: said("trains", 2.0, 0.7), 1e-6: said("trains", 1.0, 0.97)}
    stand_in(lambda config: sure[config.eps])
    assert names(tried("much-lower-rate", "pre-ln", "adam-eps"))[-1] == "adam-eps"  # a trial flatters ε
    sure[1e-6] = said("trains", 1.0, 0.999)
    assert names(tried("much-lower-rate", "pre-ln", "adam-eps"))[0] == "adam-eps"


def test_longer_trials_go_on_until_one_has_learnt(stand_in) -> None:
    far = trying.LONGER * CONFIG.steps
    rates = [CONFIG.lr / 3, CONFIG.lr / 10, CONFIG.lr / 30]

    def say(config: Recipe) -> Forecast:
        if config.clip:
            return FAILS
        certainties = dict(zip(rates, (0.97, 0.9, 0.7), strict=True))
        loss = 2.95 if config.lr == rates[0] or config.steps < far else 2.5
        return at_loss(loss, certainty=certainties[config.lr])

    asked = stand_in(say)
    rescue = tried("lower-rate", "much-lower-rate", "far-lower-rate", "clip")
    assert names(rescue) == ["much-lower-rate", "lower-rate", "far-lower-rate", "clip"]
    assert [attempt.has_learnt for attempt in rescue.attempts] == [True, False, False, False]
    assert [config.lr for config in asked if config.steps == far] == rates[:2]


@pytest.mark.parametrize("last", ["loss", "train_loss", "recent_loss"])
def test_it_has_learnt_only_if_all_last_losses_say_so(last: str) -> None:
    step = dataclasses.replace(at_loss(2.85).curve[-1], **{last: 2.95})
    attempt = trying.Attempt(("clip",), said("trains", 1.0, curve=(step,)), "", 0.0)
    assert not attempt.has_learnt
    assert dataclasses.replace(attempt, forecast=at_loss(2.85)).has_learnt
    assert not dataclasses.replace(attempt, forecast=at_loss(2.85, "collapses")).has_learnt


def test_of_a_loss_without_nats_it_has_learnt_a_tenth() -> None:
    def learnt(loss: float) -> bool:
        found = dataclasses.replace(at_loss(loss), unigram_entropy=None, best_constant=20.0)
        return trying.Attempt(("clip",), found, "", 0.0).has_learnt

    assert not learnt(18.5)
    assert learnt(17.5)


RATES = {"lower-rate": 3, "much-lower-rate": 10, "far-lower-rate": 30}


@pytest.mark.parametrize(
    ("learns", "order", "whole"),
    [
        ("much-lower-rate", ["much-lower-rate", "far-lower-rate", "lower-rate"], 2),
        ("far-lower-rate", ["far-lower-rate", "lower-rate", "much-lower-rate"], 3),
        ("", ["lower-rate", "much-lower-rate", "far-lower-rate"], 3),  # nothing rescues
    ],
)
def test_a_whole_run_decides_where_none_has_learnt(
    stand_in, learns: str, order: list[str], whole: int
) -> None:
    """Lower rates are the surer the higher they are, and only a whole run shows which of them learns."""
    divisors = dict(zip((3, 10, 30), (0.97, 0.9, 0.7), strict=True))

    def say(config: Recipe) -> Forecast:
        divisor = round(CONFIG.lr / config.lr)
        if config.steps < CRITERION_STEPS:
            return at_loss(2.95, certainty=divisors[divisor])
        return at_loss(2.5, certainty=0.99) if divisor == RATES.get(learns) else said("slow", -1.0, 0.01)

    asked = stand_in(say)
    rescue = tried(*RATES)
    assert names(rescue) == order
    assert (rescue.best is not None) == bool(learns)
    assert sum(config.steps >= CRITERION_STEPS for config in asked) == whole


def test_no_whole_run_is_made_where_a_longer_trial_has_learnt_or_nothing_is_open(stand_in) -> None:
    for answer in (at_loss(2.5), FAILS):
        asked = stand_in(lambda config, answer=answer: answer)
        tried("lower-rate", "clip")
        assert all(config.steps < CRITERION_STEPS for config in asked)


@pytest.mark.parametrize(("num", "whole"), [(CRITERION_STEPS - 1, False), (CRITERION_STEPS, True)])
def test_few_batches_of_the_users_get_no_whole_run(stand_in, num: int, whole: bool) -> None:
    asked = stand_in(lambda config: at_loss(2.95))
    subject, anatomy = given("nn-post")
    batches = list(itertools.islice(subject.batches(), num))
    own = dataclasses.replace(subject, batches=lambda: itertools.cycle(batches), has_own_batches=True)
    try_remedies(own, anatomy, CONFIG, FAILS, names=("lower-rate",))
    assert any(config.steps >= CRITERION_STEPS for config in asked) == whole
    unknown = dataclasses.replace(subject, unigram_entropy=None)
    asked.clear()
    try_remedies(unknown, anatomy, CONFIG, FAILS, names=("lower-rate",))
    assert all(config.steps < CRITERION_STEPS for config in asked), (
        "without a loss to beat it decides nothing"
    )


def test_batches_that_break_off_before_a_whole_run_are_an_error(stand_in) -> None:
    """The batches of a whole run are looked at before it."""
    subject, anatomy = given("nn-post")

    def broken() -> Iterator[Any]:
        yield from itertools.islice(subject.batches(), 100)
        raise OSError("disk gone")

    stand_in(lambda config: at_loss(2.95))
    own = dataclasses.replace(subject, batches=Replay(broken()), has_own_batches=True)
    with pytest.raises(BatchesError, match=r"^batch 101 of the batches raised OSError: disk gone:"):
        try_remedies(own, anatomy, CONFIG, FAILS, names=("lower-rate",))


def test_whole_runs_are_few(stand_in, monkeypatch) -> None:
    monkeypatch.setattr(trying, "MOST_WHOLE", 2)
    asked = stand_in(
        lambda config: at_loss(2.95) if config.steps < CRITERION_STEPS else said("slow", -1.0, 0.01)
    )
    rescue = tried("lower-rate", "much-lower-rate", "far-lower-rate")
    assert sum(config.steps >= CRITERION_STEPS for config in asked) == 2
    assert rescue.best is not None
    assert not rescue.best.is_whole


def test_what_is_slow_is_tried_longer_where_nothing_rescues(stand_in) -> None:
    def say(config: Recipe) -> Forecast:
        if config.lr == CONFIG.lr:
            return FAILS
        return said("slow", -1.0) if config.steps == CONFIG.steps else said("trains", 1.0)

    stand_in(say)
    rescue = tried("lower-rate", "clip")
    assert rescue.best is not None
    assert (rescue.best.name, rescue.best.longer) == ("lower-rate", True)


@pytest.mark.parametrize(("certainty", "longer"), [(0.3, True), (0.05, False)])
def test_a_failure_that_is_not_sure_is_tried_longer_where_nothing_rescues(
    stand_in, certainty: float, longer: bool
) -> None:
    def say(config: Recipe) -> Forecast:
        if config.lr == CONFIG.lr:
            return FAILS
        if config.steps > CONFIG.steps:
            return said("trains", 1.0)
        return said("plateau", -0.5, certainty)

    stand_in(say)
    rescue = tried("lower-rate", "clip")
    assert (rescue.best is not None) == longer
    assert [attempt.longer for attempt in rescue.attempts] == [longer, False]


def test_what_is_slow_is_not_tried_longer_where_something_holds(stand_in) -> None:
    stand_in(lambda config: at_loss(2.5) if config.clip else said("slow", -1.0))
    assert [a.longer for a in tried("lower-rate", "clip").attempts] == [True, False]


def test_pairs_are_tried_where_what_rescues_alone_does_not_hold(stand_in, monkeypatch) -> None:
    few = {name: REMEDIES[name] for name in ("much-lower-rate", "pre-ln")}
    monkeypatch.setattr(trying, "REMEDIES", few)
    monkeypatch.setattr(trying, "COMBINED", [("pre-ln", "much-lower-rate")])
    stand_in(lambda config: said("trains", 1.0) if config.steps == CONFIG.steps else FAILS)
    assert len(try_remedies(*given("nn-post"), CONFIG, FAILS).attempts) == 3


@pytest.mark.parametrize("learns", [0, 1, 2, 3])
def test_pairs_have_whole_runs_of_their_own(stand_in, monkeypatch, learns: int) -> None:
    """Pair number `learns` trains, and three seem to, after single remedies used up their whole runs."""
    rates = {"lower-rate": 3, "much-lower-rate": 10, "far-lower-rate": 30}
    monkeypatch.setattr(trying, "REMEDIES", {name: REMEDIES[name] for name in ("warm-up", *rates)})
    monkeypatch.setattr(trying, "COMBINED", [("warm-up", name) for name in rates])
    monkeypatch.setattr(trying, "MOST_WHOLE", 2)

    def say(config: Recipe) -> Forecast:
        divisor = round(CONFIG.lr / config.lr)
        pair = divisor > 1 and config.warmup > 0
        if config.steps < CRITERION_STEPS:
            chance = 0.9 - divisor / 100 if divisor > 1 else 0.3
            return at_loss(2.95, "trains" if pair else "slow", chance)
        is_it = pair and divisor == [*rates.values(), None][learns]
        return at_loss(2.5, certainty=0.99) if is_it else said("slow", -1.0, 0.01)

    asked = stand_in(say)
    rescue = try_remedies(*given("nn-post"), CONFIG, FAILS)
    assert sum(config.steps >= CRITERION_STEPS for config in asked) == (3 if learns == 0 else 4)
    assert rescue.best is not None
    assert rescue.best.has_learnt == (learns < 2)
    assert rescue.best.names == ("warm-up", list(rates)[min(learns, 2)])
    reason = "none of the 4 remedies that were tried over a whole run trains; warm-up + far-lower-rate had a"
    assert rescue.reason.startswith(reason) == (learns > 1)
    assert bool(rescue.reason) == (learns > 1)


def test_an_unknown_remedy_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'warmup'.*nearest name is \"warm-up\""):
        tried("warmup")


def test_trying_leaves_the_model_and_the_generators() -> None:
    subject, anatomy = given("hand-post")
    before = fingerprint(subject.model)
    config = Recipe(optimizer="sgd", lr=1e4, steps=2)
    rescue = try_remedies(subject, anatomy, config, FAILS, names=("clip", "pre-ln", "output-bias"))
    assert len(rescue.attempts) == 3
    assert all(attempt.forecast is not None for attempt in rescue.attempts)
    after = fingerprint(subject.model)
    for part in before:
        assert same(before[part], after[part]), part
