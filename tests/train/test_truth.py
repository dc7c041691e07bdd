"""What "trains" means."""

import math

import pytest

from normscope.train import LAST, last_loss, trains


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
