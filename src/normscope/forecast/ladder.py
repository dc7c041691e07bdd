"""The forecast over a ladder of learning rates: which of them train, and whether a warm-up helps."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from normscope.anatomy import Anatomy
from normscope.errors import UsageError
from normscope.forecast.one_rate import as_forecast, can_be_told, forecast, interrupted, why_not_tried
from normscope.forecast.record import Forecast, LadderForecast, LadderInterrupted
from normscope.forecast.rule import Decision, decide
from normscope.forecast.watch import RECENT, Progress, WatchedTrial, loss_of, short, watched
from normscope.subjects import Subject, untouched
from normscope.train import TrialConfig, endless, in_flushed_thread, many_trials, working_copy

LADDER_STEPS = 36  # steps of a rung, at least: a pace over 10 of 20 steps is less sure
LADDER_BATCHES = 4  # batches whose token gradients are compared on a rung: there are many rungs
RAMPS = (0.5, 1.0)  # warm-ups that are tried where the wanted rate fails, in lengths of the trial

MOST_PARAMETERS = 20_000_000
"""Limit of all replicas of a stack together: stacking pays in small models; a weight takes 16 bytes each."""

FAR = 250.0  # steps to look ahead; a larger learning rate gets a little less far than rate × steps says
FIRST = 15.0  # step before which a loss tells only of the first steps


def forecast_ladder(
    subject: Subject,
    anatomy: Anatomy,
    config: TrialConfig,
    rates: Iterable[float],
    progress: Progress | None = None,
) -> LadderForecast:
    """Forecast `config` at each of `rates`, and whether its own learning rate, `config.lr`, needs a warm-up.

    The rungs are stepped together where they can be stacked and are small, each for `config.steps` steps, at
    least `LADDER_STEPS`; one that is lost stops earlier. The forecast with the larger `score` trains more
    surely.

    Args:
        rates: learning rates in any order; each is tried once.
        progress: called as `progress(step, steps)` over the steps of the whole ladder.

    Raises:
        UsageError: no learning rate, or one that is not a positive number; this torch has no Muon.
        LadderInterrupted: Ctrl-C; its `.ladder` holds the rungs that were tried.
    """
    longer = dataclasses.replace(config, steps=max(config.steps, LADDER_STEPS) if config.steps else 0)
    ladder = _ladder(longer, rates)
    told = progress or (lambda step, steps: None)
    rungs: list[Forecast] = []
    try:
        _try_all(subject, anatomy, ladder, told, rungs)
        rungs = [_compared(rung, rungs) for rung in rungs]
        words, steps = _warmup(subject, anatomy, longer, rungs, told)
    except KeyboardInterrupt as stop:
        tried = sum(rung.outcome != "not measured" for rung in rungs)
        words = f"not tried: interrupted after {tried} of {len(ladder)} rates"
        raise LadderInterrupted(_result(rungs, words, None)) from stop
    return _result(rungs, words, steps)


def _ladder(config: TrialConfig, rates: Iterable[float]) -> list[TrialConfig]:
    """`config` at each of `rates` once, in ascending order."""
    configs = {rate: dataclasses.replace(config, lr=rate) for rate in rates}
    if not configs:
        raise UsageError("no learning rates", "one or more positive numbers", "try 1e-4 1e-3 1e-2")
    return [configs[rate] for rate in sorted(configs)]


def _result(rungs: Sequence[Forecast], warmup: str, steps: int | None) -> LadderForecast:
    largest = max((rung.lr for rung in rungs if rung.trains), default=None)
    return LadderForecast(tuple(rungs), largest, warmup, steps)


def _try_all(
    subject: Subject,
    anatomy: Anatomy,
    configs: Sequence[TrialConfig],
    progress: Progress,
    found: list[Forecast],
) -> None:
    """Put a forecast of each of `configs`, which share their steps, behind `found`."""
    size = _replicas(subject, configs)
    for done in range(0, len(configs), size):
        part = configs[done : done + size]
        told = _part(progress, done, len(part), len(configs))
        if size > 1 and _stacked(subject, anatomy, part, told, found):
            continue
        for i, config in enumerate(part):
            found.append(forecast(subject, anatomy, config, _part(progress, done + i, 1, len(configs))))


def _replicas(subject: Subject, configs: Sequence[TrialConfig]) -> int:
    """Number of rungs stepped together; one where a warm-up has to be tried both ways."""
    if why_not_tried(subject, configs[0]) or any(config.warmup > config.steps for config in configs):
        return 1
    return max(1, min(len(configs), MOST_PARAMETERS // sum(p.numel() for p in subject.model.parameters())))


def _compared(rung: Forecast, rungs: Sequence[Forecast]) -> Forecast:
    """The forecast of a rung that is well, judged again with the pace of larger learning rates."""
    found = ahead(rung, rungs)
    if rung.outcome not in ("trains", "slow") or found is None:
        return rung
    decision = decide(rung.curve, rung.unigram_entropy, warmup=rung.warmup, ahead=found)
    return dataclasses.replace(rung, outcome=decision.outcome, reason=decision.reason, score=decision.score)


def ahead(rung: Forecast, rungs: Sequence[Forecast]) -> float | None:
    """Loss of `rung` at the end of a run, as larger learning rates tell it; None where they do not.

    While a model is well, learning rate × steps says how far it is: at 10 times the rate, step 25 stands for
    step 250. Takes the smallest rate that has gone far enough, and its loss there, between the mean losses
    measured. A loss over the rung's own is that of a rate too large to tell.
    """
    own = rung.curve[-1].recent_loss if rung.curve else None
    for other in sorted(rungs, key=lambda each: each.lr):
        step = FAR * rung.lr / other.lr
        seen = [(each.step - min(RECENT, each.step) / 2, each.recent_loss) for each in other.curve[1:]]
        pairs = [(middle, loss) for middle, loss in seen if loss is not None]
        if own is not None and other.lr > rung.lr and pairs and FIRST <= step <= pairs[-1][0]:
            found = _between(pairs, step)
            return found if found is not None and found <= own else None
    return None


def _between(pairs: Sequence[tuple[float, float]], step: float) -> float | None:
    """The loss at `step`, on straight lines between `pairs` of step and loss."""
    for (start, before), (end, after) in itertools.pairwise(pairs):
        if start <= step <= end:
            return before + (after - before) * (step - start) / (end - start)
    return None


def _part(progress: Progress, done: int, size: int, parts: int) -> Progress:
    return lambda step, steps: progress(done * steps + size * step, parts * steps)


def _stacked(
    subject: Subject,
    anatomy: Anatomy,
    configs: Sequence[TrialConfig],
    progress: Progress,
    found: list[Forecast],
) -> bool:
    """Whether forecasts of `configs` could be made side by side.

    A model that cannot be copied, or a copy that does not learn, is left to `forecast`, which says why.
    """
    curves: list[WatchedTrial] = []

    def work(checkpoint: Callable[[], None]) -> list[Decision] | None:
        models: list[nn.Module] = []
        with contextlib.ExitStack() as held:
            for _ in configs:
                models.append(held.enter_context(working_copy(subject.model)))
                if models[-1] is subject.model:  # it cannot be copied
                    return None
                if not subject.model.training:
                    models[-1].train()
            torch.manual_seed(configs[0].seed)
            shorts = [short(config, config.warmup) for config in configs]
            steps = configs[0].steps
            rule_needs = {max(1, steps // 2), max(1, steps - 10)}  # beside the last
            curves.extend(
                WatchedTrial(subject, anatomy, m, c, measure_at=rule_needs, batches=LADDER_BATCHES)
                for m, c in zip(models, shorts, strict=True)
            )
            batches = [endless(subject.batches) for _ in models]
            trials = many_trials(models, batches, loss_of(subject), shorts)
            return watched(trials, curves, checkpoint, progress)

    try:
        with untouched(subject.model):
            decisions = in_flushed_thread(work)
    except Exception as error:
        if not can_be_told(error):
            raise
        return False
    except KeyboardInterrupt:
        for config, watch in zip(configs, curves, strict=False):
            reason = interrupted(watch.curve, config)
            found.append(as_forecast(Decision("not measured", reason), subject, config, watch.curve))
        raise
    for config, watch, decision in zip(configs, curves, decisions or (), strict=False):
        found.append(as_forecast(decision, subject, config, watch.curve))
    return decisions is not None


def _warmup(
    subject: Subject,
    anatomy: Anatomy,
    config: TrialConfig,
    rungs: Sequence[Forecast],
    progress: Progress,
) -> tuple[str, int | None]:
    """Whether `config.lr` needs a warm-up: in words and in steps."""
    bare = dataclasses.replace(config, warmup=0)
    known = [rung for rung in rungs if rung.lr == config.lr and rung.warmup == 0]
    without = known[0] if known else forecast(subject, anatomy, bare)
    if without.trains:
        return "not needed", 0
    if not without.failed:
        return f"not tried: the trial at {config.lr:g} is {without.outcome}", None
    ramps = [max(1, round(ramp * config.steps)) for ramp in RAMPS]
    steps = max(ramps) + config.steps // 2
    ramped: list[Forecast] = []
    tries = [dataclasses.replace(config, warmup=ramp, steps=steps) for ramp in ramps]
    _try_all(subject, anatomy, tries, progress, ramped)
    for ramp, said in zip(ramps, ramped, strict=True):
        if said.trains:
            return f"{ramp} steps: without one, {without.reason}", ramp
    lengths = " or ".join(map(str, ramps))
    return f"does not help: with a ramp over {lengths} steps the run fails as without", None
