"""Ctrl-C: the first is raised or waits, the second is answered, a later one ends the work."""

import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable

import pytest

from normscope.interrupts import only_once, postponed


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_only_the_first_is_raised_and_the_handler_comes_back() -> None:
    handled = []
    with only_once():
        try:
            interrupt()
        except KeyboardInterrupt:
            interrupt()
            handled.append("to the end")
    assert handled == ["to the end"]
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_a_block_within_a_block_raises_no_second_one() -> None:
    with only_once():
        with pytest.raises(KeyboardInterrupt), only_once():
            interrupt()
        interrupt()


class Dying:
    """An object during whose end Ctrl-C comes."""

    def __del__(self) -> None:
        interrupt()


def watched() -> None:
    """End an object whose weak reference has a callback, during which Ctrl-C comes."""
    target = set[int]()
    reference = weakref.ref(target, lambda _: interrupt())
    del target
    assert reference() is None


@pytest.mark.parametrize("end", [Dying, watched])
def test_one_that_a_destructor_drops_is_raised_after_it(end: Callable[[], object]) -> None:
    hook = sys.unraisablehook
    seen = []
    with only_once():
        try:
            end()
            seen.append("went on")
            time.sleep(3)
        except KeyboardInterrupt:
            seen.append("raised")
            interrupt()
            time.sleep(0.1)
            seen.append("to the end")
    assert seen == ["went on", "raised", "to the end"]
    assert sys.unraisablehook is hook


def test_another_error_of_a_destructor_is_still_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __del__(self) -> None:
            raise OSError("a file is gone")

    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: seen.append(error.exc_type))
    with only_once():
        Failing()
    assert seen == [OSError]


def test_a_postponed_one_tells_at_once_and_is_raised_at_the_end() -> None:
    told = []

    def twice() -> None:
        with postponed(lambda: told.append("told")):
            interrupt()
            interrupt()
            told.append("end")

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert told == ["told", "told", "end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with postponed(lambda: told.append("never")):
        pass
    assert "never" not in told


def test_what_a_caller_ignores_stays_ignored() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with only_once(), postponed(lambda: pytest.fail("told")):
            interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that answers the second Ctrl-C counts as read at once."""
    monkeypatch.setattr("normscope.interrupts._PATIENCE", -1.0)


@pytest.mark.usefixtures("at_once")
def test_the_second_is_answered_and_the_third_raised(capfd: pytest.CaptureFixture[str]) -> None:
    with only_once():
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        assert capfd.readouterr().err == ""
        interrupt()
        assert "one more Ctrl-C ends it at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        assert capfd.readouterr().err == ""


def test_those_of_a_key_that_is_held_down_are_ignored(capfd: pytest.CaptureFixture[str]) -> None:
    with only_once():
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        for _ in range(5):
            interrupt()
    assert capfd.readouterr().err.count("still stopping") == 1


@pytest.mark.usefixtures("at_once")
def test_the_third_ends_also_work_that_postpones_the_first() -> None:
    seen = []

    def three_times() -> None:
        with postponed(lambda: seen.append("told")):
            interrupt()
            interrupt()
            seen.append("answered")
            interrupt()
            seen.append("never")

    with only_once(), pytest.raises(KeyboardInterrupt):
        three_times()
    assert seen == ["told", "answered"]


@pytest.mark.usefixtures("at_once")
def test_the_second_in_work_after_the_first_does_not_end_it() -> None:
    seen = []
    with only_once():
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        with postponed(lambda: None):
            interrupt()
            seen.append("written")
        seen.append("went on")
    assert seen == ["written", "went on"]


HANGING = """
import signal
import normscope.interrupts

normscope.interrupts._PATIENCE = -1.0
with normscope.interrupts.only_once(ends_process=True):
    for _ in range(2):
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:
            print("caught", flush=True)
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        print("caught", flush=True)
"""


def test_the_third_kills_a_process_that_catches_everything() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "caught\n"
    assert "still stopping" in done.stderr
