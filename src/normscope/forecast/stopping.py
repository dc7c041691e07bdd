"""Early stops on a ladder: trials that are clear half-way, and low rates that larger ones decide.

docs/forecast-rule.md has the evidence.
"""

import math
from collections.abc import Mapping, Sequence

from normscope.forecast.best_rate import extrapolated
from normscope.forecast.margins import has_learnt, life
from normscope.forecast.record import ForecastStep
from normscope.forecast.rule import Decision, decide
from normscope.forecast.thresholds import HELD, NEAR, WORST
from normscope.subjects.subject import Baseline

CLEAR = -0.3
"""Margin of life from which a collapse half-way is clear: a quarter of the diversity that is needed."""
EARLIEST = 15
"""Steps before which no trial stops: tokens may become alike for a while."""
LOW = 0.03
"""Share of the largest rate up to which a rate is low: tried after the larger ones, if they leave it open."""
FAR_ABOVE, FAR_SHARE = 1.0, 1 / 3
"""Nats above the unigram entropy, and share of the first excess, from which no run got there in 300 steps."""
REACHES, REACHES_BARELY, STAYS = 0.97, 0.75, 0.04
"""Probability that a run trains that larger rates decided: of the cells that they saw get under the baseline,
32 of 32 trained where it was by `HELD` or more, and 5 of 6 where it was by less; and none of 26 that they saw
far above it. (k + 1) / (n + 2) of these, from the ladders set on (`python -m benchmarks.regimes.stops`)."""


def is_settled(curve: Sequence[ForecastStep], baseline: Baseline, *, tokens: bool, warmup: int) -> bool:
    """Whether a trial needs neither more steps nor a comparison of gradients to be decided.

    That is so if it diverges, if its tokens have clearly collapsed, or if it has learnt already.

    Args:
        curve: the measurements so far, of which none compared gradients.
    """
    found = decide(curve, baseline, tokens=tokens, warmup=warmup)
    if found.outcome == "collapses":
        return not tokens or life(curve) < CLEAR
    return found.outcome == "diverges" or (found.outcome == "trains" and has_learnt(curve[-1], baseline))


def best_place(curves: Mapping[int, Sequence[ForecastStep]], warmup: int) -> int | None:
    """Place of the trial with the lowest predicted loss; None if no trial got far enough.

    Args:
        curves: the measurements of the trials that do not fail, by their places.
    """
    ends = {k: end for k, curve in curves.items() if (end := extrapolated(curve, warmup)) is not None}
    return min(ends, key=ends.__getitem__) if ends else None


def is_hasty(found: Decision, last: ForecastStep, baseline: Baseline) -> bool:
    """Whether half a trial is in doubt, or predicts that a run trains that has not learnt yet.

    The loss falls fast at first, also in runs that are too slow.

    Args:
        found: the decision half-way.
        last: the measurement half-way.
    """
    return found.in_doubt or (found.outcome == "trains" and not has_learnt(last, baseline))


def decided_by_larger(ahead: float, start: float, baseline: Baseline, *, tokens: bool) -> Decision | None:
    """The outcome at a rate that is not tried, from the loss that a larger rate predicts; None if it is open.

    Args:
        ahead: the predicted loss, see `ladder.ahead`. It is too high rather than too low: at the median by
            0.27 nats.
        start: loss before the first step.
    """
    if baseline.loss is None:
        return None
    above, first = ((loss - baseline.loss) / baseline.unit for loss in (ahead, start))
    why = f"not tried: the loss of a larger learning rate, as far in learning rate × steps, is {ahead:.3g}"
    score = max(WORST, NEAR - above)
    if above < 0:
        return Decision("trains", f"{why}, under the loss to beat, {baseline.loss:.3g}", score=score)
    if tokens and math.isfinite(first) and above > max(FAR_ABOVE, FAR_SHARE * first):
        said = f"{why}, too far above the loss to beat, {baseline.loss:.3g}, for 300 steps"
        return Decision("slow", said, score=score)
    return None


def certainty_by_larger(found: Decision) -> float:
    """Probability that a run trains, from a decision of `decided_by_larger`."""
    if found.outcome != "trains":
        return STAYS
    return REACHES if found.score is not None and found.score >= NEAR + HELD else REACHES_BARELY
