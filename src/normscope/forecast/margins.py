"""Margins of a trial's curve: how far the run is, in pace, life and pull, from one that does not train."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from normscope.forecast.record import ForecastStep
from normscope.forecast.thresholds import (
    AGREEMENT,
    ALIGNED,
    ARRIVED,
    BEGUN,
    ENOUGH,
    HELD,
    LEAD,
    LEARNT,
    LEAST_FALL,
    LONG,
    MOST_LEAD,
    NEAR,
    PARTED,
    SHARED,
    STEADY,
    SUNK,
    TIME_CONSTANT,
    TRANSIENT,
)
from normscope.subjects.subject import Baseline
from normscope.train import CRITERION_STEPS


def margins_of(
    curve: Sequence[ForecastStep],
    baseline: Baseline,
    tokens: bool,
    warmup: int,
    ahead: float | None,
) -> dict[str, float]:
    """Margins that could be measured; each is above 0 in a run that trains."""
    margins: dict[str, float] = {}
    seen = any(pull(step) is not None for step in curve)
    mean = mean_pull(curve)
    if curve[-1].diversity:
        margins["life"] = life(curve)
        if seen and not tokens:
            margins["pull"] = (mean - SHARED) / (2 * SHARED)
        elif seen and last_diversity(curve[-1]) < PARTED:
            margins["pull"] = (mean - ENOUGH) / (2 * ENOUGH)
    if not tokens and "pull" in margins and baseline.loss is not None:
        if long_mean(curve[-1]) is not None:  # by then the loss itself says whether batches agree
            margins["pull"] = _is_under(above(curve[-1], baseline))
        if ahead is not None:  # who has learnt shows that the batches agree after all
            margins["pull"] = max(margins["pull"], _is_under(baseline.above(ahead)))
    found = pace(curve, baseline, warmup)
    if found is not None:
        margins["pace"] = found + AGREEMENT * mean - 1
        if ahead is not None:
            margins["pace"] += min(MOST_LEAD, LEAD * (NEAR - baseline.above(ahead)))
    held = rise(curve, baseline, warmup, far="pace" in margins)
    if not tokens and held is not None:
        margins["held"] = (HELD - held) / (2 * HELD)
    return margins


def _is_under(above: float) -> float:
    """Margin of a loss that is so many units above that without the input."""
    return (-above - HELD) / (2 * HELD)


def life(curve: Sequence[ForecastStep]) -> float:
    """Decades that the diversity, as it sinks, is above the least that runs recover from, halved."""
    return math.log10(max(sinking_diversity(curve), 1e-15) / SUNK) / 2


def rise(
    curve: Sequence[ForecastStep], baseline: Baseline, warmup: int = 0, *, far: bool = False
) -> float | None:
    """Units by which the mean loss rose in the second half, or will be above the baseline; the larger one.

    A rise does not count where the loss is `LEARNT` under the baseline all the same: the run uses its input.
    A run that has `far` to go, or whose loss falls clearly, need not be near the baseline yet. Of another the
    loss at the end counts, see `_end`.
    """
    if (losses := second_half(curve, baseline)) is None:
        return None
    before, now = losses
    risen = now - before
    if far or risen < -LEARNT:
        return risen
    lost = min(risen, max(0.0, now + LEARNT + HELD))
    return max(lost, _end(curve, baseline, warmup, before, now))


def _end(curve: Sequence[ForecastStep], baseline: Baseline, warmup: int, before: float, now: float) -> float:
    """Units by which the loss is expected to be above the baseline at the end of a run; `now` if it is less.

    It falls on if the loss of the fixed batch falls steadily, by the lower one of two estimates. What the
    mean loss is above the baseline shrinks by the same factor in each further half of the trial's steps,
    where `HELD` of its last fall was noise. Or it falls as that of the fixed batch: then it must come
    `LEARNT` under the baseline, and counts as being at it.

    Args:
        before, now: those of the mean loss, half-way and at the end of the trial.
    """
    if steadiness(curve, baseline, warmup) < STEADY:
        return now
    by_mean = now
    if 0 < now < before - HELD:
        by_mean *= (now / (before - HELD)) ** _halves_left(curve, warmup)
    by_fixed = max(0.0, now - _further_fall(curve, baseline, warmup) + LEARNT + HELD)
    return min(now, by_mean, by_fixed)


def _further_fall(curve: Sequence[ForecastStep], baseline: Baseline, warmup: int) -> float:
    """Units by which the loss falls until the end of a run if the falls go on as those of the fixed batch.

    Each further half of a trial's steps has the fall of the one before, times `steadiness`. The batch is the
    same each time, so that it shows a slow fall that the mean loss of other batches hides.
    """
    ratio = steadiness(curve, baseline, warmup)
    fall, num = half_way(curve).loss - curve[-1].loss, _halves_left(curve, warmup)
    return fall / baseline.unit * (num if ratio == 1 else ratio * (1 - ratio**num) / (1 - ratio))


def _halves_left(curve: Sequence[ForecastStep], warmup: int) -> float:
    """Number of times that the steps of the second half fit into those that are left of a run."""
    left = _steps_between(curve[-1].step, CRITERION_STEPS, warmup)
    return left / _steps_between(half_way(curve).step, curve[-1].step, warmup)


def steadiness(curve: Sequence[ForecastStep], baseline: Baseline, warmup: int = 0) -> float:
    """Fall in a step of the fixed batch's loss in the second half over that in the first; at most 1.

    0 where the loss does not fall in both, or by less than `LEAST_FALL` in all.
    """
    half, last = half_way(curve), curve[-1]
    fell = curve[0].loss - last.loss >= LEAST_FALL * baseline.unit
    if not (fell and curve[0].step < half.step < last.step):
        return 0.0
    first, second = (
        (start.loss - end.loss) / _steps_between(start.step, end.step, warmup)
        for start, end in itertools.pairwise((curve[0], half, last))
    )
    return max(0.0, min(1.0, second / first)) if first > 0 else 0.0


def second_half(curve: Sequence[ForecastStep], baseline: Baseline) -> tuple[float, float] | None:
    """Units by which the mean loss is above the baseline half-way and at the end; None where unknown."""
    half, last = half_way(curve), curve[-1]
    if baseline.loss is None or last.recent_loss is None or half.recent_loss is None:
        return None
    return above(half, baseline), above(last, baseline)


def _steps_between(first: int, last: int, warmup: int) -> float:
    """Steps from `first` to `last`, counted at the full learning rate."""
    return at_full_rate(last, warmup) - at_full_rate(first, warmup)


def pace(curve: Sequence[ForecastStep], baseline: Baseline, warmup: int = 0) -> float | None:
    """e-foldings of the loss's fall towards the unigram entropy in `TIME_CONSTANT` steps; 1 is enough.

    Measured over the second half of the trial, on means over training batches, because one batch's own
    entropy differs by 0.1 nats from the text's. None where the entropy is unknown, or where the loss starts
    or has come near it.
    """
    last, half = curve[-1], half_way(curve)
    if (losses := second_half(curve, baseline)) is None or half is last:
        return None
    start, (before, now) = baseline.above(curve[0].loss), losses
    if start < BEGUN or now < ARRIVED * start:
        return None
    steps = _steps_between(half.step, last.step, warmup)
    return math.log(max(before, 1e-3) / now) * TIME_CONSTANT / steps


def has_learnt(last: ForecastStep, baseline: Baseline) -> bool:
    """Whether all losses of a measurement are so far under the baseline that the model uses its input.

    Without a baseline, nothing shows it.
    In a long trial it is the mean loss alone: single batches differ from one another by as much.
    """
    if baseline.loss is None:
        return False
    mean = [] if last.recent_loss is None else [above(last, baseline)]
    singles = [baseline.above(loss) for loss in (last.loss, last.train_loss) if loss is not None]
    return max(mean if long_mean(last) is not None else singles + mean) < -LEARNT


def mean_shows_it(last: ForecastStep, baseline: Baseline) -> bool:
    """Whether the mean loss of the last batches alone is so far under the baseline, where it is known."""
    known = baseline.loss is not None and last.recent_loss is not None
    return known and above(last, baseline) < -LEARNT


def half_way(curve: Sequence[ForecastStep]) -> ForecastStep:
    """The measurement nearest to half of the trial's steps."""
    return min(curve, key=lambda each: abs(each.step - curve[-1].step / 2))


def long_mean(last: ForecastStep) -> float | None:
    """The mean loss at the end of a long trial; None of a shorter one, whose ten losses say less."""
    return last.recent_loss if last.step > LONG else None


def own_baseline(each: ForecastStep, baseline: Baseline) -> Baseline:
    """The baseline on the batches of the mean loss, where known, else that of all data."""
    own = each.recent_baseline
    if own is None or not own > 0:
        return baseline
    return baseline._replace(loss=own, unit=baseline.unit if baseline.is_entropy else own)


def with_all_baselines(curve: Sequence[ForecastStep]) -> Sequence[ForecastStep]:
    """The measurements without the baselines of their batches, if one has none: they are compared."""
    if all(each.recent_baseline is not None for each in curve if each.recent_loss is not None):
        return curve
    return [dataclasses.replace(each, recent_baseline=None) for each in curve]


def above(each: ForecastStep, baseline: Baseline) -> float:
    """Units by which the mean loss of the last batches is above the best one without their input."""
    assert each.recent_loss is not None
    return own_baseline(each, baseline).above(each.recent_loss)


def at_full_rate(steps: int, warmup: int) -> float:
    """Number of steps at the full learning rate that equal the first `steps` of a linear warm-up."""
    ramp = min(steps, warmup)
    return steps - ramp + (ramp * (ramp + 1) / (2 * warmup) if warmup else 0.0)


def sinking_diversity(curve: Sequence[ForecastStep]) -> float:
    """The last diversity, reduced by its last fall once the first transient is over."""
    last, before = curve[-1], curve[-2] if len(curve) > 1 else curve[-1]
    now = last_diversity(last)
    if before.step < TRANSIENT or not before.diversity:
        return now
    return now * min(1.0, now / max(last_diversity(before), 1e-30))


def last_diversity(step: ForecastStep) -> float:
    """Token diversity of the last stack's output."""
    return list(step.diversity.values())[-1]


def pull(step: ForecastStep) -> float | None:
    """coherence + 3·alignment of a measurement; None where there was nothing to compare."""
    if step.coherence is None or step.alignment is None:
        return None
    return step.coherence + ALIGNED * step.alignment


def mean_pull(curve: Sequence[ForecastStep]) -> float:
    """Mean of the pulls that were measured; 0 where there is none."""
    seen = [pulled for pulled in map(pull, curve) if pulled is not None]
    return sum(seen) / len(seen) if seen else 0.0
