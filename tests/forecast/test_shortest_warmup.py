"""The shortest warm-up that helps, and whether it is in the rate to use."""

import pytest

from normscope.forecast import BestRate, Forecast, ForecastStep, LadderForecast
from normscope.forecast.best_rate import best_rate
from normscope.forecast.warmup import Warmup, beside_trial, shortest_warmup, with_warmup
from normscope.train import Recipe

FIRST = 6.0


def said(lr: float, last: float, outcome: str = "trains", warmup: int = 0, steps: int = 40) -> Forecast:
    """A trial whose loss falls to `last`, half of the fall in the first half."""
    losses = ((0, FIRST), (steps // 2, (FIRST + last) / 2), (steps - 10, last + 0.1), (steps, last))
    curve = tuple(ForecastStep(step, loss, loss, {"decoder": 0.1}) for step, loss in losses)
    return Forecast(outcome, "so", "adamw", lr, warmup, steps, 3.0, curve, 1.0)  # type: ignore[arg-type]


RUNGS = [said(3e-4, 4.6), said(1e-3, 4.4), said(3e-3, 4.5, "collapses")]


def rescue(last: float, warmup: int = 36) -> Warmup:
    return Warmup(f"{warmup} steps", warmup, (said(3e-3, last, warmup=warmup, steps=54),))


def test_a_warm_up_leads_where_no_rate_trains_without_one() -> None:
    none = BestRate(None, None, None, "none of the tested rates trains")
    found = with_warmup(none, rescue(4.4, 9))
    assert (found.rate, found.low, found.high, found.warmup) == (3e-3, None, None, 9)
    assert found.reason == "no tested rate trains without a warm-up"
    assert with_warmup(none, Warmup("does not help", None)) is none


def test_a_rate_that_trains_without_a_warm_up_goes_before_one_that_needs_it() -> None:
    best = best_rate(RUNGS)
    assert best.rate is not None
    assert with_warmup(best, rescue(3.0)) is best, "however low the trial with a warm-up is"


@pytest.mark.parametrize("outcome", ["undecided", "slow"])
def test_a_trial_that_decides_nothing_is_not_said_to_fail(outcome: str) -> None:
    found = shortest_warmup(
        Recipe(lr=3e-3, steps=36),
        RUNGS[2],
        lambda config: said(config.lr, 4.0, outcome, config.warmup, config.steps),
    )
    assert found.steps is None
    assert found.words == f"not known to help: the trial with one over 72 steps is {outcome}"


def test_the_shortest_that_helps_is_named_with_the_reason_of_the_failure() -> None:
    found = shortest_warmup(
        Recipe(lr=3e-3, steps=36),
        RUNGS[2],
        lambda config: said(config.lr, 4.0, "trains", config.warmup, config.steps),
    )
    assert (found.words, found.steps) == ("9 steps or more: without one, so", 9)
    assert found.rescued is found.trials[-1]


SLOW = "not tried: the trial at 0.01 is slow"
LONGER = "that trial takes 36 steps, and the run's takes 20 and says trains"
BARE = "that trial takes 36 steps without a warm-up, and the run's takes 20 with one of 5 and says trains"


@pytest.mark.parametrize(
    ("words", "steps", "ramps", "trial", "more"),
    [
        (SLOW, None, 0, ("trains", 0), LONGER),
        (SLOW, None, 0, ("trains", 5), BARE),
        (SLOW, None, 0, ("slow", 0), ""),
        ("9 steps or more: without one, so", 9, 1, ("trains", 0), LONGER),
        ("9 steps or more: without one, so", 9, 1, ("trains", 5), ""),
        ("9 steps or more: without one, so", 9, 1, ("diverges", 0), ""),
        ("not needed", 0, 0, ("trains", 0), ""),
    ],
)
def test_a_trial_that_is_no_row_is_told_from_the_runs_where_they_differ(
    words: str, steps: int | None, ramps: int, trial: tuple[str, int], more: str
) -> None:
    ladder = LadderForecast(tuple(RUNGS), 1e-3, words, steps, ramps=rescue(3.0).trials[:ramps])
    own = said(1e-2, 4.4, trial[0], trial[1], steps=20)
    found = beside_trial(ladder, own, 36)
    assert found.warmup == (f"{words}; {more}" if more else words)
    for rate in (1e-2, 9.99e-3):
        row = LadderForecast((said(rate, 4.4, "slow"),), None, words, steps)
        assert beside_trial(row, own, 36) is row, "the table shows that trial"
