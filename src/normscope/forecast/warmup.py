"""The shortest warm-up with which a failing learning rate does not fail within a trial.

A trial takes the whole linear ramp and then `REST` of a trial's usual length at the full rate. The first ramp
is as long as a trial of a ladder. If it helps, shorter ones are tried until one fails; if it does not, longer
ones until one helps. A trial whose tokens have become alike stops early. The result is a lower bound: a run
may still fail after the trial. docs/forecast-rates.md has the evidence.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from normscope.forecast.record import BestRate, Forecast, LadderForecast, is_same_rate
from normscope.train import Recipe

LENGTHS = (0.25, 0.5, 1.0, 2.0)
"""Ramps that may be tried, in lengths of a trial; the first one is as long as a trial."""
REST = 0.5
"""Steps at the full rate after the ramp, in lengths of a trial."""


@dataclass(frozen=True)
class Warmup:
    """The result of the trials with a warm-up.

    Attributes:
        words: the result as a sentence that follows "warm-up".
        steps: length of the shortest that helps; 0 where none is needed, None where none is known to help.
        trials: forecasts with a warm-up, in the order in which they were tried.
    """

    words: str
    steps: int | None
    trials: tuple[Forecast, ...] = ()

    @property
    def rescued(self) -> Forecast | None:
        """The forecast with the shortest warm-up that helps."""
        helped = [trial for trial in self.trials if trial.trains]
        return min(helped, key=lambda trial: trial.warmup, default=None)


def shortest_warmup(config: Recipe, without: Forecast, attempt: Callable[[Recipe], Forecast]) -> Warmup:
    """Search the warm-up of `config.lr`, which fails without one.

    Args:
        config: of a trial without a warm-up, of the usual length.
        without: the forecast without a warm-up.
        attempt: makes a forecast of a recipe.
    """
    lengths = [max(1, round(length * config.steps)) for length in LENGTHS]
    rest, place = max(1, round(REST * config.steps)), LENGTHS.index(1.0)
    trials = [attempt(_ramped(config, lengths[place], rest))]
    shorter = trials[0].trains
    following = reversed(lengths[:place]) if shorter else iter(lengths[place + 1 :])
    for length in following:
        trials.append(attempt(_ramped(config, length, rest)))
        if trials[-1].trains != shorter:
            break
    return _result(without, tuple(trials))


def _ramped(config: Recipe, warmup: int, rest: int) -> Recipe:
    steps = max(warmup + rest, config.steps)
    return dataclasses.replace(config, steps=steps).with_warmup(warmup)


def _result(without: Forecast, trials: tuple[Forecast, ...]) -> Warmup:
    found = Warmup("", None, trials)
    if found.rescued is not None:
        steps = found.rescued.warmup
        return Warmup(f"{steps} steps or more: without one, {without.reason}", steps, trials)
    longest = max(trials, key=lambda trial: trial.warmup)
    if longest.failed:
        words = f"does not help: the run fails with a warm-up over {longest.warmup} steps too"
        return Warmup(words, None, trials)
    words = f"not known to help: the trial with one over {longest.warmup} steps is {longest.outcome}"
    return Warmup(words, None, trials)


def beside_trial(ladder: LadderForecast, trial: Forecast, steps: int) -> LadderForecast:
    """The ladder, whose words on a warm-up tell their trial of the run's rate from `trial`, the run's own.

    Their trial has no warm-up, and may be longer. Words are added where the two have other outcomes and the
    table has no row of the former, so that the report would contradict itself.

    Args:
        steps: steps of the ladder's trials.
    """
    is_row = any(is_same_rate(rung.lr, trial.lr) and rung.warmup == 0 for rung in ladder.rungs)
    if is_row or not _differs(ladder, trial):
        return ladder
    ramp = trial.trial_warmup
    bare, own = (" without a warm-up", f" with one of {ramp}") if ramp else ("", "")
    said = f"that trial takes {steps} steps{bare}, and the run's takes {trial.last_step}{own} and says"
    return dataclasses.replace(ladder, warmup=f"{ladder.warmup}; {said} {trial.outcome}")


def _differs(ladder: LadderForecast, trial: Forecast) -> bool:
    """Whether the run without a warm-up has another outcome on the ladder than `trial` of it has."""
    if ladder.ramps:  # it fails without one
        return trial.trains and not trial.trial_warmup
    return ladder.warmup_steps is None and not ladder.warmup.endswith(f" is {trial.outcome}")


def with_warmup(best: BestRate, warmup: Warmup) -> BestRate:
    """The rate to use: `best`, or the rate that `warmup` rescues where none trains without one.

    A rescued rate is not preferred to a smaller one that trains without a warm-up: it was no better in any
    measured case.
    """
    trial = warmup.rescued
    if trial is None or best.rate is not None:
        return best
    return BestRate(trial.lr, None, None, "no tested rate trains without a warm-up", trial.warmup)
