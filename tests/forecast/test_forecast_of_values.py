"""The rule on measured values (images, series), and on losses that are no cross-entropy."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from normscope.anatomy import read_anatomy
from normscope.forecast import forecast, rule
from normscope.forecast.certainty import UNSHOWN, certainty
from normscope.forecast.margins import rise
from normscope.forecast.record import ForecastStep
from normscope.forecast.rule import Decision
from normscope.forecast.thresholds import HELD, LEARNT, LONG, SHARED
from normscope.subjects import load
from normscope.subjects.subject import Baseline
from normscope.train import Recipe

Curve = list[ForecastStep]


def decide(curve: Sequence[ForecastStep], loss: float | None, **options: Any) -> Decision:
    """The decision with this loss to beat, of a mean cross-entropy."""
    return rule.decide(curve, Baseline.of(loss, None), **options)


def seen(first: float, recent: tuple[float, float], diversity: float, coherence: float | None) -> Curve:
    """A trial of 36 steps, with these mean losses half way and at the end."""
    half, last = recent
    return [
        ForecastStep(0, None, first, {"vision": 0.9}),
        ForecastStep(18, half, half, {"vision": diversity}, recent_loss=half),
        ForecastStep(36, last, last, {"vision": diversity}, coherence, alignment=0.0, recent_loss=last),
    ]


@pytest.mark.parametrize(
    ("curve", "baseline", "outcome"),
    [
        # measured: ladders that the rule was set on, and what 300 steps gave
        (seen(2.31, (2.297, 2.286), 0.9, 0.771), 2.304, "trains"),  # Pre-LN on digits, 5e-5: 1.8
        (seen(2.30, (2.298, 2.299), 0.9, 0.386), 2.299, "trains"),  # layer scale on digits, 5e-5: 2.0
        (seen(3.02, (1.203, 0.934), 4e-3, 0.623), 0.998, "trains"),  # Post-LN on a series, 5e-5: 0.24
        (seen(3.02, (1.022, 0.956), 2e-12, 0.032), 0.998, "collapses"),  # the same at 5e-3: 0.99
        (seen(2.37, (2.339, 2.330), 0.8, 0.472), 2.303, "plateau"),  # ViT on digits, 5e-3: 2.28
        (seen(2.30, (2.269, 2.291), 0.9, 0.210), 2.299, "plateau"),  # layer scale on digits, 5e-3: 2.29
        (seen(2.36, (2.327, 2.312), 1.0, 0.397), 2.300, "trains"),  # DeepNorm on digits, 5e-5: 2.11
        # made up
        (seen(4.50, (3.3, 2.9), 0.9, 0.5), 2.304, "trains"),  # it starts far above the baseline, and falls
        (seen(4.50, (3.95, 3.9), 0.9, 0.5), 2.304, "slow"),
        (seen(4.50, (3.2, 3.25), 0.9, 0.5), 2.304, "plateau"),
        (seen(9.50, (5.2, 5.25), 0.9, 0.5), 2.304, "plateau"),  # it has far to go, and its loss rises
        (
            seen(2.31, (2.305, 2.303), 0.9, 0.02),
            2.304,
            "plateau",
        ),  # labels that have nothing to do with the images
        (seen(2.31, (2.305, 1.9), 0.9, 0.02), 2.304, "trains"),  # it has learnt already
        (seen(2.31, (2.305, 2.303), 0.9, None), 2.304, "undecided"),
        (seen(2.31, (2.305, 2.303), 0.9, 0.9), None, "undecided"),
    ],
)
def test_batches_of_values_that_agree_train(curve: Curve, baseline: float | None, outcome: str) -> None:
    said = decide(curve, baseline, tokens=False)
    assert said.outcome == outcome
    assert (said.score is None) == (outcome == "undecided")
    if said.score is not None:
        assert (said.score > 0) == (outcome == "trains")
    assert "unigram" not in said.reason


def falling(fixed: Sequence[float], mean: float | Sequence[float], half: int = 18) -> Curve:
    """A trial of two halves, with these losses of the fixed batch and these means half-way and at the end."""
    means = (None, *(mean if isinstance(mean, Sequence) else (mean, mean)))
    return [
        ForecastStep(half * k, None, loss, {"series": 0.5}, 0.8, alignment=0.1, recent_loss=means[k])
        for k, loss in enumerate(fixed)
    ]


STEADY_FALL = (2.40, 2.384, 2.368)


@pytest.mark.parametrize(
    ("fixed", "mean", "outcome"),
    [
        (STEADY_FALL, 2.37, "trains"),  # 0.016 in 18 steps, and 264 are left: it gets 0.1 under 2.304
        (STEADY_FALL, (2.37, 2.38), "trains"),
        (STEADY_FALL, (2.37, 2.40), "plateau"),  # it has risen
        ((2.40, 2.398, 2.396), 2.37, "slow"),
        ((2.40, 2.38, 2.368), 2.37, "slow"),  # 0.6 of the fall before
        ((2.40, 2.36, 2.345), 2.37, "plateau"),  # the fall of the first steps ends, as at too large a rate
        ((2.40, 2.395, 2.397), 2.37, "plateau"),
        ((2.38, 2.39, 2.37), 2.37, "plateau"),
        ((2.40, 2.39999, 2.39998), 2.37, "plateau"),  # rounding
    ],
)
def test_a_slow_fall_needs_time(
    fixed: tuple[float, ...], mean: float | tuple[float, float], outcome: str
) -> None:
    """The mean losses of other batches hide it: that of the fixed batch shows it."""
    assert decide(falling(fixed, mean), 2.304, tokens=False).outcome == outcome


def test_a_slow_fall_is_never_sure_to_train() -> None:
    """Two falls tell little of the thirteen that are left."""
    said = decide(falling((2.55, 2.50, 2.45), 2.37), 2.304, tokens=False)
    assert said.outcome == "trains"
    assert said.score == pytest.approx(0.5)


def test_a_fall_in_a_warm_up_is_counted_in_steps_at_the_full_rate() -> None:
    """In 36 steps of a warm-up the second half has 13.75 of them, and the first 4.75."""
    assert decide(falling(STEADY_FALL, 2.37), 2.304, tokens=False, warmup=36).outcome == "plateau"
    curve = falling((2.500, 2.495, 2.4805), 2.504)
    expected = 0.2 - 0.0145 * 264 / 13.75 + LEARNT + HELD
    assert rise(curve, Baseline.of(2.304, None), 36) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fixed", "falls"),
    [
        ((2.55, 2.50, 2.46), [0.04 * 0.8**k for k in range(1, 14)]),
        ((2.50, 2.4955, 2.485), [0.0105] * 13),  # a fall that grows is taken to stay
        ((2.50, 2.47, 2.44), [(2.37 - 2.304 + LEARNT + HELD)]),  # at the baseline, not under it
    ],
)
def test_a_slow_fall_goes_on_as_the_last_ones_did(fixed: tuple[float, ...], falls: list[float]) -> None:
    """Each further half of the trial's steps, of which 13 are left, has the fall of the one before."""
    curve = falling(fixed, (2.385, 2.37), 20)
    expected = 2.37 - sum(falls) + LEARNT + HELD - 2.304
    assert rise(curve, Baseline.of(2.304, None)) == pytest.approx(expected, abs=1e-9)
    assert rise(curve[:2], Baseline.of(2.304, None)) is None, "there is no mean half-way"


@pytest.mark.parametrize(
    ("fixed", "before", "end"),
    [
        ((2.4, 2.399, 2.398), 2.41, 0.066 * (0.066 / 0.086) ** 13),
        ((2.4, 2.399, 2.398), 2.38, 0.066),  # noise may do that
        ((2.4, 2.3, 2.301), 2.41, 0.066),  # the fixed batch shows that the fall has ended
    ],
)
def test_the_excess_of_the_mean_loss_shrinks_on_by_a_factor(
    fixed: tuple[float, ...], before: float, end: float
) -> None:
    """0.02 of its fall is taken for noise."""
    assert rise(falling(fixed, (before, 2.37), 20), Baseline.of(2.304, None)) == pytest.approx(end)


@pytest.mark.parametrize(
    ("losses", "outcome"),
    [
        ((1.98, 2.12), "trains"),
        ((1.98, 2.19), "trains"),
        ((1.98, 2.21), "plateau"),
        ((2.30, 2.44), "plateau"),
    ],
)
def test_a_rise_to_a_loss_that_shows_learning_is_no_failure(
    losses: tuple[float, float], outcome: str
) -> None:
    """Under 2.3 by 0.1, the run uses its input: image models at large rates rise and fall like this."""
    said = decide(falling((2.40, 2.29, 2.29), losses), 2.3, tokens=False)
    assert said.outcome == outcome
    assert said.score is not None
    assert said.score <= 0.5, "it may lose what it has learnt"


def test_a_slow_fall_is_counted_in_units_of_the_loss() -> None:
    """A loss of a tenth, in a unit of a tenth, is the same run."""

    def run(scale: float) -> float | None:
        curve = falling([scale * loss for loss in STEADY_FALL], scale * 2.37)
        return rise(curve, Baseline(2.304 * scale, scale, False))

    assert run(0.1) == pytest.approx(run(1.0))


@pytest.mark.parametrize(
    ("diversity", "last", "is_shown"), [(5e-4, 2.30, False), (5e-3, 2.30, True), (5e-4, 2.19, True)]
)
def test_a_short_trial_whose_tokens_hardly_differ_must_show_by_its_loss_that_it_trains(
    diversity: float, last: float, is_shown: bool
) -> None:
    curve = seen(2.31, (2.305, last), diversity, 0.9)
    said = decide(curve, 2.304, tokens=False)
    assert (said.outcome, said.is_shown) == ("trains", is_shown)
    assert ("is not 0.1 under" in said.reason) == (not is_shown)
    found = certainty(said, curve)
    assert found is not None
    assert (found <= UNSHOWN) == (not is_shown)
    assert decide(curve, 2.304).is_shown, "tokens that hardly differ are another margin of ids"


def test_a_larger_rate_that_has_learnt_shows_that_the_batches_agree() -> None:
    """Under noise the pull is small at step 36 in runs that train."""
    curve = seen(2.31, (2.305, 2.303), 0.9, 0.05)
    assert decide(curve, 2.304, tokens=False).outcome == "plateau"
    assert decide(curve, 2.304, tokens=False, ahead=2.30).outcome == "plateau", "not clearly under it"
    said = decide(curve, 2.304, tokens=False, ahead=2.27)
    assert said.outcome == "trains"
    assert said.reason.endswith("a larger learning rate is under the loss without the input")
    assert said.score == pytest.approx((2.304 - 2.27 - 0.02) / 0.04)
    risen = seen(2.31, (2.305, 2.35), 0.9, 0.05)
    assert decide(risen, 2.304, tokens=False, ahead=2.25).outcome == "plateau", "its own loss rises"


def test_the_mean_loss_of_a_long_trial_shows_that_the_batches_agree() -> None:
    """Under noise the pull is small for longer than the loss is above that of a constant."""
    short = seen(2.31, (2.305, 2.24), 0.9, 0.05)
    long = tuple(dataclasses.replace(each, step=5 * each.step) for each in short)
    assert short[-1].step <= LONG < long[-1].step
    assert decide(short, 2.304, tokens=False).outcome == "plateau"
    said = decide(long, 2.304, tokens=False)
    assert said.outcome == "trains"
    assert "the mean loss of the last batches, 2.24, is under the loss without the input" in said.reason
    assert said.score == pytest.approx((2.304 - 2.24 - 0.02) / 0.04)
    assert decide(long, 2.25, tokens=False).outcome == "plateau", "not clearly under it"


def test_batches_that_agree_are_not_enough_in_a_long_trial() -> None:
    """Noisy batches can agree for as long as the loss stays at that of a constant."""
    short = seen(2.31, (2.306, 2.306), 0.9, 0.3)
    long = tuple(dataclasses.replace(each, step=5 * each.step) for each in short)
    assert decide(short, 2.304, tokens=False).outcome == "trains"
    said = decide(long, 2.304, tokens=False)
    assert said.outcome == "plateau"
    assert said.reason == (
        "the mean loss of the last batches is 2.31 after 180 steps, not clearly under the loss without the "
        "input, 2.304"
    )
    ahead = decide(long, 2.304, tokens=False, ahead=2.2)
    assert ahead.outcome == "trains"
    assert "a larger learning rate is under the loss without the input. But the mean loss" in ahead.reason


@pytest.mark.parametrize(("recent", "outcome"), [(2.15, "trains"), (2.25, "undecided")])
def test_a_long_trial_has_learnt_by_its_mean_loss(recent: float, outcome: str) -> None:
    """A batch of a masked language model can be above the entropy when the mean is well under it."""
    looks = [
        ForecastStep(step, loss, loss, {"x": 0.5}, 0.5, alignment=0.1, recent_loss=loss)
        for step, loss in ((0, 4.0), (70, 2.6))
    ]
    last = ForecastStep(140, 2.4, 2.2, {"x": 0.5}, 0.5, alignment=0.1, recent_loss=recent)
    assert decide([*looks, last], 2.304, hidden="mask").outcome == outcome
    short = dataclasses.replace(last, step=100)
    assert decide([*looks, short], 2.304, hidden="mask").outcome == "undecided"


def test_the_digits_that_normscope_brings_are_judged_as_images() -> None:
    spec = "nn:vision,scheme=pre,depth=2,width=16,heads=1,image=8,patch=4,channels=1"
    subject = load(spec, images="digits", batch_size=32, seed=0)
    said = forecast(subject, read_anatomy(subject), Recipe(lr=2e-3, steps=20))
    assert not said.tokens
    assert said.outcome == "trains"
    assert "under the loss without the input" in said.reason


def test_a_few_steps_decide_nothing() -> None:
    short = [dataclasses.replace(step, step=step.step // 4) for step in seen(2.31, (2.3, 2.3), 0.9, 0.9)]
    assert decide(short, 2.304, tokens=False).outcome == "undecided"


def test_the_score_grows_with_the_agreement_and_changes_its_sign_where_the_outcome_does() -> None:
    shares = [SHARED * k / 10 for k in range(1, 30) if k != 10]
    said = [decide(seen(2.31, (2.305, 2.303), 0.9, share), 2.304, tokens=False) for share in shares]
    scores = [each.score for each in said]
    assert None not in scores
    assert scores == sorted(scores)  # type: ignore[type-var]
    assert [each.outcome for each in said] == ["plateau"] * 9 + ["trains"] * 19


def in_units(curve: Curve, unit: float) -> Curve:
    def times(loss: float | None) -> float | None:
        return None if loss is None else unit * loss

    return [
        dataclasses.replace(
            each,
            loss=unit * each.loss,
            train_loss=times(each.train_loss),
            recent_loss=times(each.recent_loss),
        )
        for each in curve
    ]


@pytest.mark.parametrize("tokens", [True, False])
def test_the_unit_of_a_loss_changes_nothing(tokens: bool) -> None:
    dice = random.Random(0)
    outcomes = set()
    for _ in range(300):
        first, half = dice.uniform(0.9, 3), dice.uniform(0.7, 1.5)
        curve = seen(
            first, (half, half * dice.uniform(0.7, 1.1)), 10 ** dice.uniform(-7, 0), dice.random() / 2
        )
        ahead = dice.choice([None, dice.uniform(0.7, 1.3)])
        plain = decide(curve, 1.0, tokens=tokens, ahead=ahead)
        for unit in (2.0**-10, 2.0**13):
            for baseline in (Baseline.of(None, unit), Baseline.of(1.0, None, unit)):
                larger = None if ahead is None else unit * ahead
                scaled = rule.decide(in_units(curve, unit), baseline, tokens=tokens, ahead=larger)
                assert (scaled.outcome, scaled.score) == (plain.outcome, pytest.approx(plain.score))
        outcomes.add(plain.outcome)
    assert {"trains", "slow" if tokens else "plateau"} <= outcomes
