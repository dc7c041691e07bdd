"""The learning rate to use: the one whose run is predicted to end with the lowest loss.

The loss at the end of a run is extrapolated from the second half of each trial: each further doubling of the
steps changes its logarithm by `KEPT` of what the last doubling did. Without that, the lowest loss of a short
trial belongs to a rate that is too large, because a large rate gains early and stalls. It is the loss of the
fixed batch, which does not lag; in a trial longer than `LONG` steps it is the mean of the last training
losses: there, rates differ by less than a single batch differs from the others.
The lowest point lies between the tested rates, at the vertex of the parabola through the three lowest; of
one or two healthy rates it is the better one. One rate alone has no range.
docs/forecast-rates.md has the evidence.
"""

import dataclasses
import math
from collections.abc import Sequence

from normscope.forecast.margins import at_full_rate
from normscope.forecast.record import BestRate, Forecast, ForecastStep
from normscope.forecast.thresholds import LONG
from normscope.train import CRITERION_STEPS

KEPT = 1 / 3
"""Share of the last doubling's fall that each further doubling of the steps still has. Of 0.2 to 1, tried on
the ladders of tokens and series that are not held out, 0.2 to 0.4 were alike."""
ALIKE = 0.05
"""Rates whose loss is predicted to fall this much less than at the best, as a share, are as good."""
FEWEST = 3
"""Measurements of a trial that are needed to extrapolate its loss."""
SLACK = 1.25
"""Factor on the steps of a longer trial within which a measurement of a whole run is compared with it."""
MOST_BETWEEN = 2
"""Most rates between the candidates that are tried again too."""
CANDIDATES = 4
"""Rates that are tried again in a longer trial. With 2 or 3, the best one was missing more often; 5 were no
better (31 ladders that are not held out)."""


def best_rate(rungs: Sequence[Forecast], refined: int = 0) -> BestRate:
    """The rate to use, its range, and why there is none where there is none.

    A trial that was stopped half-way, see `stopping`, is no candidate.

    Args:
        rungs: forecasts of one model at several rates, with the same warm-up.
        refined: steps of the longer trials that count; 0 for the longest there are.
    """
    if refined:
        rungs = [_cut(rung, refined) for rung in rungs]
    ends = _ends(rungs, refined) or _ends(rungs)
    if not any(rung.trains or _is_promising(rung) for rung, _ in ends):
        return BestRate(None, None, None, "none of the tested rates is known to train")
    if len(ends) == 1:
        open_ = "" if ends[0][0].trains else f" (its trial is {ends[0][0].outcome})"
        others = any(not rung.failed for rung in rungs if rung is not ends[0][0])
        only = "the only rate whose longer trial" if others else "the only tested rate that"
        near = f"test others near it: {rates_on(ends[0][0].lr / 10**0.5)}"
        return BestRate(ends[0][0].lr, None, None, f"{only} does not fail{open_}; {near}")
    rates, losses = [math.log2(rung.lr) for rung, _ in ends], [end for _, end in ends]
    rate = lowest(rates, losses)
    low, high = _as_good(rates, losses, ends[0][0].curve[0].loss)
    low, high = min(low, rate), max(high, rate)
    return BestRate(
        _rounded(2**rate), _rounded(2**low), _rounded(2**high), _edge(rungs, ends[-1][0], rates, losses)
    )


def _cut(rung: Forecast, steps: int) -> Forecast:
    """A rung with the measurements of its first `steps` steps, or a few more.

    A loss that was measured after a whole run is no match for those that are extrapolated to its end, which
    are too high.
    """
    kept = tuple(each for each in rung.curve if each.step <= SLACK * steps)
    return rung if len(kept) < FEWEST else dataclasses.replace(rung, curve=kept)


def candidates(rungs: Sequence[Forecast]) -> list[Forecast]:
    """The rungs that may be the best: the `CANDIDATES` with the lowest predicted losses.

    A trial that was stopped half-way is one too, if it was ahead of one of these by then. Where fewer do not
    fail, rungs that may only seem stuck take the places that are left. Rungs between these are too.
    There are none where no rate can be named, however long the trials: without a loss to beat.
    """
    if not any(rung.trains or rung.baseline.loss is not None for rung in rungs):
        return []
    chosen = [rung for rung, _ in sorted(_ends(rungs), key=lambda each: each[1])[:CANDIDATES]]
    stopped = [rung for rung in _healthy(rungs) if rung not in chosen and rung.is_half]
    half = min((rung.last_step for rung in stopped), default=0)
    ends = [end for rung in chosen if (end := end_loss(_cut(rung, half))) is not None]
    chosen += [r for r in stopped if (end := end_loss(r)) is not None and end < max(ends, default=end)]
    stuck = [rung for rung in rungs if rung.curve and rung.failed and not rung.is_sure and _may_recover(rung)]
    chosen += sorted(stuck, key=_last_loss)[: max(0, CANDIDATES - len(chosen))]
    return [*chosen, *_between(chosen, rungs)]


def _between(chosen: Sequence[Forecast], rungs: Sequence[Forecast]) -> list[Forecast]:
    """The `MOST_BETWEEN` rungs with the lowest losses among those between `chosen` that may train.

    The loss is a valley over the learning rate. A rung between two that are predicted to be lower is one
    whose loss was predicted badly: while all stand at the loss without the input, noise ranks them.
    """
    rates = [rung.lr for rung in chosen]
    left_out = [rung for rung in rungs if rung not in chosen and rung.curve and _may_recover(rung)]
    inside = [rung for rung in left_out if rates and min(rates) < rung.lr < max(rates)]
    return sorted(inside, key=_last_loss)[:MOST_BETWEEN]


def _last_loss(rung: Forecast) -> float:
    return rung.curve[-1].loss


def _may_recover(rung: Forecast) -> bool:
    """Whether a rung does not fail, or only seems stuck, as measured values with noise do at first."""
    return not rung.failed or (rung.outcome == "plateau" and not rung.tokens)


def _ends(rungs: Sequence[Forecast], steps: int = 0) -> list[tuple[Forecast, float]]:
    """The rungs that do not fail and have a whole trial, each with its predicted loss; by learning rate."""
    healthy = _healthy(rungs)
    longest = steps or max((rung.last_step for rung in healthy), default=0)
    whole = sorted((r for r in healthy if 4 * r.last_step > 3 * longest), key=lambda rung: rung.lr)
    return [(rung, end) for rung in whole if (end := end_loss(rung)) is not None]


def _healthy(rungs: Sequence[Forecast]) -> list[Forecast]:
    """The rungs that were tried and do not fail."""
    return [r for r in rungs if r.curve and (r.trains or r.outcome in ("slow", "undecided"))]


def _is_promising(rung: Forecast) -> bool:
    """Whether a rung may be named that is not said to train.

    An undecided one may, and a masked model's slow one, which often needs more than 300 steps; not where
    nothing is known that its loss should get under.
    """
    is_open = rung.outcome == "undecided" or (rung.hidden == "mask" and rung.outcome == "slow")
    return is_open and rung.baseline.loss is not None


def _rounded(rate: float) -> float:
    """`rate` without the error of its logarithm: a rate that was tested is that rate."""
    return float(f"{rate:.6g}")


def end_loss(rung: Forecast) -> float | None:
    """Predicted loss after 300 steps; None where the trial did not get far."""
    return extrapolated(rung.curve, rung.trial_warmup)


def extrapolated(curve: Sequence[ForecastStep], warmup: int = 0) -> float | None:
    """Loss after 300 steps that the second half of a trial predicts, see `end_loss`.

    Args:
        curve: the measurements, the first one before the first step.
        warmup: steps of linear warm-up in the trial.
    """
    if len(curve) < FEWEST:
        return None
    last = curve[-1]
    half = min(curve[:-1], key=lambda each: abs(each.step - last.step / 2))
    before, now = (at_full_rate(each.step, warmup) for each in (half, last))
    start, end = (_compared(each, last.step) for each in (half, last))
    if not 0 < before < now or not math.isfinite(end):
        return None
    times = KEPT * max(0.0, math.log2(CRITERION_STEPS / last.step)) / math.log2(now / before)
    if min(start, end) <= 0:  # no logarithm: a likelihood of real numbers
        return end - times * (start - end)
    return float(end * (end / start) ** times)


def _compared(each: ForecastStep, steps: int) -> float:
    """The loss by which rates are compared in a trial of `steps` steps: see the module's text."""
    return each.loss if steps <= LONG or each.recent_loss is None else each.recent_loss


def lowest(places: Sequence[float], values: Sequence[float]) -> float:
    """Place of the vertex of the parabola through the lowest value and its neighbours; an end is itself."""
    i = min(range(len(values)), key=values.__getitem__)
    if i in (0, len(values) - 1):
        return places[i]
    (a, b, c), (u, v, w) = places[i - 1 : i + 2], values[i - 1 : i + 2]
    left, right = (v - u) / (b - a), (w - v) / (c - b)
    bend = (right - left) / (c - a)
    return b if bend <= 0 else (a + b) / 2 - left / (2 * bend)


def _as_good(rates: Sequence[float], losses: Sequence[float], first: float) -> tuple[float, float]:
    """Ends of the interval around the lowest loss in which the loss falls by nearly as much."""
    i = min(range(len(losses)), key=losses.__getitem__)
    level = losses[i] + ALIKE * max(0.0, first - losses[i])
    below = next((k for k in range(i, -1, -1) if losses[k] > level), None)
    above = next((k for k in range(i, len(losses)) if losses[k] > level), None)
    low = rates[0] if below is None else _crossing(rates, losses, below, below + 1, level)
    high = rates[-1] if above is None else _crossing(rates, losses, above, above - 1, level)
    return low, high


def _crossing(rates: Sequence[float], losses: Sequence[float], out: int, inside: int, level: float) -> float:
    """Place between two neighbours at which the loss is `level`, by a straight line."""
    share = (losses[out] - level) / (losses[out] - losses[inside])
    return rates[out] + share * (rates[inside] - rates[out])


def _edge(rungs: Sequence[Forecast], last: Forecast, rates: Sequence[float], losses: Sequence[float]) -> str:
    """The bound of the rate where the lowest loss is at an end of the healthy rates."""
    i = min(range(len(losses)), key=losses.__getitem__)
    lower = any(math.log2(rung.lr) < rates[0] for rung in rungs)
    higher = any(rung.lr > last.lr and not rung.failed for rung in rungs)
    if i == 0 and not lower:
        smallest = min(rung.lr for rung in rungs)
        return f"the smallest rate that was tested; a smaller one may be better: {rates_on(smallest / 10)}"
    if i < len(losses) - 1 or (i and higher):
        return "the lowest loss predicted for 300 steps"
    if any(rung.lr > last.lr for rung in rungs):
        return "the largest rate that does not fail"
    return f"the largest rate that was tested; a larger one may be better: {rates_on(last.lr)}"


def rates_on(first: float) -> str:
    """The option that tries four rates from `first` to ten times it, as far apart as those of a ladder."""
    return f"--rates {first:.3g}:{10 * first:.3g}:4"
