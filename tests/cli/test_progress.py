"""Progress of long commands: lines where stderr is no terminal."""

import re
import time

import pytest

from normscope.cli import progress
from normscope.cli.progress import QUIET_SECONDS, progress_bar

SOON = 5.0


def waited_for(count: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines on stderr, as soon as there are `count`."""
    seen, deadline = "", time.monotonic() + SOON
    while seen.count("\n") < count and time.monotonic() < deadline:
        time.sleep(0.01)
        seen += capsys.readouterr().err
    return seen.splitlines()


def test_long_work_prints_a_line_for_each_new_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.05)
    with progress_bar() as tell:
        tell("forecast, step 3 of 20", 1, 4)
        (first,) = waited_for(1, capsys)
        time.sleep(0.2)  # the same stage goes on
        assert capsys.readouterr().err == ""
        tell("rates", 2, 4)
        (second,) = waited_for(1, capsys)
    assert re.fullmatch(r"normscope: forecast, step 3 of 20 \(\d+ s so far\)", first)
    assert re.fullmatch(r"normscope: rates \(\d+ s so far\)", second)


def test_work_of_a_few_seconds_prints_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert QUIET_SECONDS >= 10
    with progress_bar() as tell:
        tell("forecast", 1, 4)
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_log_that_is_full_does_not_end_the_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.05)
    called = []

    def full(words: str) -> None:
        called.append(words)
        raise OSError("No space left on device")

    monkeypatch.setattr("normscope.capture.launch.say", full)
    with progress_bar() as tell:
        for stage in ("anatomy", "forecast"):
            tell(stage, 1, 4)
            deadline = time.monotonic() + SOON
            while not any(stage in words for words in called) and time.monotonic() < deadline:
                time.sleep(0.01)
    assert [words.split()[0] for words in called] == ["anatomy", "forecast"]
