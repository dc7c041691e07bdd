"""Seconds of stages: what a stage took, also where it fails, and a second time."""

from collections.abc import Callable

import pytest

from normscope import timing
from normscope.timing import timed


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that moves the clock."""
    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


def test_a_stage_has_its_own_seconds(wait: Callable[[float], None]) -> None:
    cost: dict[str, float] = {}
    wait(5.0)
    with timed(cost, "reading"):
        wait(0.25)
    wait(5.0)
    with timed(cost, "function"):
        wait(1.00004)
    assert cost == {"reading": 0.25, "function": 1.0}


def test_a_stage_that_comes_again_adds_its_seconds(wait: Callable[[float], None]) -> None:
    cost: dict[str, float] = {}
    for seconds in (0.5, 2.0):
        with timed(cost, "reading"):
            wait(seconds)
    assert cost == {"reading": 2.5}


def test_a_stage_that_fails_has_its_seconds(wait: Callable[[float], None]) -> None:
    cost: dict[str, float] = {}

    def fail() -> None:
        with timed(cost, "reading"):
            wait(0.5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert cost == {"reading": 0.5}
