"""Try remedies: the effect of each on the forecast of the intended run, and their ranking."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from normscope.anatomy import Anatomy, read_anatomy
from normscope.errors import BatchesError, UsageError, describe, suggest
from normscope.forecast import Forecast, forecast
from normscope.forecast.margins import has_learnt
from normscope.forecast.record import SURE
from normscope.option_values import LADDER_STEPS
from normscope.rules.remedies.remedy import REMEDIES, Changed, NotApplicable
from normscope.subjects import Subject
from normscope.subjects.memory import is_out_of_memory
from normscope.subjects.repeats import steps_without_repeat
from normscope.train import CRITERION_STEPS, Recipe

Progress = Callable[[str, int, int], None]
Status = Literal["rescues", "fails", "slow", "undecided", "not applicable"]

COMBINED = (
    ("pre-ln", "lower-rate"),
    ("pre-ln", "much-lower-rate"),
    ("deepnorm", "lower-rate"),
    ("deepnorm", "much-lower-rate"),
    ("deepnorm", "warm-up"),
    ("small-init", "warm-up"),
    ("output-bias", "warm-up"),
)
"""Pairs that are tried where no remedy alone rescues the run."""
ALIKE = 1.0
"""Log-odds within this of each other count as the same, and the smaller change comes first."""
FLATTERED = {
    "warm-up": 3.0,
    "clip": 3.0,
    "adam-eps": 3.0,
    "output-bias": 3.0,
    "branch-scale": 2.0,
    "small-init": 2.0,
}
"""Amount subtracted from the log-odds of a remedy whose trial looks better than the full run.

The first four keep the loss at the unigram entropy or start there, where its pace is not informative; the
last two change only the start, and that effect fades. Measured on the cells of `normscope bench remedies`: of
the runs that a trial called rescued, 5 of 15 trained with the first four, 6 of 10 with the last two, and 24
of 28 with a lower learning rate, other norms or DeepNorm's scales."""
LONGER = 5
"""Factor on the trial's steps when the remedies to be ranked first are tried again. The longer trial detects
a run that the remedy only lets fail later."""
MOST_LONGER = 4
"""Most longer trials, one after another until one has learnt."""
MOST_WHOLE = 6
"""Most trials over a whole run where none has learnt in a longer one, until one trains. Of the first-ranked
remedies of `normscope bench remedies`, all 23 that had learnt made the run train, and 4 of the 8 others."""
MOST_WHOLE_LATER = 2
"""Most of these for pairs, also where the single remedies have used up `MOST_WHOLE`."""
LEAST_CHANCE = 1e-3
"""Probabilities nearer to 0 or 1 count as this: a certainty has three decimals."""


@dataclass(frozen=True)
class Attempt:
    """One remedy, or several at once, on the intended run.

    Attributes:
        names: names of the remedies, in the order of their application.
        forecast: forecast of the changed run; None where a remedy is not applicable.
        reason: why a remedy is not applicable, or the forecast's reason.
        seconds: time that the attempt took.
        longer: whether the forecast is that of a trial `LONGER` times as long, or of a whole run.
    """

    names: tuple[str, ...]
    forecast: Forecast | None
    reason: str
    seconds: float
    longer: bool = False

    @property
    def name(self) -> str:
        """The remedies' names, joined."""
        return " + ".join(self.names)

    @property
    def status(self) -> Status:
        """Outcome of the attempt."""
        if self.forecast is None:
            return "not applicable"
        if self.forecast.trains:
            return "rescues"
        if self.forecast.failed:
            return "fails"
        return "slow" if self.forecast.outcome == "slow" else "undecided"

    @property
    def odds(self) -> float:
        """Log-odds of the forecast's certainty less the correction of `FLATTERED`; 0 without a certainty."""
        if self.forecast is None or self.forecast.certainty is None:
            return 0.0
        chance = min(1 - LEAST_CHANCE, max(LEAST_CHANCE, self.forecast.certainty))
        return math.log(chance / (1 - chance)) - max(FLATTERED.get(name, 0.0) for name in self.names)

    @property
    def is_open(self) -> bool:
        """True where a longer trial may rescue the run: the trial is not sure that it fails."""
        if self.forecast is None or self.forecast.outcome == "not measured":
            return False
        return self.forecast.certainty is None or self.forecast.certainty > 1 - SURE

    @property
    def is_hasty(self) -> bool:
        """True where the remedy fails by a short trial that does not tell: unsure, or only stuck so far."""
        if self.forecast is None or self.status != "fails":
            return False
        is_stuck = self.forecast.outcome == "plateau" and self.forecast.last_step < LADDER_STEPS
        is_unsure = self.forecast.certainty is not None and not self.forecast.is_sure
        return not self.is_whole and (is_stuck or is_unsure)

    @property
    def is_whole(self) -> bool:
        """True where the trial was over a whole run, so that no longer one says more."""
        return self.forecast is not None and self.forecast.steps >= CRITERION_STEPS

    @property
    def has_learnt(self) -> bool:
        """True where the trial rescues and ends under the loss without the input, on all batches seen last.

        The margin is the one that the criterion asks of the whole run.
        """
        if self.forecast is None or self.status != "rescues" or not self.forecast.curve:
            return False
        baseline, last = self.forecast.baseline, self.forecast.curve[-1]
        if baseline.loss is None or last.train_loss is None or last.recent_loss is None:
            return False
        return has_learnt(last, baseline)

    @property
    def reach(self) -> int:
        """Reach of the attempt: 0 the settings alone, 1 the starting weights, 2 the model."""
        return max(REMEDIES[name].reach for name in self.names)

    def to_dict(self) -> dict[str, Any]:
        """The attempt as plain data, for the report's JSON."""
        remedies = [REMEDIES[name] for name in self.names]
        return {
            "names": list(self.names),
            "status": self.status,
            "reason": self.reason,
            "score": None if self.forecast is None else self.forecast.score,
            "summary": " ".join(remedy.summary for remedy in remedies),
            "code": [remedy.code for remedy in remedies],
            "cost": "; ".join(remedy.cost for remedy in remedies),
            "source": "; ".join(remedy.source for remedy in remedies),
            "seconds": round(self.seconds, 3),
            "longer": self.longer,
            "forecast": None if self.forecast is None else self.forecast.to_dict(),
        }


@dataclass(frozen=True)
class Rescue:
    """All attempts, the best first.

    Attributes:
        attempts: ranked. First those that also rescue in a longer trial, and of these the one that has learnt
            by its end; then the others that rescue, by certainty and smaller change; then those that do not;
            last those not applicable.
        reason: why nothing was tried, or why not all, or why the first-ranked may not train; else empty.
    """

    attempts: tuple[Attempt, ...] = ()
    reason: str = ""

    @property
    def best(self) -> Attempt | None:
        """The first-ranked attempt, where it rescues the run; None otherwise."""
        return self.attempts[0] if self.attempts and self.attempts[0].status == "rescues" else None

    def to_dict(self) -> dict[str, Any]:
        """All attempts as plain data, for the report's JSON."""
        return {
            "best": None if self.best is None else list(self.best.names),
            "reason": self.reason,
            "attempts": [attempt.to_dict() for attempt in self.attempts],
        }


class RemediesInterrupted(KeyboardInterrupt):
    """Ctrl-C while remedies were tried; `rescue` holds the attempts until then."""

    def __init__(self, rescue: Rescue) -> None:
        self.rescue = rescue
        super().__init__(rescue.reason)


def needs_rescue(before: Forecast) -> bool:
    """True where a remedy could improve the forecast of the intended run."""
    return before.failed or before.outcome == "needs-warmup"


def try_remedies(
    subject: Subject,
    anatomy: Anatomy,
    config: Recipe,
    before: Forecast,
    progress: Progress | None = None,
    names: Iterable[str] | None = None,
    *,
    whatever: bool = False,
) -> Rescue:
    """Forecast the intended run with each remedy that can be applied, on copies, and rank the remedies.

    Args:
        anatomy: anatomy of the subject.
        before: forecast of the unchanged run; where it does not fail, nothing is tried.
        progress: called as `progress(words, done, total)` before each trial and at each of its steps.
        names: names of `REMEDIES` to try; None tries all.
        whatever: try them even where `before` does not fail.

    Raises:
        UsageError: a name that is not a remedy.
        RemediesInterrupted: Ctrl-C; its `.rescue` holds the attempts until then.
    """
    plan = [(name,) for name in _known(names)]
    if not (whatever or needs_rescue(before)):
        return Rescue((), _why_none(before))
    tries = _Tries(subject, anatomy, config, progress or (lambda words, done, total: None))
    try:
        tries.go_through(plan, MOST_WHOLE)
        if names is None and not tries.is_rescued:
            tries.go_through(COMBINED, max(MOST_WHOLE_LATER, MOST_WHOLE - tries.num_whole))
    except KeyboardInterrupt as stop:
        reason = f"interrupted {tries.place}"
        raise RemediesInterrupted(Rescue(ranked(tries.attempts), reason)) from stop
    found = ranked(tries.attempts)
    return Rescue(found, _doubt(found))


def _doubt(attempts: Sequence[Attempt]) -> str:
    """Words where whole runs show no remedy that trains, and the first-ranked had none; else empty."""
    whole = [each for each in attempts if each.is_whole]
    best = attempts[0] if attempts else None
    if best is None or best.status != "rescues" or best.has_learnt or not whole:
        return ""
    if best.is_whole or any(each.status == "rescues" for each in whole):
        return ""
    number = f"none of the {len(whole)} remedies that were tried" if len(whole) > 1 else "the one tried"
    verb = "trains" if len(whole) > 1 else "does not train"
    return f"{number} over a whole run {verb}; {best.name} had a shorter trial only, and may not train either"


def _why_none(before: Forecast) -> str:
    """The reason why no remedy is tried on a run that is not known to fail."""
    if before.outcome == "not measured":
        return f"nothing was tried: the run as it is has no forecast ({before.reason})"
    if before.outcome == "undecided":
        return "nothing was tried: whether the run trains is undecided, so that no remedy can be judged"
    return f"nothing to rescue: the forecast of the run as it is says {before.outcome}"


def _known(names: Iterable[str] | None) -> list[str]:
    wanted = list(REMEDIES if names is None else names)
    for name in wanted:
        if name not in REMEDIES:
            do = suggest(name, REMEDIES, "choose one of them")
            raise UsageError(f"remedy {name!r}", f"one of {', '.join(REMEDIES)}", do)
    return wanted


@dataclass
class _Tries:
    """The intended run, and the attempts to rescue it."""

    subject: Subject
    anatomy: Anatomy
    config: Recipe
    progress: Progress
    attempts: list[Attempt] = field(default_factory=list)
    planned: int = 0

    @property
    def place(self) -> str:
        """Words for an interrupt that say how far the attempts have come."""
        if len(self.attempts) == self.planned:
            return f"after all {self.planned} remedies, while the best was tried over a longer trial"
        return f"after {len(self.attempts)} of {self.planned} remedies"

    def go_through(self, plan: Sequence[tuple[str, ...]], most_whole: int) -> None:
        """Try each of `plan`, then the best ones longer, and over a whole run where that leaves it open."""
        self.planned += len(plan)
        for number, names in enumerate(plan):
            words = f"remedy {' + '.join(names)}"
            self.progress(words, number, len(plan))
            self.attempts.append(self.attempt(names, self.config, words, number, len(plan)))
        self.hold()
        if self.may_run_whole:
            self.to_the_end(plan, most_whole)

    def hold(self) -> None:
        """Try the first-ranked attempts over a longer trial, one after another until one has learnt.

        What may only be slow is tried again where nothing else rescues the run.
        """
        far = dataclasses.replace(self.config, steps=LONGER * self.config.steps)
        for number in range(MOST_LONGER):
            tried = ranked(self.attempts)
            best = next((each for each in tried if not each.longer and each.forecast is not None), None)
            held = [each for each in self.attempts if each.longer and each.status == "rescues"]
            if best is None or any(each.has_learnt for each in held):
                return
            if best.status != "rescues" and (held or not best.is_open):
                return
            self.again(best, far, f"{best.name}, longer", number, MOST_LONGER)

    def to_the_end(self, plan: Sequence[tuple[str, ...]], most: int) -> None:
        """Try the first-ranked open attempts of `plan` over whole runs, at most `most`, until one learns."""
        whole = dataclasses.replace(self.config, steps=max(LONGER * self.config.steps, CRITERION_STEPS))
        for number in range(most):
            ours = [each for each in ranked(self.attempts) if each.names in plan]
            tried = [each for each in ours if not each.is_whole and each.is_open]
            if not tried or any(each.longer and each.has_learnt for each in self.attempts):
                return
            self.again(tried[0], whole, f"{tried[0].name}, a whole run", number, most)

    def again(self, attempt: Attempt, config: Recipe, words: str, number: int, total: int) -> None:
        """Replace an attempt by one with a longer trial."""
        made = self.attempt(attempt.names, config, words, number, total)
        longer = dataclasses.replace(made, longer=True, seconds=attempt.seconds + made.seconds)
        self.attempts[self.attempts.index(attempt)] = longer

    @property
    def num_whole(self) -> int:
        """Number of trials over a whole run."""
        return sum(attempt.is_whole for attempt in self.attempts)

    @property
    def is_rescued(self) -> bool:
        """Whether some attempt rescues the run."""
        return any(attempt.status == "rescues" for attempt in self.attempts)

    @property
    def may_run_whole(self) -> bool:
        """Whether a whole run shows more than that a few batches of the user's can be learnt by heart."""
        if self.subject.baseline.loss is None or (self.config.run_steps or math.inf) < CRITERION_STEPS:
            return False
        steps = steps_without_repeat(self.subject, CRITERION_STEPS, self.config.accumulation)
        return steps >= CRITERION_STEPS

    def attempt(self, names: tuple[str, ...], config: Recipe, words: str, number: int, total: int) -> Attempt:
        """Apply the remedies one after another to a copy, and forecast.

        A remedy that raises an error on this model is not applicable, with the error as its reason. The
        others are tried all the same.
        """

        def step(taken: int, steps: int) -> None:
            self.progress(f"{words}, step {taken} of {steps}", number, total)

        start = time.perf_counter()
        seen = None
        try:
            changed, settings = apply_all(names, self.subject, self.anatomy, config)
            reading = self.anatomy if changed is self.subject else read_anatomy(changed)
        except NotApplicable as error:
            reason = error.reason
        except BatchesError:
            raise
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            if is_out_of_memory(error):
                raise
            reason = f"applying it raised {describe(error)}"
        else:
            seen = forecast(changed, reading, _short(settings, config), step)
            reason = seen.reason
        return Attempt(names, seen, reason, time.perf_counter() - start)


def apply_all(names: Iterable[str], subject: Subject, anatomy: Anatomy, config: Recipe) -> Changed:
    """The subject and the settings with all the remedies; NotApplicable where one is not."""
    reading, changed = anatomy, subject
    for name in names:
        before = changed
        changed, config = REMEDIES[name].apply(changed, reading, config)
        if changed is not before:
            reading = read_anatomy(changed)
    return changed, config


def _short(settings: Recipe, config: Recipe) -> Recipe:
    """The settings for a trial: a new warm-up that is longer than the trial is compressed into it."""
    if settings.warmup == config.warmup or settings.warmup < settings.steps:
        return settings
    longer = dataclasses.replace(settings, steps=config.steps + config.steps // 2)
    return longer.with_warmup(config.steps)


def ranked(attempts: Iterable[Attempt]) -> tuple[Attempt, ...]:
    """The best first; see `Rescue`."""
    order: dict[Status, int] = {"rescues": 0, "slow": 1, "undecided": 2, "fails": 3, "not applicable": 4}

    def rank(attempt: Attempt) -> tuple[int, bool, bool, float, int, int]:
        surely = -round(attempt.odds / ALIKE)
        held = attempt.longer and attempt.status == "rescues"
        learnt = held and attempt.has_learnt
        return order[attempt.status], not held, not learnt, surely, len(attempt.names), attempt.reach

    return tuple(sorted(attempts, key=rank))
