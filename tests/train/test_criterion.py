"""The criterion for a trained run."""

import math

import pytest

from normscope.train import CRITERION_STEPS, LAST, last_loss, trains
from normscope.train.criterion import FALL, FALL_STEPS, outcome


@pytest.mark.parametrize(
    ("losses", "trained"),
    [
        ([9.0] * 280 + [2.9] * LAST, True),
        ([2.9] * 280 + [3.0] * LAST, False),
        ([9.0] * 280 + [2.0] * (LAST - 1) + [10.0], True),  # the mean: 2.4
        ([2.0] * 299 + [math.nan], False),
        ([2.0] * 299 + [math.inf], False),
        ([2.0] * 299 + [-math.inf], False),
        ([math.nan] + [2.0] * 299, True),
        ([2.0], True),
        ([], False),
    ],
)
def test_trains_is_the_last_losses_a_tenth_of_a_nat_under_the_unigram_entropy(
    losses: list[float], trained: bool
) -> None:
    assert trains(losses, 3.0 + 1e-9) is trained


def test_the_last_loss_is_the_mean_of_the_last() -> None:
    assert last_loss([100.0, *range(LAST)]) == pytest.approx((LAST - 1) / 2)
    assert math.isnan(last_loss([]))


ABOVE = [4.0] * LAST


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([2.0] * 5, "trained"),
        ([4.0] * (CRITERION_STEPS - 1), "not yet trained"),
        ([4.0] * CRITERION_STEPS, "did not train"),
        ([4.0 + 1.1 * FALL] * CRITERION_STEPS + [4.0] * (FALL_STEPS - LAST) + ABOVE, "not yet trained"),
        ([4.0 + 0.9 * FALL] * CRITERION_STEPS + [4.0] * (FALL_STEPS - LAST) + ABOVE, "did not train"),
        ([9.0] * CRITERION_STEPS + [4.0] * FALL_STEPS + ABOVE, "did not train"),
        ([math.nan] * CRITERION_STEPS + [4.0] * (FALL_STEPS - LAST) + ABOVE, "did not train"),
        ([4.0] * 50 + [math.nan], "did not train"),
        ([math.nan] * CRITERION_STEPS, "did not train"),
    ],
)
def test_a_run_that_is_young_or_still_falls_has_not_failed(losses: list[float], expected: str) -> None:
    assert outcome(losses, 3.0) == expected
