"""`check --try-remedies -- COMMAND`: a script that needs a rescue is followed on, for its batches."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import here
import pytest

from normscope.capture import following, launch
from normscope.capture.child import Stopped
from normscope.capture.counting import Counting
from normscope.capture.folder import Folder, Settings
from normscope.capture.following import Following
from normscope.forecast import forecast
from normscope.recording import calls
from normscope.report import Report

FAILS = "1000 lr=10"
"""Words of a run of `tiny.py` that fails after 20 steps and after 300."""
NOT_FINITE = "lr=10 optimizer=SGD"
"""The same of one whose loss is not finite after 6 steps."""
FOLLOWED_ON = "following the script for 300 steps: the remedies need as many batches"


def settings_of(**options: Any) -> Settings:
    return Settings("tiny.py", budget="fast", **{"try_remedies": True} | options)


def watched(path: Path, monkeypatch: pytest.MonkeyPatch, words: str, **options: Any) -> tuple[Folder, Report]:
    """The folder of a check of `tiny.py` with these words in this process, and its report."""
    folder = here.watched(f"tiny.py {words}", path, settings_of(**options), monkeypatch)[0]
    report = folder.report()
    assert report is not None, folder.facts()
    assert report.forecast is not None
    return folder, report


def statuses(report: Report) -> Counter[str]:
    """Number of remedies with each outcome; those that do not apply are left out."""
    assert report.remedies is not None
    return Counter(each.status for each in report.remedies.attempts if each.status != "not applicable")


def measured(report: Report) -> list[int]:
    assert report.forecast is not None
    return [step.step for step in report.forecast.curve]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The progress of a check, as it is told."""
    words: list[str] = []
    real = Folder.note

    def note(self: Folder, **facts: Any) -> None:
        words.extend(filter(None, [facts.get("progress")]))
        real(self, **facts)

    monkeypatch.setattr(Folder, "note", note)
    return words


def test_a_script_that_needs_a_rescue_gives_the_batches_of_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    folder, report = watched(tmp_path, monkeypatch, FAILS)
    assert report.verdict == "will fail"
    assert report.forecast is not None
    assert report.remedies is not None
    assert report.remedies.best is not None
    assert measured(report) == [0, 5, 10, 20, 40, 80, 150, 160, 300]
    assert report.forecast.steps == 300
    assert report.forecast.outcome == "diverges"
    assert statuses(report)["undecided"] == 0
    assert statuses(report).total() == 9
    assert report.remedies.best.names == ("far-lower-rate",)
    assert report.remedies.best.is_whole  # 20 batches that repeat would leave this trial out
    assert "copies were tried on the 300 batches of these steps" in report.notes
    assert not any("whole run" in note for note in report.notes)
    assert said.count(FOLLOWED_ON) == 1
    assert said.index(FOLLOWED_ON) == 1 + next(i for i, each in enumerate(said) if "step 20 of 20" in each)
    assert launch._outcome(folder, report, settings_of(), None).is_whole


@pytest.mark.parametrize("words", ["1000", "1000 lr=0.01 warmup=100"])
def test_a_script_that_needs_no_rescue_is_not_followed_on(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    folder, report = watched(tmp_path, monkeypatch, words)
    assert report.forecast is not None
    assert report.remedies is not None
    assert (folder.steps(), folder.last()) == (20, 0)
    assert report.forecast.outcome == "trains"
    assert report.remedies.reason.startswith("nothing to rescue")
    assert FOLLOWED_ON not in said
    assert ("copies were tried" in " ".join(report.notes)) == ("warmup" in words)  # the forecast's copy


def test_a_loss_that_is_not_finite_has_decided_and_the_script_gives_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, report = watched(tmp_path, monkeypatch, f"1000 {NOT_FINITE}")
    assert report.verdict == "will fail"
    assert report.forecast is not None
    assert folder.steps() == 300
    assert (report.forecast.steps, measured(report)) == (6, [0, 5, 6])
    assert report.forecast.reason == "the loss is not finite after 6 steps"
    assert report.forecast.unigram_entropy == pytest.approx(1.97, abs=0.02)  # not from the last weights
    assert statuses(report)["undecided"] == 0
    assert statuses(report)["rescues"] >= 1
    assert "copies were tried on the 300 batches of these steps" in report.notes


def test_other_rates_have_the_batches_of_a_script_whose_loss_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"try_remedies": False, "rates": (0.3,)}
    _, report = watched(tmp_path, monkeypatch, f"1000 {NOT_FINITE}", **options)
    assert "copies were tried on the 300 batches of these steps" in report.notes
    assert report.ladder is not None
    assert report.ladder.rungs[0].outcome == "trains"


@pytest.mark.parametrize(("words", "steps"), [("60 lr=10", 60), (f"8 {NOT_FINITE}", 8)])
def test_a_script_that_ends_while_it_is_followed_on_gives_what_it_has(
    words: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, report = watched(tmp_path, monkeypatch, words)
    assert folder.steps() == steps
    assert report.verdict == "will fail"
    assert statuses(report).total() >= 8
    assert f"copies were tried on the {steps} batches of these steps, which repeat" in report.notes
    few = f"no remedy was tried over a whole run: that takes 300 batches, and there are {steps}"
    assert few in report.notes
    outcome = launch._outcome(folder, report, settings_of(), 0)
    assert (outcome.is_whole, outcome.reason) == (True, "")


def test_a_script_that_fails_while_it_is_followed_on_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, report = watched(tmp_path, monkeypatch, f"8 {NOT_FINITE} fails")
    outcome = launch._outcome(folder, report, settings_of(), 1)
    assert not outcome.is_whole
    reason = "the script failed with RuntimeError: the data ended after 8 of 300 steps"
    assert outcome.reason == f"{reason}; the report has what was seen"


def changed_at(monkeypatch: pytest.MonkeyPatch, step: int, outcome: str) -> None:
    """Let the forecast from the script's first `step` steps have this outcome."""
    real = Following._forecast

    def forecast(self: Following, short: str) -> Any:
        found = real(self, short)
        return dataclasses.replace(found, outcome=outcome) if self.step == step else found

    monkeypatch.setattr(Following, "_forecast", forecast)


def test_a_run_that_trains_after_all_needs_no_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed_at(monkeypatch, 20, "plateau")
    folder, report = watched(tmp_path, monkeypatch, "1000")
    assert report.forecast is not None
    assert report.remedies is not None
    assert folder.steps() == 300
    assert (report.forecast.steps, report.forecast.outcome) == (300, "trains")
    assert report.verdict == "healthy"
    assert report.remedies.reason.startswith("nothing to rescue")
    assert any(note.startswith("after 20 steps the forecast was plateau: ") for note in report.notes)
    assert not any("copies were tried" in note for note in report.notes)


def test_a_run_that_seemed_to_fail_and_is_slow_gets_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed_at(monkeypatch, 300, "slow")
    _, report = watched(tmp_path, monkeypatch, FAILS)
    assert report.forecast is not None
    assert (report.forecast.steps, report.forecast.outcome) == (300, "slow")
    assert any(note.startswith("after 20 steps the forecast was diverges: ") for note in report.notes)
    assert statuses(report).total() == 9


def test_a_script_whose_warm_up_ends_while_it_is_followed_on_is_judged_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 20 steps, a copy at the full rate is tried, which fails here."""

    def fails(*arguments: Any) -> Any:
        return dataclasses.replace(forecast(*arguments), outcome="diverges", reason="the copy diverges")

    monkeypatch.setattr(following, "forecast", fails)
    folder, report = watched(tmp_path, monkeypatch, "1000 lr=0.01 warmup=100")
    assert report.forecast is not None
    assert folder.steps() == 300
    assert (report.forecast.steps, report.forecast.outcome) == (300, "trains")
    assert "after 20 steps the forecast was diverges: the copy diverges" in report.notes
    assert not any("the forecast is that of a copy" in note for note in report.notes)


def test_batches_that_find_no_room_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "KEPT_BYTES", 100_000)
    folder, report = watched(tmp_path, monkeypatch, FAILS)
    assert folder.steps() == 300
    few = "no remedy was tried over a whole run: that takes 300 batches, and there are "
    (num,) = (int(note.removeprefix(few)) for note in report.notes if note.startswith(few))
    assert 20 < num < 300


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let a stop come in the measurement after `step`."""
    real = Following._measure

    def measure(self: Following, num_steps: int | None = None) -> None:
        if self.step == step:
            raise Stopped
        real(self, num_steps)

    monkeypatch.setattr(Following, "_measure", measure)


@pytest.mark.parametrize(
    ("words", "reason"),
    [(FAILS, "the loss of the first batch went"), (f"{FAILS} warmup=1000", "as without one")],
)
def test_a_stop_while_the_script_is_followed_on_keeps_the_forecast(
    words: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, 80)
    folder, report = watched(tmp_path, monkeypatch, words)
    assert report.verdict == "will fail"
    assert report.forecast is not None
    assert report.remedies is None
    assert reason in report.forecast.reason
    assert folder.facts()["stopped"] == "the script was interrupted after 80 of 300 steps"
    assert report.cut_short == "the script was interrupted after 80 of 300 steps"
    assert report.notes[-1] == report.cut_short


def test_a_stop_is_not_said_to_be_the_end_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, 10)
    folder, report = watched(tmp_path, monkeypatch, "1000")
    assert report.forecast is not None
    assert report.forecast.reason == "only 10 of 20 steps were seen"
    outcome = launch._outcome(folder, report, settings_of(), 0)
    reason = "the script was interrupted after 10 of 20 steps; the report has what was seen"
    assert (outcome.is_whole, outcome.reason) == (False, reason)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_signals_to_the_script_itself_in_the_work_of_normscope_lose_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes while the report is stored because of the first; in a script, nothing follows."""
    measure, write = Following._measure, Folder.write_report

    def measured(self: Following, num_steps: int | None = None) -> None:
        measure(self, num_steps)
        if self.step == 10:
            signal.raise_signal(signal.SIGINT)

    def written(self: Folder, report: Report) -> None:
        if self.steps() == 9:
            signal.raise_signal(signal.SIGINT)
        write(self, report)

    monkeypatch.setattr(Following, "_measure", measured)
    monkeypatch.setattr(Folder, "write_report", written)
    with pytest.raises(KeyboardInterrupt) as raised:
        here.watched("tiny.py 1000", tmp_path, settings_of(), monkeypatch)
    assert isinstance(raised.value.__context__, here.Left)
    report = Folder(tmp_path).report()
    assert report is not None
    assert report.verdict == "interrupted"
    assert report.forecast is not None
    assert report.forecast.curve[-1].step == 10
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_other_processes_of_a_script_take_the_steps_that_are_followed(tmp_path: Path) -> None:
    class Polled(here.Watched):
        """A folder in which the process that reports moves the last step, and then is done."""

        def told(self, signal: str) -> bool:
            if counting.step >= 6:
                return True
            self.follow(counting.step + 2)
            return False

    folder = Polled(tmp_path)
    counting = Counting(None, folder, settings_of(steps=2))  # type: ignore[arg-type]
    assert [counting.after_step(skipped=0) for _ in range(6)] == [False] * 5 + [True]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are listed by /proc")
def test_ctrl_c_while_a_script_is_followed_on_shows_its_forecast(tmp_path: Path) -> None:
    words = ["check", "--format", "json", "--budget", "fast", "--try-remedies", "--", "python", "tiny.py"]
    process = subprocess.Popen(
        [sys.executable, "-m", "normscope", *words, *FAILS.split(), "pause=0.05"],
        cwd=here.SCRIPTS,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert any(FOLLOWED_ON in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    output, said = process.communicate(timeout=60)
    report = json.loads(output)
    assert process.returncode == 130, said
    assert report["verdict"] == "will fail"
    assert report["forecast"]["steps"] >= 20
    assert report["remedies"] is None
    assert os.listdir(tmp_path) == []
