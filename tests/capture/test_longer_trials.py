"""`check --forecast -- COMMAND`: the script is followed for a whole run, whose batches longer trials take."""

import dataclasses
from pathlib import Path
from typing import Any

import here
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from normscope.capture import folder as folders
from normscope.capture import following, launch, script_baseline
from normscope.capture.child import Stopped
from normscope.capture.folder import Folder, Settings
from normscope.capture.start import Start
from normscope.forecast import ForecastInterrupted, LadderInterrupted
from normscope.report import Report
from normscope.subjects import Run
from normscope.train import CRITERION_STEPS, LiveOptimizers

RATES = (1e-3, 3e-3)


def settings_of(**options: Any) -> Settings:
    return Settings("tiny.py", budget="fast", **{"rates": RATES} | options)


def watched(path: Path, monkeypatch: pytest.MonkeyPatch, words: str, **options: Any) -> Folder:
    """The folder of a check of `tiny.py` with these words in this process."""
    return here.watched(f"tiny.py {words}", path, settings_of(**options), monkeypatch)[0]


def report_of(folder: Folder) -> Report:
    report = folder.report()
    assert report is not None, folder.facts()
    return report


def test_a_whole_run_is_as_long_as_the_criterion() -> None:
    assert folders.WHOLE_RUN == CRITERION_STEPS


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 300),
        ({"rates": (), "forecast": True}, 300),
        ({"rates": ()}, 20),
        ({"rates": (), "try_remedies": True}, 20),
        ({"refine": 0}, 20),
        ({"refine": 140}, 300),
        ({"steps": 400}, 400),
    ],
)
def test_steps_for_which_a_script_is_followed(options: dict[str, Any], steps: int) -> None:
    assert settings_of(**options).followed == steps


def test_longer_trials_take_the_batches_of_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = watched(tmp_path, monkeypatch, "1000")
    report = report_of(folder)
    assert report.forecast is not None
    assert report.ladder is not None
    assert report.verdict == "healthy"
    assert [step.step for step in report.forecast.curve] == [0, 5, 10, 20, 40, 80, 150, 160, 300]
    assert report.forecast.curve[3].coherence is not None  # the short trial is whole by then
    assert report.forecast.curve[4].coherence is None
    assert report.forecast.outcome == "trains"
    assert "after 300 steps, under the unigram entropy of these batches" in report.forecast.reason
    assert all((step.recent_baseline is not None) == (step.step > 0) for step in report.forecast.curve)
    slower, own = report.ladder.rungs
    assert 36 < slower.last_step < 300
    assert (own.lr, own.last_step, own.outcome) == (3e-3, 300, "trains")  # the script's own steps
    assert own.curve == report.forecast.curve
    assert report.ladder.range_test is not None
    assert "copies were tried on the 300 batches of these steps" in report.notes
    assert launch._outcome(folder, report, settings_of(), None).is_whole


def test_steps_with_fewer_batches_are_steps_of_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = report_of(watched(tmp_path, monkeypatch, "1000 parts=2"))
    assert report.ladder is not None
    assert report.recipe is not None
    assert report.recipe["accumulation"] == 2
    assert "copies were tried on the 540 batches of these steps" in report.notes
    assert not any("no trial of" in note for note in report.notes)
    slower, own = report.ladder.rungs
    assert 36 < slower.last_step < 300
    assert own.last_step == 300
    assert all((step.recent_baseline is not None) == (step.step > 0) for step in own.curve)


def test_without_longer_trials_a_script_takes_the_steps_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = report_of(watched(tmp_path, monkeypatch, "1000", refine=0))
    assert report.forecast is not None
    assert report.ladder is not None
    assert report.ladder.best is not None
    assert [step.step for step in report.forecast.curve] == [0, 5, 10, 20]
    assert max(rung.last_step for rung in report.ladder.rungs) <= 36
    assert report.ladder.best.reason.endswith("alone: less certain; leave out --refine 0)")
    assert "copies were tried on the 20 batches of these steps, which repeat" in report.notes


def test_a_script_that_ends_before_a_whole_run_is_judged_by_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = watched(tmp_path, monkeypatch, "60")
    report = report_of(folder)
    assert report.forecast is not None
    assert report.ladder is not None
    assert report.verdict == "healthy"
    assert [step.step for step in report.forecast.curve] == [0, 5, 10, 20, 40, 60]
    assert report.forecast.curve[-1].coherence is not None
    slower, own = report.ladder.rungs
    assert slower.last_step <= 36
    assert own.last_step == 60  # the script's own steps
    assert any(note.startswith("no trial of 140 steps or more was made") for note in report.notes)
    outcome = launch._outcome(folder, report, settings_of(), 0)
    assert (outcome.is_whole, outcome.reason) == (True, "")
    assert not launch._outcome(folder, report, settings_of(), 3).is_whole


def test_a_script_that_fails_before_a_whole_run_has_a_report_and_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = watched(tmp_path, monkeypatch, "40 fails")
    report = report_of(folder)
    outcome = launch._outcome(folder, report, settings_of(), 1)
    assert report.verdict == "healthy"
    assert not outcome.is_whole
    reason = "the script failed with RuntimeError: the data ended after 40 of 300 steps"
    assert outcome.reason == f"{reason}; the report has what was seen"
    assert not launch._outcome(folder, report, settings_of(), None).is_whole  # a process of a launcher


def test_a_script_that_ends_between_two_measurements_is_measured_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 100 is the last one of the rule for short runs, and no step of a whole run's measurements."""
    report = report_of(watched(tmp_path, monkeypatch, "100", rates=(1e-3,)))
    assert report.forecast is not None
    assert [step.step for step in report.forecast.curve] == [0, 5, 10, 20, 40, 80, 100]
    assert report.forecast.curve[-1].coherence is not None


def test_a_schedule_that_is_stepped_by_epoch_and_is_shorter_than_the_run_is_recorded() -> None:
    """OneCycleLR raises ValueError beyond its last step."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = OneCycleLR(optimizer, 3e-3, total_steps=10)
    run = Run(model=model, batches=(), optimizer=optimizer, scheduler=scheduler)
    start, rates = Start.of(run), []
    for _ in range(6):
        rates += [(optimizer.param_groups[0]["lr"],)] * 50
        optimizer.step()
        scheduler.step()
    recipe = start.recipe(run, rates, 20)
    assert isinstance(recipe.optimizer, LiveOptimizers)
    assert recipe.optimizer.rates == tuple(rates)


def test_longer_trials_that_were_asked_for_are_said_to_repeat_the_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = report_of(watched(tmp_path, monkeypatch, "40", rates=(1e-3,), refine=50))
    assert report.cut_short == "", "what was stored on the way is not kept"
    assert "copies were tried on the 40 batches of these steps, which repeat" in report.notes


@pytest.mark.parametrize("steps", [12, 19])
def test_a_script_that_ends_before_its_short_trial_is_not_judged(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = watched(tmp_path, monkeypatch, str(steps))
    report = report_of(folder)
    assert report.verdict == "interrupted"
    assert report.cut_short == f"the script ended after {steps} of 20 steps"
    outcome = launch._outcome(folder, report, settings_of(), 0)
    assert not outcome.is_whole
    assert outcome.reason.endswith(f"(--steps {steps} asks for no more)")


def test_a_stop_in_a_longer_trial_keeps_the_short_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = following.try_others

    def stopped(check: Any, *rest: Any) -> None:
        real(check, *rest)
        ladder, check.ladder = check.ladder, None
        raise LadderInterrupted(ladder) from Stopped()

    monkeypatch.setattr(following, "try_others", stopped)
    report = report_of(watched(tmp_path, monkeypatch, "25", refine=0))
    assert report.verdict == "interrupted"
    assert report.cut_short == "interrupted after the script's 20 steps, while copies of the run were tried"
    assert report.ladder is not None
    assert [rung.lr for rung in report.ladder.rungs] == list(RATES)


def test_a_stop_in_the_trial_of_a_copy_keeps_its_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(check: Any, *rest: Any) -> None:
        raise ForecastInterrupted(
            dataclasses.replace(check.forecast, reason="that of the copy")
        ) from Stopped()

    monkeypatch.setattr(following, "try_others", stopped)
    report = report_of(watched(tmp_path, monkeypatch, "25", refine=0))
    assert report.verdict == "interrupted"
    assert report.forecast is not None
    assert report.forecast.reason == "that of the copy"


def test_progress_within_a_stage_is_told_every_few_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of a stage that come fast are left out; the first line of a stage never is."""
    folder = Folder(tmp_path)
    said = [*(f"rates, step {n} of 9" for n in range(9)), "remedies", "done"]
    told: list[str] = []
    facts = iter(said)

    class Process:
        returncode = None

        def wait(self, timeout: float) -> None:
            words = next(facts, "")
            if words:
                folder.note(progress=words)
            else:
                folder.tell("done")

    script = launch._Script(folder)
    script.process = Process()  # type: ignore[assignment]
    script.wait(told.append)
    assert told == ["rates, step 0 of 9", "remedies", "done"]


def test_a_script_on_numbers_is_judged_by_its_short_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = here.watched("points.py", tmp_path, Settings("points.py", budget="fast"), monkeypatch)
    report = folder.report()
    assert report is not None
    assert report.forecast is not None
    assert report.forecast.curve[-1].coherence is not None, "which takes the loss without the input"
    assert report.forecast.outcome == "trains"


def test_the_loss_to_beat_is_sought_once_in_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sought: list[int] = []
    seek = script_baseline.with_baseline

    def counted(subject: Any, taken: int) -> Any:
        sought.append(taken)
        return seek(subject, taken)

    monkeypatch.setattr(script_baseline, "with_baseline", counted)
    here.watched("points.py", tmp_path, Settings("points.py", budget="fast"), monkeypatch)
    assert sought == [20]
