"""The forecast over a ladder of learning rates: which of them train, and whether a warm-up helps."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from normscope.anatomy import Anatomy
from normscope.errors import UsageError
from normscope.probes.forecast import Progress, forecast
from normscope.probes.forecast_record import Forecast, LadderForecast, LadderInterrupted
from normscope.subjects import Subject
from normscope.train import TrialConfig

RAMPS = (0.5, 1.0, 2.0)
"""Warm-ups that are tried where the wanted rate fails, in lengths of the trial."""


def forecast_ladder(
    subject: Subject,
    anatomy: Anatomy,
    config: TrialConfig,
    rates: Iterable[float],
    progress: Progress | None = None,
) -> LadderForecast:
    """Forecast `config` at each of `rates`, and whether its own rate, `config.lr`, needs a warm-up.

    Args:
        rates: learning rates in any order; each is tried once.
        progress: called as `progress(step, steps)` over the steps of the whole ladder.

    Raises:
        UsageError: no rate, or one that is not a positive number.
        LadderInterrupted: Ctrl-C; its `.ladder` holds the rungs that were tried.
    """
    ladder = _ladder(rates)
    rungs: list[Forecast] = []
    try:
        for i, rate in enumerate(ladder):
            told = _part(progress, i, len(ladder))
            rungs.append(forecast(subject, anatomy, dataclasses.replace(config, lr=rate), told))
        words, steps = _warmup(subject, anatomy, config, rungs)
    except KeyboardInterrupt as stop:
        words = f"not tried: interrupted after {len(rungs)} of {len(ladder)} rates"
        raise LadderInterrupted(_result(rungs, words, None)) from stop
    return _result(rungs, words, steps)


def _ladder(rates: Iterable[float]) -> list[float]:
    given = list(rates)
    for rate in given:
        if not (isinstance(rate, int | float) and math.isfinite(rate) and rate > 0):
            raise UsageError(f"learning rate {rate!r}", "a positive number", "try 3e-4")
    if not given:
        raise UsageError("no learning rates", "one or more positive numbers", "try 1e-4 1e-3 1e-2")
    return sorted(set(given))


def _result(rungs: Sequence[Forecast], warmup: str, steps: int | None) -> LadderForecast:
    largest = max((rung.lr for rung in rungs if rung.trains), default=None)
    return LadderForecast(tuple(rungs), largest, warmup, steps)


def _part(progress: Progress | None, done: int, parts: int) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda step, steps: progress(done * steps + step, parts * steps)


def _warmup(
    subject: Subject, anatomy: Anatomy, config: TrialConfig, rungs: Sequence[Forecast]
) -> tuple[str, int | None]:
    """Whether `config.lr` needs a warm-up: in words and in steps."""
    bare = dataclasses.replace(config, warmup=0)
    known = [rung for rung in rungs if rung.lr == config.lr and rung.warmup == 0]
    without = known[0] if known else forecast(subject, anatomy, bare)
    if not without.failed:
        words = (
            "not needed" if without.trains else f"not tried: the trial at {config.lr:g} is {without.outcome}"
        )
        return f"{words}", 0 if without.trains else None
    ramps = [max(1, round(ramp * config.steps)) for ramp in RAMPS]
    for ramp in ramps:
        longer = dataclasses.replace(config, warmup=ramp, steps=max(config.steps, ramp + config.steps // 2))
        if forecast(subject, anatomy, longer).trains:
            return f"{ramp} steps: without one, {without.reason}", ramp
    lengths = ", ".join(map(str, ramps))
    return f"does not help: with ramps over {lengths} steps the run fails as without", None
