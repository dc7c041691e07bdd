"""Ctrl-C: one is raised, the others are dropped or wait."""

import signal

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
