"""`check(…, forecast_rates=…, try_remedies=True)`: trials besides the intended run, and side effects."""

import copy
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from small_models import MODELS
from torch import Tensor

import normscope
from normscope import pipeline
from normscope.errors import UsageError
from normscope.forecast import (
    REFINED_STEPS,
    BestRate,
    Forecast,
    ForecastStep,
    LadderForecast,
    LadderInterrupted,
)
from normscope.forecast.longer import AT_CONSTANT_RATE, OF_DECAY, longer_trials, with_caveat
from normscope.pipeline import Check, try_others
from normscope.probes import Budget, Spending
from normscope.report import text_report
from normscope.rules.remedies import Attempt, RemediesInterrupted, Rescue
from normscope.schemas import schema
from normscope.subjects import make_subject
from normscope.subjects.repeats import steps_without_repeat
from normscope.train import Recipe

BATCH = torch.randint(0, 256, (2, 16))
ATTEMPT = Attempt(("clip",), None, "a reason", 0.1)


def said(outcome: str) -> Forecast:
    return Forecast(outcome, "because", "adamw", 3e-4, 0, 2, 3.0)  # type: ignore[arg-type]


def checked(**options: Any) -> normscope.Report:
    return normscope.check(MODELS["pre"](), BATCH, steps=2, budget="fast", **options)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for the trials, which record their arguments."""
    asked: dict[str, Any] = {}

    def ladder(subject, anatomy, config, rates, progress, *, refine, whole, again, seen):
        asked.update(rates=rates, refine=refine, whole=whole)
        progress(1, 4)
        again(1, 4)
        return LadderForecast((said("trains"),), 3e-4, "not needed", 0)

    def remedies(subject, anatomy, config, before, progress, whatever):
        asked["before"] = before.outcome
        progress("remedy clip", 0, 1)
        return Rescue((ATTEMPT,))

    monkeypatch.setattr(pipeline, "forecast_ladder", ladder)
    monkeypatch.setattr(pipeline, "try_remedies", remedies)
    monkeypatch.setattr(pipeline, "forecast", lambda *given: said("collapses"))
    return asked


def test_neither_is_tried_unless_asked_for(trials: dict[str, Any]) -> None:
    report = checked()
    assert (report.ladder, report.remedies, trials) == (None, None, {})
    assert {"rates", "remedies"}.isdisjoint(report.cost)


def test_both_are_in_the_report_and_in_the_cost(trials: dict[str, Any]) -> None:
    report = checked(forecast_rates=[1e-3, 1e-4], try_remedies=True)
    assert trials == {"rates": (1e-3, 1e-4), "before": "collapses", "refine": 0, "whole": False}
    assert report.ladder is not None
    assert report.remedies == Rescue((ATTEMPT,))
    assert {"rates", "remedies"} <= set(report.cost)
    assert report.verdict == "will fail"  # a way out does not make the intended run a good one
    jsonschema.validate(json.loads(report.to_json()), schema("report"))


OTHER = (ForecastStep(0, 5.0, 5.0, {}),)


@pytest.mark.parametrize(
    ("change", "counts"), [({}, True), ({"outcome": "slow"}, False), ({"curve": OTHER}, False)]
)
def test_a_trial_has_the_probabilities_of_its_row_in_the_table(
    change: dict[str, Any], counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row's know the other rates: beside the limit, a run may go either way."""
    trial = replace(said("trains"), lr=3e-4, steps=2, certainty=0.99)
    rung = replace(trial, certainty=0.87, divergence=0.2, **change)
    ladder = LadderForecast((rung,), 3e-4, "not needed", 0)
    monkeypatch.setattr(pipeline, "forecast_ladder", lambda *given, **options: ladder)
    monkeypatch.setattr(pipeline, "forecast", lambda *given: trial)
    report = checked(forecast_rates=[3e-4])
    assert report.forecast is not None
    expected = (0.87, 0.2) if counts else (0.99, trial.divergence)
    assert (report.forecast.certainty, report.forecast.divergence) == expected


@pytest.mark.parametrize(
    ("steps", "rate", "counts"), [(36, 3e-4, True), (1, 3e-4, False), (2, 3e-4, False), (36, 1e-3, False)]
)
def test_the_verdict_rests_on_the_longest_trial_of_the_run(
    steps: int, rate: float, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trial(outcome: str, lr: float, last: int) -> Forecast:
        looks = [ForecastStep(step, 5.0, 5.0, {}) for step in (0, last)]
        return replace(said(outcome), lr=lr, steps=last, curve=tuple(looks))

    rung = trial("trains", rate, steps)
    monkeypatch.setattr(
        pipeline,
        "forecast_ladder",
        lambda *given, **options: LadderForecast((rung,), rate, "not needed", 0),
    )
    monkeypatch.setattr(pipeline, "forecast", lambda *given: trial("collapses", 3e-4, 2))
    report = checked(forecast_rates=[rate])
    assert report.forecast is not None
    assert (report.forecast is rung) == counts
    assert (report.verdict == "will fail") == (not counts)
    rows = [row for row in report.measurements if row.quantity == "forecast/step"]
    assert [row.value for row in rows] == [(0.0, 36.0 if counts else 2.0)]


@pytest.mark.parametrize("is_script", [True, False])
def test_a_scripts_own_steps_count_more_than_a_longer_copy(
    is_script: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = [ForecastStep(step, 5.0, 5.0, {}) for step in (0, 36)]
    longer = replace(said("trains"), curve=tuple(looks))
    ladder = LadderForecast((longer,), 3e-4, "not needed", 0)
    monkeypatch.setattr(pipeline, "forecast_ladder", lambda *given, **options: ladder)
    run = Check(
        make_subject(MODELS["pre"](), BATCH),
        Recipe(),
        Spending(Budget.FAST),
        select=(),
        ignore=(),
        rates=(3e-4,),
        try_remedies=False,
        forecast=said("slow"),
        is_script=is_script,
    )
    try_others(run, lambda stage, done: None, 0)
    assert run.forecast == (said("slow") if is_script else longer)


def test_the_words_on_a_warm_up_tell_their_trial_from_a_shorter_one_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = tuple(ForecastStep(step, 5.0, 5.0, {}) for step in (0, 2))
    own = replace(said("trains"), curve=looks)
    ladder = LadderForecast((replace(own, lr=1e-3),), 1e-3, "not tried: the trial at 0.0003 is slow", None)
    monkeypatch.setattr(pipeline, "forecast_ladder", lambda *given, **options: ladder)
    monkeypatch.setattr(pipeline, "forecast", lambda *given: own)
    report = checked(forecast_rates=[1e-3])
    more = "that trial takes 36 steps, and the run's takes 2 and says trains"
    assert report.ladder is not None
    assert report.ladder.warmup == f"{ladder.warmup}; {more}"


def test_progress_counts_every_stage_once(trials: dict[str, Any]) -> None:
    seen: list[tuple[str, int, int]] = []
    checked(forecast_rates=[1e-3], try_remedies=True, progress=lambda *told: seen.append(told))
    places = [done for _, done, _ in seen]
    assert places == sorted(places)
    assert {total for *_, total in seen} == {seen[-1][1]}
    assert "remedy clip (1 of 1)" in [words for words, *_ in seen]


@pytest.mark.parametrize("name", ["forecast_ladder", "try_remedies"])
def test_ctrl_c_keeps_what_was_tried(
    name: str, trials: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = ("no trial of 300 steps at 0.001: so",)
    ladder = LadderForecast((said("trains"),), 3e-4, "not tried", None, notes=notes)
    rescue = Rescue((ATTEMPT,), "cut")

    def stop(*given: Any, **options: Any) -> None:
        raise LadderInterrupted(ladder) if name == "forecast_ladder" else RemediesInterrupted(rescue)

    monkeypatch.setattr(pipeline, name, stop)
    with pytest.raises(normscope.CheckInterrupted) as caught:
        checked(forecast_rates=[1e-3], try_remedies=True)
    report = caught.value.report
    assert report.forecast is not None
    if name == "forecast_ladder":
        assert (report.ladder, report.remedies) == (ladder, None)
        assert "no trial of 300 steps at 0.001: so" in report.notes
    else:
        assert report.remedies == rescue
    jsonschema.validate(json.loads(report.to_json()), schema("report"))


@pytest.mark.parametrize("options", [{"forecast_rates": [1e-3]}, {"try_remedies": True}])
def test_trials_without_steps_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(normscope.UsageError, match="real steps"):
        normscope.check(MODELS["pre"](), BATCH, steps=0, **options)


def test_a_rate_that_is_not_positive_is_refused() -> None:
    with pytest.raises(normscope.UsageError, match="positive"):
        checked(forecast_rates=[1e-3, -1.0])


@pytest.mark.parametrize(("refine", "rates"), [(36, [1e-3]), (140, [])])
def test_a_second_trial_is_longer_than_the_first_and_has_rates(refine: int, rates: list[float]) -> None:
    with pytest.raises(normscope.UsageError, match="of the first trials" if rates else "learning rates"):
        checked(forecast_rates=rates, refine=refine)


@pytest.mark.parametrize(
    ("num", "options", "refine", "whole", "few"),
    [
        (300, {}, REFINED_STEPS, True, ""),
        (
            299,
            {},
            REFINED_STEPS,
            False,
            "no trial of 300 steps or more was made: it would repeat the 299 batches",
        ),
        (140, {}, REFINED_STEPS, False, "no trial of 300 steps"),
        (139, {}, 0, False, "no trial of 140 steps or more was made: it would repeat the 139 batches"),
        (1, {}, 0, False, "the one batch at hand"),
        (300, {"accumulation": 2}, REFINED_STEPS, False, "give 600"),
        (300, {"refine": 0}, 0, False, ""),
        (300, {"refine": 50}, 50, True, ""),
        (8, {"refine": 50}, 50, True, ""),  # asked for
        (300, {"steps": REFINED_STEPS}, 0, True, ""),  # as long already
        (150, {"steps": REFINED_STEPS}, 0, False, "no trial of 300 steps"),
        (
            300,
            {"schedule": "cosine", "run_steps": 100},
            0,
            False,
            "no trial of 140 steps or more was made: the run,",
        ),
        (
            50,
            {"schedule": "cosine", "run_steps": 100},
            0,
            False,
            "the run, over which its schedule goes, has 100",
        ),
        (300, {"schedule": "cosine", "run_steps": 200}, REFINED_STEPS, False, "no trial of 300 steps"),
        (50, {"schedule": "cosine", "run_steps": 200}, 0, False, "it would repeat the 50 batches"),
    ],
)
def test_longer_trials_are_made_as_far_as_the_batches_and_the_run_go(
    num: int, options: dict[str, Any], refine: int, whole: bool, few: str, trials: dict[str, Any]
) -> None:
    batches = [torch.randint(0, 256, (2, 16)) for _ in range(num)]
    given = {"steps": 2, "budget": "fast", "forecast_rates": [1e-3]} | options
    report = normscope.check(MODELS["pre"](), batches, **given)
    assert (trials["refine"], trials["whole"]) == (refine, whole)
    said = [note for note in report.notes if "or more was made" in note]
    assert len(said) == bool(few)
    assert all(few in note for note in said)


@pytest.mark.parametrize(
    ("num", "options", "caveat"),
    [
        (300, {"refine": 0}, " (from trials of 36 steps alone: less certain; leave out --refine 0)"),
        (300, {"refine": 50}, " (from trials of 50 steps alone: less certain; leave out --refine 50)"),
        (
            300,
            {"refine": 0, "steps": 60},
            " (from trials of 60 steps alone: less certain; leave out --refine 0)",
        ),
        (300, {"refine": 0, "steps": 101}, ""),
        (300, {"refine": 101}, ""),
        (1, {"refine": 0}, " (from trials of 36 steps alone: less certain)"),  # there would be no longer ones
        (
            300,
            {"refine": 0, "schedule": "cosine", "run_steps": 100},
            f"; {OF_DECAY} (from trials of 36 steps alone: less certain)",
        ),
        (300, {"schedule": "wsd"}, f"; {OF_DECAY}"),
        (1, {}, ""),  # a note says why
        (300, {}, ""),
    ],
)
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_rate_from_short_trials_alone_says_so(
    num: int,
    options: dict[str, Any],
    caveat: str,
    is_interrupted: bool,
    trials: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ladder = LadderForecast((said("trains"),), 6e-4, "not needed", 0, BestRate(3e-4, None, None, "as tested"))

    def made(*given: object, **more: object) -> LadderForecast:
        if is_interrupted:
            raise LadderInterrupted(ladder)
        return ladder

    monkeypatch.setattr(pipeline, "forecast_ladder", made)
    batches = [torch.randint(0, 256, (2, 16)) for _ in range(num)]
    given = {"steps": 2, "budget": "fast", "forecast_rates": [1e-3]} | options
    if is_interrupted:
        with pytest.raises(normscope.CheckInterrupted) as stop:
            normscope.check(MODELS["pre"](), batches, **given)
        report = stop.value.report
    else:
        report = normscope.check(MODELS["pre"](), batches, **given)
    assert report.ladder is not None
    assert report.ladder.best == BestRate(3e-4, None, None, f"as tested{caveat}")


@pytest.mark.parametrize(("largest", "caveat"), [(6e-4, OF_DECAY), (5e-4, AT_CONSTANT_RATE)])
def test_twice_the_rate_is_named_for_a_cosine_only_where_it_trains(largest: float, caveat: str) -> None:
    best = BestRate(3e-4, None, None, "as tested")
    ladder = LadderForecast((said("trains"),), largest, "not needed", 0, best)
    config = Recipe(schedule="cosine", run_steps=100)
    found = with_caveat(ladder, make_subject(MODELS["pre"]()), config, None).best
    assert found is not None
    assert found.reason == f"as tested; {caveat}"


@pytest.mark.parametrize(
    ("num", "options", "said"),
    [
        (3, {"steps": 5}, ["the 3 batches are repeated: the trial takes 5"]),
        (5, {"steps": 5}, []),
        (5, {"steps": 3, "accumulation": 2}, ["the 5 batches are repeated: the trial takes 6"]),
        (1, {"steps": 5}, ["a single batch is repeated: the trial takes 5"]),
        (3, {"steps": 0}, []),
    ],
)
@pytest.mark.parametrize("given", [list, iter])
def test_batches_that_the_trial_repeats_are_noted_once(
    given: Any, num: int, options: dict[str, Any], said: list[str], trials: dict[str, Any]
) -> None:
    batches = given([torch.randint(0, 256, (2, 16)) for _ in range(num)])
    report = normscope.check(MODELS["pre"](), batches, budget="fast", **options)
    assert [note for note in report.notes if "repeat" in note] == said


def test_a_note_that_batches_are_repeated_is_not_said_twice(trials: dict[str, Any]) -> None:
    report = normscope.check(MODELS["pre"](), BATCH, steps=2, budget="fast")
    assert [note for note in report.notes if "repeat" in note] == ["a single batch is repeated"]


@pytest.mark.parametrize("good", [30, 299])
def test_batches_that_break_off_end_the_check(good: int, trials: dict[str, Any]) -> None:
    """They would otherwise seem to repeat."""
    count = itertools.count()

    def broken() -> Tensor:
        if next(count) == good:
            raise OSError("disk gone")
        return torch.randint(0, 256, (2, 16))

    with pytest.raises(UsageError, match=rf"^batch {good + 1} of the batches raised OSError: disk gone"):
        normscope.check(MODELS["pre"](), iter(broken, None), steps=2, budget="fast", forecast_rates=[1e-3])
    assert not trials, "no ladder was begun"


def test_the_whole_way_on_a_run_that_fails() -> None:
    model = MODELS["post-encoder"]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    twin = copy.deepcopy(model)
    report = normscope.check(
        model,
        BATCH,
        optimizer="sgd",
        lr=1e4,
        steps=2,
        budget="fast",
        forecast_rates=[1e-4, 1e4],
        try_remedies=True,
    )
    assert report.forecast is not None
    assert report.forecast.outcome == "diverges"
    assert report.ladder is not None
    assert [rung.lr for rung in report.ladder.rungs] == [1e-4, 1e4]
    assert report.remedies is not None
    found = {attempt.name: attempt.status for attempt in report.remedies.attempts}
    assert found["adam-eps"] == "not applicable"
    assert found["pre-ln"] != "not applicable"
    jsonschema.validate(json.loads(report.to_json()), schema("report"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    logits: list[Tensor] = [each.eval()(BATCH) for each in (model, twin)]
    assert torch.equal(*logits)


def test_without_a_loss_the_report_says_that_nothing_was_tried() -> None:
    model = torch.nn.Sequential(MODELS["pre"](), torch.nn.Linear(256, 3))  # no logits over its ids
    report = normscope.check(model, BATCH, steps=2, budget="fast", forecast_rates=[1e-3], try_remedies=True)
    assert report.verdict == "no trial"
    assert report.ladder is None
    assert any("no other learning rates were tried" in note and "loss" in note for note in report.notes)
    assert report.remedies is not None
    assert report.remedies.attempts == ()
    assert "no forecast" in report.remedies.reason


def test_an_undecided_run_has_no_remedy_that_could_be_judged() -> None:
    report = checked(try_remedies=True)
    assert report.forecast is not None
    assert report.forecast.outcome == "undecided"
    assert report.remedies is not None
    assert report.remedies.attempts == ()
    assert "whether the run trains is undecided" in report.remedies.reason


@pytest.mark.parametrize("is_single", [True, False], ids=["one batch", "many"])
def test_random_ids_decide_nothing_but_a_failure(is_single: bool) -> None:
    def draws() -> Iterator[Tensor]:
        while True:
            yield torch.randint(256, (4, 64))

    report = normscope.check(MODELS["pre"](), next(draws()) if is_single else draws(), lr=1e-2, budget="fast")
    assert "ids that look random: as even as uniform draws from 25" in report.input
    assert report.forecast is not None
    assert report.forecast.outcome == "undecided"
    assert "no sign of failure in 20 steps" in report.forecast.reason
    bound = "that of equally likely ids" if is_single else "the unigram entropy, 5.5"
    assert (
        f"The ids look random: unless the targets follow from the input, the loss falls below {bound}"
        in report.forecast.reason
    )
    assert report.forecast.unigram_entropy is None, "nothing is known that the loss should get under"
    assert "but     no trial decided" in text_report(report)
    text = normscope.check(MODELS["pre"](), lr=1e-2, budget="fast")
    assert text.forecast is not None
    assert text.forecast.outcome == "trains"
    assert "random" not in text.input


@pytest.mark.parametrize(
    ("num", "accumulation", "steps", "words"),
    [
        (
            100,
            1,
            100,
            "no trial of 140 steps or more was made: the script ended after 100, and more would repeat",
        ),
        (100, 2, 50, "the script ended after 50, and more would repeat its batches"),
        (
            20,
            1,
            300,
            "no trial of 140 steps or more was made: it would repeat the 20 batches of the script's steps",
        ),
    ],
)
def test_a_script_that_ends_early_is_told_from_one_that_repeats_its_batches(
    num: int, accumulation: int, steps: int, words: str
) -> None:
    batches = [torch.randint(0, 256, (2, 16)) for _ in range(num)]
    subject = make_subject(MODELS["pre"](), batches)
    found = longer_trials(subject, Recipe(accumulation=accumulation), None, script_steps=steps)
    assert words in found.note


def test_recorded_steps_count_though_some_have_fewer_batches() -> None:
    batches = [torch.randint(0, 256, (2, 16)) for _ in range(8)]
    subject = make_subject(MODELS["pre"](), batches)
    assert [steps_without_repeat(subject, most, 2) for most in (3, 4, 10)] == [math.inf, math.inf, 4]
    recorded = replace(subject, recorded_steps=5)
    assert [steps_without_repeat(recorded, most, 2) for most in (3, 4, 10)] == [math.inf, math.inf, 5]


@pytest.mark.parametrize(("recorded", "whole"), [(0, False), (290, False), (300, True)])
def test_a_whole_trial_is_made_of_the_steps_that_a_script_took(recorded: int, whole: bool) -> None:
    batches = [torch.randint(0, 256, (1, 8)) for _ in range(560)]
    subject = replace(make_subject(MODELS["pre"](), batches), recorded_steps=recorded)
    found = longer_trials(subject, Recipe(accumulation=2), None, script_steps=300)
    assert (found.whole, found.refine) == (whole, 140)
