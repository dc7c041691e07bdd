"""Early stops on a ladder: which trials end half-way, and what larger rates say of lower ones."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from normscope.forecast.record import ForecastStep
from normscope.forecast.rule import Decision
from normscope.forecast.stopping import (
    best_place,
    certainty_by_larger,
    decided_by_larger,
    is_hasty,
    is_settled,
)
from normscope.forecast.thresholds import SUNK
from normscope.forecast.watch import WatchedTrial, _decided, _sure
from normscope.subjects.subject import Baseline
from normscope.train import Trials

NATS = Baseline(3.0)


def curve(*losses: float, diversity: float = 0.5) -> list[ForecastStep]:
    """Measurements every 9 steps, of the first loss and of these; the last has this diversity."""
    looks = [ForecastStep(0, None, 5.6, {"x": 0.5})]
    for i, loss in enumerate(losses, start=1):
        last = diversity if i == len(losses) else 0.5
        looks.append(ForecastStep(9 * i, loss, loss, {"x": last}, recent_loss=loss))
    return looks


@pytest.mark.parametrize(
    ("looks", "tokens", "settled"),
    [
        (curve(4.4, 3.5), True, False),
        (curve(3.4, 2.95), True, False),
        (curve(3.4, 2.85), True, True),
        (curve(9.0, 9.0), True, True),
        (curve(9.0, 9.0), False, False),
        (curve(4.0, math.nan), True, True),
        (curve(3.4, 3.2, diversity=SUNK * 0.9), True, False),
        (curve(3.4, 3.2, diversity=SUNK * 0.2), True, True),
        (curve(3.4, 3.2, diversity=SUNK * 0.2), False, False),
        (curve(3.4, 3.2, diversity=1e-11), False, True),
    ],
    ids=[
        *("falling", "hardly under the baseline", "learnt", "diverging", "risen values", "not finite"),
        *("nearly alike", "alike", "values nearly alike", "values alike"),
    ],
)
def test_a_trial_is_settled_only_if_its_outcome_is_clear(
    looks: list[ForecastStep], tokens: bool, settled: bool
) -> None:
    assert is_settled(looks, NATS, tokens=tokens, warmup=0) == settled


def test_without_a_baseline_no_trial_has_learnt() -> None:
    assert not is_settled(curve(3.4, 0.1), Baseline(None), tokens=True, warmup=0)


@pytest.mark.parametrize(
    ("ahead", "start", "tokens", "outcome"),
    [
        (2.99, 5.6, True, "trains"),
        (2.99, 3.1, False, "trains"),
        (3.01, 5.6, True, None),
        (3.99, 5.6, True, None),
        (4.01, 5.6, True, "slow"),
        (4.01, 9.3, True, None),
        (5.2, 9.3, True, "slow"),
        (5.2, 9.3, False, None),
    ],
)
def test_larger_rates_decide_far_from_the_baseline(
    ahead: float, start: float, tokens: bool, outcome: str | None
) -> None:
    """Far above is 1 nat, and a third of the first excess."""
    found = decided_by_larger(ahead, start, NATS, tokens=tokens)
    assert (found.outcome if found else None) == outcome
    if found is not None and found.score is not None:
        assert (found.score > 0) == (outcome == "trains")
        assert "not tried" in found.reason
    assert decided_by_larger(ahead, start, Baseline(None), tokens=tokens) is None


def test_distances_are_in_units_of_the_baseline() -> None:
    series = Baseline.of(None, 0.2)
    assert decided_by_larger(0.19, 0.3, series, tokens=False).outcome == "trains"  # type: ignore[union-attr]
    assert decided_by_larger(0.21, 0.3, series, tokens=False) is None


@pytest.mark.parametrize(("ahead", "certainty"), [(2.97, 0.97), (2.99, 0.75), (4.5, 0.04)])
def test_a_decision_by_larger_rates_is_sure_where_it_is_clear(ahead: float, certainty: float) -> None:
    found = decided_by_larger(ahead, 5.6, NATS, tokens=True)
    assert found is not None
    assert certainty_by_larger(found) == certainty


def test_the_best_place_has_the_lowest_predicted_loss() -> None:
    slow, fast, stalled = curve(5.0, 4.6), curve(4.4, 3.9), curve(3.8, 3.79)
    assert best_place({0: slow, 1: fast, 2: stalled}, 0) == 1, "3.79 is lower now, but falls no more"
    assert best_place({4: slow}, 0) == 4
    assert best_place({0: curve(4.0)}, 0) is None
    assert best_place({}, 0) is None


def watch(looks: list[ForecastStep], outcome: str = "trains", doubt: bool = False) -> WatchedTrial:
    settled = is_settled(looks, NATS, tokens=True, warmup=0)
    decision = SimpleNamespace(failed=outcome == "collapses", in_doubt=doubt)
    config = SimpleNamespace(warmup=0)
    return cast(
        WatchedTrial, SimpleNamespace(curve=looks, decision=decision, is_settled=settled, config=config)
    )


def test_settled_trials_stop_half_way_but_those_beside_the_best() -> None:
    learnt, open_ = curve(3.0, 2.8), curve(4.4, 3.5)
    sunk = curve(3.2, 3.1, diversity=1e-9)
    watches = [
        *(watch(learnt), watch(open_), watch(learnt), watch(curve(2.6, 2.0)), watch(learnt)),
        *(watch(learnt), watch(sunk, "collapses")),
    ]
    trials: Any = SimpleNamespace(live=list(range(len(watches))))
    assert _decided(cast(Trials, trials), watches, brief=False) == [0, 5, 6], "3 is the best, 1 is open"
    beside = [watch(curve(2.6, 2.0)), watch(sunk, "collapses")]
    trials.live = [0, 1]
    assert _decided(cast(Trials, trials), beside, brief=False) == [1], "a failure is no candidate"
    doubtful = [watch(open_, doubt=True), watch(open_)]
    assert _sure(cast(Trials, trials), doubtful) == [1]


def test_half_a_trial_is_hasty_where_it_is_in_doubt_or_promises_what_is_not_learnt() -> None:
    far, learnt = curve(4.4, 3.5)[-1], curve(3.4, 2.85)[-1]
    trains, slow = Decision("trains", ""), Decision("slow", "")
    assert is_hasty(trains, far, NATS)
    assert is_hasty(trains, learnt, Baseline(None)), "nothing shows that it has learnt"
    assert is_hasty(Decision("undecided", "", in_doubt=True), far, NATS)
    assert not is_hasty(trains, learnt, NATS)
    assert not is_hasty(slow, far, NATS)
    assert not is_hasty(Decision("undecided", ""), far, NATS)
