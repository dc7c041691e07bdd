"""Longer trials of a ladder: which ones make sense for a run, and what is said where none are made."""

import dataclasses
import math
from typing import NamedTuple

from normscope.forecast.ladder import LADDER_STEPS, REFINED_STEPS
from normscope.forecast.record import LadderForecast
from normscope.forecast.rule import LONG
from normscope.subjects import Subject
from normscope.subjects.repeats import period_of
from normscope.train import CRITERION_STEPS, Recipe


class LongerTrials(NamedTuple):
    """Longer trials to make.

    Attributes:
        refine: steps of the trials of the best rates; 0 for none.
        whole: whether rates in doubt are tried over a whole run.
        note: why some were left out, "" if none was or if that was asked for.
    """

    refine: int
    whole: bool
    note: str = ""


def longer_trials(
    subject: Subject, config: Recipe, asked: int | None, *, is_script: bool = False
) -> LongerTrials:
    """The longer trials of a ladder, of which the user asked for `asked` steps; None leaves it to us.

    A longer trial is then left out where it would go beyond the run, or repeat the user's batches: it would
    only show that they can be learnt by heart.

    Raises:
        BatchesError: a batch cannot be drawn.
    """
    first, longest = max(config.steps, LADDER_STEPS), config.run_steps or CRITERION_STEPS
    if asked == 0:
        return LongerTrials(0, False)
    if asked is not None:
        return LongerTrials(asked, longest >= CRITERION_STEPS)
    period = period_of(subject, CRITERION_STEPS * config.accumulation)
    different = math.inf if period is None else period / config.accumulation
    wanted = [steps for steps in (REFINED_STEPS, CRITERION_STEPS) if steps > first]
    left = [steps for steps in wanted if steps <= min(longest, different)]
    note = ""
    if period is not None and different < max(wanted, default=0):
        note = _too_few(period, min(set(wanted) - set(left)), config.accumulation, is_script)
    return LongerTrials(REFINED_STEPS if REFINED_STEPS in left else 0, CRITERION_STEPS in left, note)


def _too_few(period: int, steps: int, accumulation: int, is_script: bool) -> str:
    """Why no longer trial was made."""
    given = "the one batch" if period == 1 else f"the {period} batches"
    place, more = "at hand", f"give {CRITERION_STEPS * accumulation}, or "
    if is_script:  # it has as many as it has
        place, more = "of the script's steps", ""
    return (
        f"no trial of {steps} steps or more was made: it would repeat {given} {place}, which can be learnt "
        f"by heart; {more}ask for it with --refine {REFINED_STEPS}"
    )


def with_caveat(
    ladder: LadderForecast, subject: Subject, config: Recipe, asked: int | None, *, is_script: bool = False
) -> LadderForecast:
    """The ladder, whose rate to use says so where it rests on short trials alone because that was asked for.

    Where longer trials are left out for another reason, `LongerTrials.note` says which. A script
    (`is_script`) is followed for more steps if longer trials need its batches.
    """
    steps = asked or max(config.steps, LADDER_STEPS)
    if asked is None or ladder.best is None or ladder.best.rate is None or steps > LONG:
        return ladder
    caveat = f"from trials of {steps} steps alone: less certain"
    is_short = (config.run_steps or CRITERION_STEPS) < REFINED_STEPS
    is_scarce = not is_script and period_of(subject, steps * config.accumulation) is not None
    if not is_short and not is_scarce:  # else it is no help
        caveat += f"; leave out --refine {asked}"
    best = dataclasses.replace(ladder.best, reason=f"{ladder.best.reason} ({caveat})")
    return dataclasses.replace(ladder, best=best)
