"""The view of a run: the curve, and the view for terminals and pipes."""

import math
import sys
from types import SimpleNamespace

import pytest

from normscope.train.view import CURVE, WIDE, Bar, Lines, View, curve, num_bars, state_of, watching


@pytest.mark.parametrize("length", [1, 2, CURVE - 1, CURVE, CURVE + 1, 100, 300])
def test_the_curve_falls_with_the_losses_in_so_many_bars(length: int) -> None:
    bars = curve([float(length - i) for i in range(length)])
    assert len(bars) <= CURVE
    assert list(bars) == sorted(bars, reverse=True)
    if length > 1:
        assert (bars[0], bars[-1]) == ("█", "▁")


def test_the_curve_marks_what_is_no_number_and_stands_level_for_equal_losses() -> None:
    assert curve([1.0, 1.0, math.nan, math.inf, -math.inf]) == "▁▁×××"
    assert curve([]) == ""


def test_the_state_shows_what_there_is() -> None:
    trial, subject = SimpleNamespace(losses=[2.0, 4.0]), SimpleNamespace(unigram_entropy=None)
    run = SimpleNamespace(trial=trial, subject=subject, validations=[])
    assert state_of(run) == "loss 3.000"
    run.validations.append((2, 2.5))
    subject.unigram_entropy = 3.25
    assert state_of(run) == "loss 3.000  unigram 3.250  validation 2.500"


def test_one_process_speaks_in_lines_to_a_pipe_and_a_bar_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with watching(False) as view:
        assert type(view) is View
    with watching(True) as view:
        assert type(view) is Lines
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with watching(True) as view:
        assert type(view) is Bar


@pytest.mark.parametrize("columns", [80, 90, WIDE - 1, WIDE])
def test_curve_figures_and_time_fit_the_terminal(columns: int) -> None:
    losses = [float(i % 7) for i in range(3000)]
    words = f"9999/10000  {curve(losses, num_bars(columns))}  loss 5.123  unigram 3.172  validation 5.123"
    bar = 21 if columns >= WIDE else 0
    assert bar + len(words) + len(" 0:00:00") <= columns
