"""Forecast over a ladder of learning rates: which of them train, and whether a warm-up helps."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from normscope.anatomy import Anatomy
from normscope.errors import UsageError, describe
from normscope.forecast.best_rate import best_rate, candidates
from normscope.forecast.certainty import certainty
from normscope.forecast.divergence import with_neighbours
from normscope.forecast.kept import KeptTrial, is_room_for
from normscope.forecast.largest_rate import MOST_AGAIN, in_doubt, largest_rate, with_doubt
from normscope.forecast.one_rate import as_forecast, forecast, interrupted, is_model_error, why_not_tried
from normscope.forecast.range_test import range_test
from normscope.forecast.recent import recent_steps
from normscope.forecast.record import (
    Forecast,
    ForecastStep,
    LadderForecast,
    LadderInterrupted,
    is_same_rate,
)
from normscope.forecast.rule import Decision, decide
from normscope.forecast.scaling import at_scale
from normscope.forecast.stopping import LOW, best_place, certainty_by_larger, decided_by_larger
from normscope.forecast.warmup import Warmup, shortest_warmup, with_warmup
from normscope.forecast.watch import Progress, train_copies
from normscope.nn import has_own_rates
from normscope.option_values import LADDER_STEPS
from normscope.subjects import Subject, untouched
from normscope.subjects.feed import is_of_tokens
from normscope.subjects.targets import hides_targets
from normscope.train import CRITERION_STEPS, Recipe, in_flushed_thread

MOST_PARAMETERS = 20_000_000
"""Most parameters of all rungs that are stepped together; a weight takes 16 bytes each."""

AT_ONCE = 2  # low rates that are tried together: the best one is seldom much lower

FAR = 250.0  # steps to look ahead; a larger learning rate gets a little less far than rate × steps predicts
FIRST = 15.0  # step before which the loss still depends on the first steps
SOONER = 8.0  # the same where the loss is compared with limits that are far from one another


def forecast_ladder(
    subject: Subject,
    anatomy: Anatomy,
    config: Recipe,
    rates: Iterable[float],
    progress: Progress | None = None,
    *,
    refine: int = 0,
    whole: bool = False,
    again: Progress | None = None,
    seen: Forecast | None = None,
) -> LadderForecast:
    """Forecast `config` at each of `rates`, and whether its own learning rate, `config.lr`, needs a warm-up.

    Each rung takes `config.steps` steps, at least `LADDER_STEPS`. One that is decided half-way stops there,
    and a low one that larger rates decide is not tried, see `stopping`. Rungs of small models are
    stepped together: in turns on a CPU, else as a stack. A larger `score` means a more certain success.

    Args:
        rates: learning rates in any order; each is tried once.
        progress: called as `progress(step, steps)` over the steps of the whole ladder.
        refine: steps of a second, longer trial of the rates that may be the best, whose forecasts count
            then, and a range test, which adds to the risk of divergence; 0 for none of both.
        whole: whether rates in doubt around the largest that trains are tried again over a whole run.
        again: called like `progress` over the steps of longer trials; `progress` itself by default.
        seen: forecast of the user's own steps, which stands for the trial of its rate where it is longer.

    Raises:
        UsageError: a missing or non-positive learning rate; Muon without support in this torch.
        LadderInterrupted: Ctrl-C; its `.ladder` holds the rungs that were tried.
    """
    longer = dataclasses.replace(config, steps=max(config.steps, LADDER_STEPS) if config.steps else 0)
    configs = _at_rates(longer, rates)
    progress = progress or (lambda step, steps: None)
    ladder = _Ladder(subject, anatomy, progress, len(configs), again or progress, seen=seen)
    if (refine or whole) and is_room_for(len(configs), subject.model):
        ladder.kept = {}
    low = [config for config in configs if config.lr <= LOW * configs[-1].lr]
    try:
        ladder.try_all(configs[len(low) :])
        ladder.try_low(low)
        ladder.compare()
        if refine:
            ladder.refine(dataclasses.replace(longer, steps=refine))
        ladder.take_seen()
        if whole:
            ladder.to_the_end(longer)
        ladder.kept = None
        if refine:
            ladder.test_range(longer)
        warmup = ladder.warmup(longer)
    except KeyboardInterrupt as stop:
        raise LadderInterrupted(ladder.interrupted(refine)) from stop
    best = with_warmup(best_rate(ladder.rungs, refine), warmup)
    larger = at_scale(best, tuple(ladder.rungs), anatomy, has_own_rates(subject.model))
    return dataclasses.replace(ladder.result(warmup), best=best, at_scale=larger)


def _longer(rung: Forecast, seen: Forecast) -> Forecast:
    """`seen` with what only the rung knows, if both are of the same run and `seen` has more steps."""
    is_longer = rung.is_of_run(seen) and seen.last_step > rung.last_step
    if not is_longer or seen.outcome == "not measured":
        return rung
    return dataclasses.replace(seen, lr=rung.lr, hidden=rung.hidden, divergence=rung.divergence)


def rates_around(lr: float) -> list[float]:
    """`lr` and eight others, 10^⅓ apart, four on each side.

    Where a side would leave the range from 1e-5 to 3e-2, the other has more; one is always above `lr`.
    """
    smaller, larger = ([float(f"{lr * 10 ** (sign * k / 3):.3g}") for k in range(1, 9)] for sign in (-1, 1))
    num_below = sum(rate >= 1e-5 for rate in smaller)
    num_above = max(1, sum(rate <= 3e-2 for rate in larger))
    above = min(num_above, max(4, 8 - num_below))
    return [*reversed(smaller[: 8 - above]), lr, *larger[:above]]


def _at_rates(config: Recipe, rates: Iterable[float]) -> list[Recipe]:
    """`config` at each of `rates` once, in ascending order."""
    configs = {rate: dataclasses.replace(config, lr=rate) for rate in rates}
    if not configs:
        raise UsageError("no learning rates", "one or more positive numbers", "try 1e-4 1e-3 1e-2")
    return [configs[rate] for rate in sorted(configs)]


@dataclass
class _Ladder:
    """Forecasts of one model under several configs, in the order in which they were tried.

    Attributes:
        total: number of configs in all, for the progress.
        again: progress of longer trials.
        notes: remarks for the reader of the report, such as trials that could not be made.
        diverged: learning rate at which the loss diverged in a range test; None without one.
        kept: trials that may go on in a longer one, by learning rate; None if none is kept.
        seen: forecast of the user's own steps; None without any.
    """

    subject: Subject
    anatomy: Anatomy
    progress: Progress
    total: int
    again: Progress = lambda step, steps: None
    rungs: list[Forecast] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    diverged: float | None = None
    kept: dict[float, KeptTrial] | None = None
    seen: Forecast | None = None

    def result(self, warmup: Warmup) -> LadderForecast:
        ascending = sorted(self.rungs, key=lambda rung: rung.lr)
        rungs = tuple(with_doubt(with_neighbours(ascending, self.anatomy, self.diverged)))
        return LadderForecast(
            rungs,
            largest_rate(rungs),
            warmup.words,
            warmup.steps,
            ramps=warmup.trials,
            notes=tuple(self.notes),
            range_test=self.diverged,
        )

    def interrupted(self, refine: int) -> LadderForecast:
        """The result after Ctrl-C; it names a rate to use if all rates were tried once."""
        tried = sum(rung.outcome != "not measured" for rung in self.rungs)
        self.take_seen()
        found = self.result(
            Warmup(f"not tried: interrupted after {tried} of {self.total} learning rates", None)
        )
        is_all = tried == self.total
        return dataclasses.replace(found, best=best_rate(self.rungs, refine)) if is_all else found

    def try_all(self, configs: Sequence[Recipe], *, brief: bool = False) -> None:
        """Add a forecast of each of `configs`, which share their steps; `brief` as in `train_copies`."""
        size, before = self.replicas(configs), len(self.rungs)
        for done in range(0, len(configs), size):
            part = configs[done : done + size]
            told = _part(self.progress, before + done, len(part), self.total)
            if not self.is_simple(part) or not self.stepped(part, told, brief):
                for i, config in enumerate(part, before + done):
                    told = _part(self.progress, i, 1, self.total)
                    self.rungs.append(forecast(self.subject, self.anatomy, config, told))

    def try_low(self, configs: Sequence[Recipe]) -> None:
        """Add forecasts of `configs`, whose rates ascend and are lower than those tried so far.

        As long as the best rate may be lower than those tried, the next ones are tried in full. The others
        are decided by larger rates, or else by half a trial, which goes on if that is hasty.
        """
        rest = list(configs)
        while rest and self.best_is_lowest:
            self.try_all(rest[-AT_ONCE:])
            self.rungs.sort(key=lambda rung: rung.lr)
            del rest[-AT_ONCE:]
        decided = [(config, self.by_larger(config)) for config in rest]
        if tried := [config for config, decision in decided if decision is None]:
            self.try_all(tried, brief=True)
        for config, decision in decided:
            if decision is not None:
                self.rungs.append(self.untried(decision, config))
        self.rungs.sort(key=lambda rung: rung.lr)

    def untried(self, decision: Decision, config: Recipe) -> Forecast:
        """The forecast at a rate that larger ones decide."""
        rung = as_forecast(decision, self.subject, self.anatomy, config, ())
        said = certainty_by_larger(decision) if rung.outcome == decision.outcome else None
        return dataclasses.replace(rung, certainty=said)

    def compare(self) -> None:
        """Judge each rung again, with the losses of the larger rates."""
        self.rungs = [compared(rung, self.rungs) for rung in self.rungs]

    def refine(self, config: Recipe) -> None:
        """Try again the best rates over `config.steps` steps."""
        self.try_again(config, candidates(self.rungs))

    def take_seen(self) -> None:
        """Put the user's own steps in the place of the trial of their rate, if they are more."""
        if self.seen is None:
            return
        self.rungs = [_longer(rung, self.seen) for rung in self.rungs]
        self.compare()

    def to_the_end(self, config: Recipe) -> None:
        """Try over a whole run the rates that decide the largest one and are in doubt.

        They are tried one after the other, because each may move what decides.
        """
        whole = dataclasses.replace(config, steps=max(config.steps, CRITERION_STEPS))
        tried = [rung.lr for rung in self.rungs if rung.last_step >= whole.steps]
        for _ in range(MOST_AGAIN):
            rung = in_doubt(self.rungs, tried)
            if rung is None:
                return
            self.try_again(whole, [rung])
            tried.append(rung.lr)

    def try_again(self, config: Recipe, rungs: Sequence[Forecast]) -> None:
        """Replace the forecasts of `rungs` by those of longer trials, `config.steps` each.

        A trial that was kept goes on; the others start from the beginning.
        Ctrl-C leaves the forecasts as they were: longer trials of a part cannot be compared with the rest.
        """
        if not rungs:
            return
        longer = _Ladder(self.subject, self.anatomy, self.again, len(rungs), self.again, kept=self.kept)
        longer.try_all(_at_rates(config, [rung.lr for rung in rungs]))
        again = {rung.lr: rung for rung in longer.rungs if rung.outcome != "not measured"}
        self.rungs = [again.get(rung.lr, rung) for rung in self.rungs]
        for rung in longer.rungs:
            if rung.outcome == "not measured":
                self.notes.append(f"no trial of {config.steps} steps at {rung.lr:g}: {rung.reason}")
        self.compare()

    def test_range(self, config: Recipe) -> None:
        """Find the rate at which the loss diverges in a range test, where a rung has a risk of divergence."""
        if all(rung.divergence is None for rung in self.rungs):
            return
        try:
            found = range_test(self.subject, config, self.again)
        except Exception as error:
            if not is_model_error(error):
                raise
            self.notes.append(f"no range test was made: {describe(error)}")
            return
        self.diverged = None if found is None else found.diverged

    @property
    def best_is_lowest(self) -> bool:
        """Whether the lowest rate tried has the lowest predicted loss, or all fail."""
        healthy = {k: rung.curve for k, rung in enumerate(self.rungs) if rung.curve and not rung.failed}
        return not best_place(healthy, self.rungs[0].warmup)

    def by_larger(self, config: Recipe) -> Decision | None:
        """The decision at `config.lr` from larger rates; None if they leave it open."""
        healthy = [rung for rung in self.rungs if rung.curve and not rung.failed]
        if config.warmup or not healthy or hides_targets(self.subject.batch):
            return None
        found = ahead(config.lr, None, healthy, SOONER)
        if found is None:
            return None
        tokens = is_of_tokens(self.subject.batch)
        return decided_by_larger(found, healthy[0].curve[0].loss, self.subject.baseline, tokens=tokens)

    def is_simple(self, configs: Sequence[Recipe]) -> bool:
        """Whether one trial a rung is made: none with and without warm-up, and none that cannot be made."""
        return not why_not_tried(self.subject, configs[0]) and all(c.warmup <= c.steps for c in configs)

    def replicas(self, configs: Sequence[Recipe]) -> int:
        """Number of rungs stepped together."""
        numbers = sum(p.numel() for p in self.subject.model.parameters())
        return max(1, min(len(configs), MOST_PARAMETERS // numbers))

    def stepped(self, configs: Sequence[Recipe], progress: Progress, brief: bool) -> bool:
        """Whether forecasts of `configs` could be made together.

        A model that cannot be copied, or whose copy does not learn, is left to `forecast`, which gives the
        reason.
        """
        curves: list[list[ForecastStep]] = [[] for _ in configs]
        decisions: Sequence[Decision] | None = None
        train = functools.partial(
            train_copies,
            self.subject,
            self.anatomy,
            configs,
            curves,
            progress,
            sparse=True,
            brief=brief,
            kept=self.kept,
        )
        try:
            with untouched(self.subject.model):
                decisions = in_flushed_thread(train)
        except Exception as error:
            if not is_model_error(error):
                raise
        except KeyboardInterrupt:
            decisions = [Decision("not measured", reason) for reason in map(interrupted, curves, configs)]
            raise
        finally:
            for config, curve, decision in zip(configs, curves, decisions or (), strict=False):
                self.rungs.append(as_forecast(decision, self.subject, self.anatomy, config, curve))
        return decisions is not None

    def warmup(self, config: Recipe) -> Warmup:
        """Whether `config.lr` needs a warm-up, and of how many steps."""
        bare = config.with_warmup(0)
        known = [rung for rung in self.rungs if rung.warmup == 0 and is_same_rate(rung.lr, bare.lr)]
        without = known[0] if known else forecast(self.subject, self.anatomy, bare)
        if without.trains:
            return Warmup("not needed", 0)
        if not without.failed:
            return Warmup(f"not tried: the trial at {config.lr:g} is {without.outcome}", None)
        attempt = functools.partial(forecast, self.subject, self.anatomy, progress=self.progress)
        return shortest_warmup(bare, without, attempt)


def compared(rung: Forecast, rungs: Sequence[Forecast]) -> Forecast:
    """The forecast of a rung judged again with the loss of larger learning rates.

    A failure stays one, but for a plateau of measured values: noise hides that batches agree.
    """
    if not rung.curve or rung.baseline.loss is None:
        return rung
    found = ahead(rung.lr, rung.curve[-1].recent_loss, rungs)
    judged = ("trains", "slow", "undecided") if rung.tokens else ("trains", "slow", "undecided", "plateau")
    if rung.outcome not in judged or found is None:
        return rung
    return judged_again(rung, found)


def judged_again(rung: Forecast, ahead: float | None = None) -> Forecast:
    """The forecast that the rule makes of the measurements of `rung`, see `decide`."""
    decision = decide(
        rung.curve,
        rung.baseline,
        tokens=rung.tokens,
        hidden=rung.hidden,
        warmup=rung.trial_warmup,
        ahead=ahead,
    )
    return dataclasses.replace(
        rung,
        outcome=decision.outcome,
        reason=decision.reason,
        score=decision.score,
        certainty=certainty(decision, rung.curve),
    )


def ahead(lr: float, own: float | None, rungs: Sequence[Forecast], first: float = FIRST) -> float | None:
    """Loss that larger learning rates predict for a run at `lr` at its end; None where they do not.

    In a healthy run, progress is learning rate × steps: at 10 times the learning rate, step 25 corresponds to
    step 250. The prediction is the interpolated mean loss at that step, at the smallest learning rate that
    has reached it. A loss above the run's own means that this learning rate is too large to predict from.

    Args:
        own: loss at the end of the trial at `lr`; None if there was none.
        first: step of the larger rate before which its loss says nothing.
    """
    for other in sorted(rungs, key=lambda each: each.lr):
        step = FAR * lr / other.lr
        num = recent_steps(other.steps)
        seen = [(each.step - min(num, each.step) / 2, each.recent_loss) for each in other.curve[1:]]
        pairs = [(middle, loss) for middle, loss in seen if loss is not None]
        if other.lr > lr and pairs and first <= step <= pairs[-1][0]:
            found = _between(pairs, step)
            return found if found is not None and (own is None or found <= own) else None
    return None


def _between(pairs: Sequence[tuple[float, float]], step: float) -> float | None:
    """The loss at `step`, interpolated linearly between `pairs` of step and loss."""
    for (start, before), (end, after) in itertools.pairwise(pairs):
        if start <= step <= end:
            return before + (after - before) * (step - start) / (end - start)
    return None


def _part(progress: Progress, done: int, size: int, parts: int) -> Progress:
    return lambda step, steps: progress(done * steps + size * step, parts * steps)
