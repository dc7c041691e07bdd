"""The loss to beat of the batches of a script's mean losses."""

from types import SimpleNamespace
from typing import Any

import pytest

from normscope.capture.script_baseline import ScriptBaseline
from normscope.forecast import ForecastStep
from normscope.subjects.without_input import LossesWithoutInput


class Kept(list):
    """Batches, called for an iterator as a script's are."""

    def __call__(self, start: int = 0) -> Any:
        return iter(self[start:])


def entered(num_forwards: list[int], num_losses: int, num_kept: int, *, known: bool = True) -> list[Any]:
    """The loss to beat after 10 and 30 steps; that of a batch is its number."""
    baseline, curve = ScriptBaseline(), []
    baseline.num_forwards += num_forwards
    for step, num_steps in ((10, 20), (30, 300)):
        baseline.measured(step, num_steps)
        curve.append(ForecastStep(step, 1.0, 1.0, {}, recent_loss=1.0))
    subject: Any = SimpleNamespace(without_input=LossesWithoutInput(float) if known else None)
    losses = [1.0] * num_losses
    return [each.recent_baseline for each in baseline.entered(curve, losses, subject, Kept(range(num_kept)))]


def test_it_is_that_of_the_batches_of_the_mean_loss() -> None:
    """The mean of 10 losses in a short trial, of 20 in a long one."""
    assert entered([1] * 30, 30, 30) == [sum(range(10)) / 10, sum(range(10, 30)) / 20]
    assert entered([2] * 30, 30, 60) == [sum(range(20)) / 20, sum(range(20, 60)) / 40]


def test_a_step_with_fewer_batches_counts_as_one_loss() -> None:
    """The last step of an epoch has fewer batches than the others: here the ninth and the last."""
    found = entered([2] * 8 + [1] + [2] * 20 + [1], 30, 58)
    steps = [*((2 * step + 2 * step + 1) / 2 for step in range(8)), 16.0]
    steps += [*((2 * step - 1 + 2 * step) / 2 for step in range(9, 29)), 57.0]
    assert found == [pytest.approx(sum(steps[:10]) / 10), pytest.approx(sum(steps[10:]) / 20)]


@pytest.mark.parametrize(
    ("num_forwards", "num_losses", "num_kept"),
    [
        ([1] * 30, 30, 29),  # a batch had no room
        ([1] * 30, 29, 30),  # a step was skipped whose loss is not finite
        ([1] * 30, 29, 29),  # both
        ([2] * 29 + [1], 30, 60),  # the last step of an epoch has fewer batches, and one was kept twice
    ],
)
def test_it_is_unknown_where_batches_and_losses_do_not_match(
    num_forwards: list[int], num_losses: int, num_kept: int
) -> None:
    assert entered(num_forwards, num_losses, num_kept) == [None, None]
    assert entered([1] * 30, 30, 30, known=False) == [None, None]
