"""Longer trials of a ladder: which ones make sense for a run, and what is said where none are made."""

import dataclasses
from typing import NamedTuple

from normscope.forecast.record import LadderForecast
from normscope.forecast.thresholds import LONG
from normscope.option_values import LADDER_STEPS, REFINED_STEPS
from normscope.subjects import Subject
from normscope.subjects.repeats import period_of, steps_without_repeat
from normscope.train import CRITERION_STEPS, Recipe

AT_CONSTANT_RATE = "that is at a constant rate"
OF_DECAY = f"{AT_CONSTANT_RATE}: under a cosine to zero, twice as much was best (17 small ladders)"
"""Caveats of the rate to use where a run's rate falls; docs/forecast-rates.md has the figures."""


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
    subject: Subject, config: Recipe, asked: int | None, *, script_steps: int | None = None
) -> LongerTrials:
    """The longer trials of a ladder, of which the user asked for `asked` steps; None leaves it to us.

    A longer trial is then left out where it would go beyond the run, or repeat the user's batches: it would
    only show that they can be learnt by heart.

    Args:
        script_steps: steps for which a script was followed; fewer than a whole run if it ended. None without
            a script.

    Raises:
        BatchesError: a batch cannot be drawn.
    """
    first, longest = max(config.steps, LADDER_STEPS), config.run_steps or CRITERION_STEPS
    if asked == 0:
        return LongerTrials(0, False)
    if asked is not None:
        return LongerTrials(asked, longest >= CRITERION_STEPS)
    different = steps_without_repeat(subject, CRITERION_STEPS, config.accumulation)
    wanted = [steps for steps in (REFINED_STEPS, CRITERION_STEPS) if steps > first]
    left = [steps for steps in wanted if steps <= min(longest, different)]
    missing, note = [steps for steps in wanted if steps not in left], ""
    if missing:
        why = f"the run, over which its schedule goes, has {longest}"
        if longest >= missing[0]:
            period = period_of(subject, CRITERION_STEPS * config.accumulation)
            assert period is not None
            why = _too_few(period, config.accumulation, script_steps)
        note = f"no trial of {missing[0]} steps or more was made: {why}"
    return LongerTrials(REFINED_STEPS if REFINED_STEPS in left else 0, CRITERION_STEPS in left, note)


def _too_few(period: int, accumulation: int, script_steps: int | None) -> str:
    """Why the batches are too few for a longer trial."""
    given = "the one batch" if period == 1 else f"the {period} batches"
    by_heart = "which can be learnt by heart"
    asking = f"ask for it with --refine {REFINED_STEPS}"
    if script_steps is None:
        more = f"give {CRITERION_STEPS * accumulation}, or {asking}"
        return f"it would repeat {given} at hand, {by_heart}; {more}"
    if period == script_steps * accumulation < CRITERION_STEPS * accumulation:
        return (
            f"the script ended after {script_steps}, and more would repeat its batches, {by_heart}; {asking}"
        )
    return f"it would repeat {given} of the script's steps, {by_heart}; {asking}"


def with_caveat(
    ladder: LadderForecast, subject: Subject, config: Recipe, asked: int | None, *, is_script: bool = False
) -> LadderForecast:
    """The ladder, whose rate to use says so where it is less certain.

    That is so with a schedule that decays, and where it rests on short trials alone because that was asked
    for. Where longer trials are left out for another reason, `LongerTrials.note` says which. A script
    (`is_script`) is followed for more steps if longer trials need its batches.
    """
    steps = asked or max(config.steps, LADDER_STEPS)
    if ladder.best is None or ladder.best.rate is None:
        return ladder
    if config.decays:
        twice_trains = 2 * ladder.best.rate <= (ladder.largest_rate or 0.0)
        reason = f"{ladder.best.reason}; {OF_DECAY if twice_trains else AT_CONSTANT_RATE}"
        ladder = dataclasses.replace(ladder, best=dataclasses.replace(ladder.best, reason=reason))
    if asked is None or steps > LONG:
        return ladder
    caveat = f"from trials of {steps} steps alone: less certain"
    is_short = (config.run_steps or CRITERION_STEPS) < REFINED_STEPS
    is_scarce = not is_script and period_of(subject, steps * config.accumulation) is not None
    if not is_short and not is_scarce:  # else it is no help
        caveat += f"; leave out --refine {asked}"
    assert ladder.best is not None
    best = dataclasses.replace(ladder.best, reason=f"{ladder.best.reason} ({caveat})")
    return dataclasses.replace(ladder, best=best)
