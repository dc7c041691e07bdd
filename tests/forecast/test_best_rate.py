"""The learning rate to use, from the curves of a ladder."""

import dataclasses
import math
import random

import pytest

from normscope.forecast import Forecast, ForecastStep, LadderForecast
from normscope.forecast.best_rate import (
    ALIKE,
    CANDIDATES,
    KEPT,
    MOST_BETWEEN,
    best_rate,
    candidates,
    end_loss,
    lowest,
)
from normscope.option_values import rates
from normscope.report.rescue import rate_to_use
from normscope.train import CRITERION_STEPS

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
FIRST = 6.0


def rung(lr: float, half: float, last: float, outcome: str = "trains", warmup: int = 0) -> Forecast:
    """A trial of 40 steps with these losses of the fixed batch after 20 and 40."""
    steps = ((0, FIRST), (20, half), (30, (half + last) / 2), (40, last))
    curve = tuple(ForecastStep(step, loss, loss, {"decoder": 0.1}) for step, loss in steps)
    return Forecast(outcome, "so", "adamw", lr, warmup, 40, 3.0, curve, 1.0)  # type: ignore[arg-type]


def ladder(best: float, bend: float = 0.2, rates: tuple[float, ...] = RATES) -> list[Forecast]:
    """Rungs whose predicted loss is a parabola in log₂ of the rate with its lowest point at `best`."""
    doublings = math.log2(CRITERION_STEPS / 40)
    rungs = []
    for rate in rates:
        end = 3.0 + bend * math.log2(rate / best) ** 2
        last = 4.0 + 0.1 * math.log2(rate / best)
        rungs.append(rung(rate, last * (last / end) ** (1 / (KEPT * doublings)), last))
    return rungs


def test_the_loss_falls_on_by_the_kept_share_of_the_last_doubling() -> None:
    doublings = math.log2(CRITERION_STEPS / 40)
    assert end_loss(rung(1e-3, 5.0, 4.5)) == pytest.approx(4.5 * 0.9 ** (KEPT * doublings))
    assert end_loss(rung(1e-3, 0.5, -0.5)) == pytest.approx(-0.5 - KEPT * doublings)
    longer = dataclasses.replace(rung(1e-3, 5.0, 4.5), curve=_stretched(rung(1e-3, 5.0, 4.5), 20))
    assert end_loss(longer) == pytest.approx(4.5)


def _stretched(one: Forecast, times: int) -> tuple[ForecastStep, ...]:
    return tuple(dataclasses.replace(step, step=times * step.step) for step in one.curve)


def test_a_fall_during_a_warm_up_counts_for_more_doublings() -> None:
    bare, ramped = (end_loss(rung(1e-3, 5.0, 4.5, warmup=ramp)) for ramp in (0, 40))
    assert bare is not None
    assert ramped is not None
    assert bare < ramped < 4.5


@pytest.mark.parametrize("best", [3e-4, 5e-4, 1e-3, 2e-3, 3e-3])
def test_a_parabola_has_its_vertex_between_the_rates(best: float) -> None:
    found = best_rate(ladder(best))
    assert found.rate == pytest.approx(best, rel=1e-6)
    assert found.low is not None
    assert found.high is not None
    assert RATES[0] <= found.low < best < found.high <= RATES[-1]
    assert found.reason == "the lowest loss predicted for 300 steps"


def test_the_range_holds_the_rates_that_are_nearly_as_good_and_no_others() -> None:
    narrow, wide = best_rate(ladder(1e-3, bend=1.0)), best_rate(ladder(1e-3, bend=0.05))
    assert narrow.high is not None
    assert wide.high is not None
    assert narrow.low is not None
    assert narrow.high / narrow.low < 3 < wide.high / (wide.low or 1)


def test_the_range_ends_where_the_fall_is_smaller_by_its_share() -> None:
    rungs = ladder(1e-3, bend=0.5)
    found, ends = best_rate(rungs), [end_loss(one) for one in rungs]
    level = 3.0 + ALIKE * (FIRST - 3.0)
    (low, high), (lower, higher) = (RATES[1], RATES[2]), (ends[1], ends[2])
    assert found.low is not None
    share = (math.log2(found.low) - math.log2(low)) / (math.log2(high) - math.log2(low))
    assert lower is not None
    assert higher is not None
    assert lower + share * (higher - lower) == pytest.approx(level)


def test_a_rate_that_fails_is_not_used_however_low_its_loss() -> None:
    rungs = ladder(1e-2)
    rungs[-1] = dataclasses.replace(rungs[-1], outcome="collapses")
    found = best_rate(rungs)
    assert found.rate == pytest.approx(3e-3)
    assert found.high == pytest.approx(3e-3)
    assert found.reason == "the largest rate that does not fail"


@pytest.mark.parametrize(
    ("best", "rate", "end", "on"),
    [(1e-6, 1e-4, "smallest", "1e-05:0.0001:4"), (1.0, 1e-2, "largest", "0.01:0.1:4")],
)
def test_a_lowest_loss_at_an_end_says_so_and_how_to_go_on(
    best: float, rate: float, end: str, on: str
) -> None:
    found = best_rate(ladder(best))
    assert found.rate == pytest.approx(rate)
    assert found.reason.startswith(f"the {end} rate that was tested; a {end.removesuffix('st')}r one may be")
    assert found.reason.endswith(f": --rates {on}")
    assert len(rates(on)) == 4
    assert any(lr == pytest.approx(rate) for lr in rates(on)), "the end itself is tried again"


def test_no_rate_without_a_healthy_rung() -> None:
    failing = [dataclasses.replace(one, outcome="collapses") for one in ladder(1e-3)]
    assert best_rate(failing).rate is None
    assert best_rate([]).reason == "none of the tested rates is known to train"
    slow = [dataclasses.replace(one, outcome="slow") for one in ladder(1e-3)]
    assert best_rate(slow).rate is None


def only(healthy: int) -> list[Forecast]:
    """A ladder whose rungs collapse, but for the `healthy` lowest."""
    rungs = ladder(1e-3)
    return rungs[:healthy] + [dataclasses.replace(one, outcome="collapses") for one in rungs[healthy:]]


def test_of_two_healthy_rungs_the_better_one_is_named() -> None:
    rungs = only(2)
    found = best_rate(rungs)
    assert found.rate == pytest.approx(rungs[1].lr)
    assert found.low is not None
    assert found.high is not None
    assert rungs[0].lr < found.low < found.rate <= found.high < rungs[2].lr
    assert found.reason == "the largest rate that does not fail"


def test_one_healthy_rung_has_a_rate_without_a_range() -> None:
    found = best_rate(only(1))
    assert (found.rate, found.low, found.high) == (ladder(1e-3)[0].lr, None, None)
    words = rate_to_use(LadderForecast(tuple(only(1)), found.rate, "not needed", 0, found))
    assert words == (
        "learning rate 0.0001, without a warm-up: the only tested rate that does not fail; "
        "test others near it: --rates 3.16e-05:0.000316:4"
    )


def test_a_trial_that_stopped_early_or_has_no_finite_loss_predicts_nothing() -> None:
    one = rung(1e-3, 5.0, 4.5)
    assert end_loss(dataclasses.replace(one, curve=one.curve[:2])) is None
    assert end_loss(rung(1e-3, 5.0, math.inf)) is None


def test_the_lowest_point_lies_between_the_neighbours_of_the_lowest_value() -> None:
    draw = random.Random(0)
    for _ in range(200):
        places = sorted(draw.uniform(-10, 0) for _ in range(6))
        values = [draw.uniform(0, 5) for _ in places]
        i = values.index(min(values))
        found = lowest(places, values)
        assert places[max(0, i - 1)] <= found <= places[min(len(places) - 1, i + 1)]


def test_a_warm_up_that_is_longer_than_the_trial_was_not_in_it() -> None:
    bare, longer = ladder(1e-3), [dataclasses.replace(one, warmup=500) for one in ladder(1e-3)]
    assert [one.trial_warmup for one in longer] == [0] * len(longer)
    assert best_rate(longer) == best_rate(bare)
    helped = dataclasses.replace(longer[0], outcome="needs-warmup")
    assert helped.trial_warmup == helped.steps // 2
    assert best_rate([dataclasses.replace(one, outcome="needs-warmup") for one in longer]).rate is not None
    assert dataclasses.replace(bare[0], warmup=7).trial_warmup == 7


def test_a_trial_that_stopped_half_way_is_no_candidate() -> None:
    rungs = ladder(1e-3)
    short = tuple(step for step in rung(1e-3, 2.0, 1.0).curve if step.step <= 20)
    short = (*short[:1], dataclasses.replace(short[1], step=10), dataclasses.replace(short[1], step=20))
    stopped = dataclasses.replace(
        rungs[0], curve=(short[0], short[1], dataclasses.replace(short[2], loss=0.5))
    )
    assert end_loss(stopped) is not None
    assert best_rate([stopped, *rungs[1:]]).rate == pytest.approx(1e-3, rel=1e-6)


def test_a_rate_that_was_tested_is_named_without_an_error_of_rounding() -> None:
    """2 ** log2(0.02) is 0.020000000000000004."""
    rates = (5e-3, 1e-2, 2e-2)
    assert best_rate([rung(rate, 5.0, 4.0 - rate) for rate in rates]).rate == 2e-2


def test_an_undecided_rate_is_named_only_if_there_is_a_loss_to_beat() -> None:
    """normscope's own noise with random labels has none."""
    undecided = [dataclasses.replace(each, outcome="undecided") for each in ladder(1e-3)]
    assert best_rate(undecided).rate == pytest.approx(1e-3, rel=1e-6)
    noise = [dataclasses.replace(each, unigram_entropy=None) for each in undecided]
    assert best_rate(noise).rate is None


def test_a_rate_beside_shorter_trials_is_no_end_of_what_was_tested() -> None:
    rungs = ladder(1e-3)
    halves = [dataclasses.replace(r, curve=tuple(s for s in r.curve if s.step <= 20)) for r in rungs]
    assert best_rate([*halves[:2], *rungs[2:]]).reason == "the lowest loss predicted for 300 steps"
    assert best_rate([*rungs[:3], *halves[3:]]).reason == "the lowest loss predicted for 300 steps"
    failing = [dataclasses.replace(each, outcome="collapses") for each in halves[3:]]
    assert best_rate([*rungs[:3], *failing]).reason == "the largest rate that does not fail"


def test_one_rung_that_is_undecided_says_so() -> None:
    one = [dataclasses.replace(each, outcome="undecided") for each in only(1)[:1]]
    assert "(its trial is undecided)" in best_rate(one).reason


def test_a_long_trial_is_compared_by_its_mean_loss() -> None:
    """One batch differs from the others by more than good rates do."""
    short = rung(1e-3, 5.0, 4.5)
    apart = tuple(dataclasses.replace(s, recent_loss=s.loss - 1) for s in short.curve)
    stretched = _stretched(dataclasses.replace(short, curve=apart), 4)
    doublings = math.log2(CRITERION_STEPS / 160)
    assert end_loss(dataclasses.replace(short, curve=apart)) == end_loss(short)
    found = end_loss(dataclasses.replace(short, curve=stretched))
    assert found == pytest.approx(3.5 * (3.5 / 4) ** (KEPT * doublings))


def test_the_candidates_have_the_lowest_predicted_losses_and_do_not_fail() -> None:
    rungs = ladder(4e-4, rates=(1e-5, 3e-5, *RATES))
    assert [rung.lr for rung in candidates(rungs)] == [3e-4, 1e-3, 1e-4, 3e-3]
    assert len(candidates(rungs)) == CANDIDATES
    failing = [dataclasses.replace(each, outcome="collapses") for each in rungs]
    assert candidates(failing) == []
    assert [each.lr for each in candidates([*failing[:-1], rungs[-1]])] == [1e-2]


NINE = tuple(1e-4 * 2**k for k in range(9))


@pytest.mark.parametrize(
    ("outcome", "tokens", "is_tried"),
    [
        ("trains", True, True),
        ("slow", True, True),
        ("plateau", False, True),  # noise hides that batches agree
        ("plateau", True, False),
        ("collapses", True, False),
        ("diverges", False, False),
    ],
)
def test_a_rate_between_the_candidates_is_tried_again_too(outcome: str, tokens: bool, is_tried: bool) -> None:
    """The loss is a valley: at a rate within it, the loss was predicted badly."""
    rungs = ladder(NINE[4], rates=NINE)
    rungs = [dataclasses.replace(each, tokens=tokens) for each in rungs]
    hidden = dataclasses.replace(rung(NINE[4], 5.0, 5.0, outcome), tokens=tokens)
    chosen = candidates([*rungs[:4], hidden, *rungs[5:]])
    assert {each.lr for each in chosen} == {*NINE[2:4], *NINE[5:7], *(NINE[4:5] if is_tried else ())}
    outside = dataclasses.replace(rung(NINE[0], 5.0, 5.0, outcome), tokens=tokens)
    assert outside not in candidates([outside, *rungs[1:]])


@pytest.mark.parametrize("healthy", [0, 1, 3, 4])
def test_rates_that_may_only_seem_stuck_fill_the_places_of_the_candidates(healthy: int) -> None:
    """Noise of values hides at first that batches agree, so that few rates may seem to train."""
    fine = [
        dataclasses.replace(r, tokens=False, certainty=0.8) for r in ladder(NINE[1], rates=NINE[:healthy])
    ]
    stuck = [_stuck(lr, 5.0 + k / 10, 0.3) for k, lr in enumerate(NINE[4:9])]
    found = candidates([*fine, *reversed(stuck)])
    assert found[:healthy] == sorted(fine, key=lambda each: end_loss(each) or 0.0)
    assert found[healthy:] == stuck[: CANDIDATES - healthy]


@pytest.mark.parametrize("change", [{"certainty": 0.05}, {"tokens": True}, {"outcome": "collapses"}])
def test_rates_that_are_stuck_are_not_tried_again(change: dict[str, object]) -> None:
    stuck = _stuck(1e-3, 5.0, 0.3)
    assert candidates([stuck]) == [stuck]
    assert candidates([dataclasses.replace(stuck, **change)]) == []  # type: ignore[arg-type]


def _stuck(lr: float, loss: float, certainty: float) -> Forecast:
    """A trial on values that seems stuck, on which the forecast is so certain that it trains."""
    return dataclasses.replace(rung(lr, loss, loss, "plateau"), tokens=False, certainty=certainty)


def test_of_many_rates_between_the_candidates_those_with_the_lowest_losses_are_tried() -> None:
    rungs = ladder(NINE[4], rates=NINE)
    ends = [
        dataclasses.replace(each, lr=lr) for each, lr in zip(rungs[3:7], (*NINE[:2], *NINE[7:]), strict=True)
    ]
    inside = [rung(lr, 5.0 + k / 10, 5.0 + k / 10) for k, lr in enumerate(NINE[2:7])]
    found = candidates([*ends, *inside])
    assert found[:CANDIDATES] == sorted(ends, key=lambda each: end_loss(each) or 0.0)
    assert found[CANDIDATES:] == inside[:MOST_BETWEEN]


def test_the_first_trials_of_a_refined_ladder_do_not_count() -> None:
    rungs = ladder(1e-3)
    again = [dataclasses.replace(r, curve=_stretched(r, 3)) for r in ladder(3e-4)[1:4]]
    found = best_rate([rungs[0], *again, rungs[4]])
    assert found.rate == best_rate(again).rate
    failing = [dataclasses.replace(each, outcome="plateau") for each in again]
    left = [rungs[0], *failing, rungs[4]]
    assert best_rate(left).rate == best_rate([rungs[0], rungs[4]]).rate, "a failing trial is no measure"


def test_a_whole_run_beside_refined_rates_counts_like_them() -> None:
    short, again = ladder(1e-2), [_as_long(r, 160) for r in ladder(1e-4)[:3]]
    whole = _as_long(ladder(1e-4)[3], CRITERION_STEPS)
    rungs = [*again, whole, short[4]]
    assert best_rate(rungs, 160).rate == pytest.approx(1e-4), "not the short one at 1e-2"
    assert best_rate([whole, *short[:3]], 160).rate == whole.lr, "nothing refined is left"
    assert best_rate(short, 160) == best_rate(short), "no longer trial could be made"


def _as_long(one: Forecast, steps: int) -> Forecast:
    curve = tuple(dataclasses.replace(step, step=step.step * steps // 40) for step in one.curve)
    return dataclasses.replace(one, steps=steps, curve=curve)


def test_where_nothing_can_be_named_nothing_is_tried_again() -> None:
    rungs = [dataclasses.replace(each, outcome="undecided") for each in ladder(1e-3)]
    assert candidates(rungs), "the loss to beat may be got under"
    unknown = [dataclasses.replace(each, unigram_entropy=None) for each in rungs]
    assert candidates(unknown) == []
    assert best_rate(unknown).rate is None
    assert candidates([dataclasses.replace(unknown[0], outcome="trains"), *unknown[1:]])


def test_a_whole_run_is_compared_by_its_loss_at_the_steps_of_the_others() -> None:
    """The extrapolated losses of the others are too high, so that its loss at the end would win."""
    again = [_as_long(r, 160) for r in ladder(3e-4)]
    early = again[4]
    ended = tuple(
        dataclasses.replace(early.curve[-1], step=step, loss=1.0, recent_loss=1.0) for step in (290, 300)
    )
    whole = dataclasses.replace(early, steps=CRITERION_STEPS, curve=(*early.curve, *ended))
    assert best_rate([*again[:4], whole], 160).rate == best_rate(again, 160).rate
    assert best_rate([*again[:4], whole]).rate == whole.lr


@pytest.mark.parametrize(("loss", "is_one"), [(3.9, True), (4.6, False)])
def test_a_trial_that_stopped_half_way_is_a_candidate_if_it_was_ahead(loss: float, is_one: bool) -> None:
    """The trials of 40 steps are measured after 20; this one stopped there."""
    whole = [dataclasses.replace(rung(lr, 4.5, 4.0), curve=_finely(4.5, 4.0)) for lr in RATES[:2]]
    stopped = dataclasses.replace(rung(1e-3, loss, loss), curve=_finely(loss, loss)[:3])
    assert (stopped in candidates([*whole, stopped])) == is_one
    assert candidates([stopped]) == [stopped], "there is nothing else"
    assert stopped not in candidates([*whole, dataclasses.replace(stopped, outcome="collapses")])


def _finely(half: float, last: float) -> tuple[ForecastStep, ...]:
    steps = ((0, FIRST), (10, 5.0), (20, half), (30, (half + last) / 2), (40, last))
    return tuple(ForecastStep(step, loss, loss, {"decoder": 0.1}) for step, loss in steps)
