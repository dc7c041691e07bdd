"""The model of a script, followed from its first step to the last that is looked at."""

import dataclasses
import functools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from normscope.anatomy import Anatomy
from normscope.capture.alone import CommunicationError, alone
from normscope.capture.apart import apart
from normscope.capture.child import stoppable
from normscope.capture.counting import Counting
from normscope.capture.first_batch import autocast_needed, is_share_of_step, why_not_alone
from normscope.capture.folder import Folder, Settings
from normscope.capture.script_baseline import ScriptBaseline
from normscope.capture.start import Start
from normscope.forecast import (
    Forecast,
    ForecastStep,
    forecast,
    forecast_measurements,
    rates_around,
)
from normscope.forecast.certainty import certainty
from normscope.forecast.evaluator import Evaluator, gradient_norms
from normscope.forecast.hidden import HiddenStates
from normscope.forecast.recent import mean_recent
from normscope.forecast.rule import FIXED, Decision
from normscope.forecast.thresholds import EXTENSION, LONG
from normscope.forecast.watch import WatchedTrial, measured_steps
from normscope.option_values import LADDER_STEPS, parse_formats
from normscope.pipeline import Check, keep, look, try_others
from normscope.probes import Budget, Spending
from normscope.probes.next_step import at_learning_rate
from normscope.recording.calls import ITEMS, Forward, Forwards
from normscope.rules import RULES, parse_codes
from normscope.rules.remedies import LONGER, needs_rescue
from normscope.subjects import Run, Subject, untouched
from normscope.subjects.assemble import shapes
from normscope.subjects.feed import is_of_tokens
from normscope.subjects.repeats import repeated_after, steps_without_repeat
from normscope.subjects.subject import LOSS_INPUTS
from normscope.timing import timed
from normscope.train import CRITERION_STEPS, LiveOptimizers, Recipe, UpdateRatio

TOLD = 50
"""Steps between two lines on the progress, besides those after a measurement."""
SHARDED = "the weights are sharded over processes (FSDP), and one process cannot run the model alone"
Paused = Callable[[], AbstractContextManager[None]]
UNRECORDED = "the loss is not that of one forward of the model alone, computed by PyTorch's functions"


class Following(Counting):
    """The process that looks at the model before its first step, measures between steps, and reports.

    The run is judged after the steps that were asked for, or when its loss is not finite. If copies are to be
    tried and that first forecast needs a rescue, the script is followed on, because the copies need its
    batches. A loss that is not finite has decided; else the run is judged again at the end. The last
    forecast, which has the most steps, is that of the report. Remedies are tried if it needs a rescue; a run
    that was followed on gets them too unless that forecast says that it trains.

    Attributes:
        followed: steps of the whole trial of the script's own run.
        diverged_at: step after which the loss was not finite; the rest of the script only gives batches.
        ended: why the check ended before its last step, if the script did not.
    """

    def __init__(
        self, run: Run, folder: Folder, settings: Settings, notes: Sequence[str], paused: Paused
    ) -> None:
        super().__init__(run.model, folder, settings)
        self._paused = paused
        self.run, self.settings = run, settings
        self.kept = Forwards()
        self.start = Start()
        self.curve: list[ForecastStep] = []
        self.losses: list[float] = []
        self.rates: list[tuple[float, ...]] = []
        self.followed = settings.followed
        self.diverged_at: int | None = None
        self._notes = list(notes)
        self.baseline = ScriptBaseline()
        self._is_over = False  # the steps of the script
        self._only_losses = SHARDED if any(isinstance(p, DTensor) for p in run.model.parameters()) else ""
        self._check: Check | None = None
        self._judged_at: int | None = None
        self._of_copy: Forecast | None = None
        self.ended = ""
        self._num_skipped = self._num_partly_skipped = 0
        self._ratio: UpdateRatio | None = None
        self._gradients: dict[str, float] = {}
        self._first_loss, self._is_share = math.nan, False
        self._autocast: torch.dtype | None = None
        self._apart_seconds, self._begin = 0.0, time.perf_counter()

    @property
    def check(self) -> Check:
        """The check; it exists from the first step on."""
        assert self._check is not None
        return self._check

    def before_step(self, forwards: Sequence[Forward]) -> None:
        is_first = self._check is None
        if is_first:
            self._examine(forwards)
        if self._is_share:
            forwards = [forward.times(len(forwards)) for forward in forwards]
        for forward in forwards:
            self.kept.add(forward)
        if is_first:
            self._first_loss = float(forwards[0].loss)
            with self._apart():
                self._check = self._started(forwards[0])
        self.losses.append(sum(float(f.loss) for f in forwards) / len(forwards))
        self.baseline.num_forwards.append(len(forwards))
        self.rates.append(self._rates_now)
        if self._is_measured(self.step + 1) and not self._only_losses:
            with self._apart():
                self._gradients = self._gradient_norms()
                self._ratio = UpdateRatio(self.model)
                self._ratio.before()

    def _examine(self, forwards: Sequence[Forward]) -> None:
        """Find out from the first step how the model can be run, and what its losses are."""
        run, batch = self.run, forwards[0].batch
        if not self._only_losses:
            precision = None if run.precision == "float32" else getattr(torch, run.precision)
            with self._apart(precision):
                self._only_losses = why_not_alone(run.model, batch)
        if self._only_losses:
            return
        with self._apart():
            self._autocast = autocast_needed(run, batch)
        if len(forwards) > 1 and forwards[0].recording is not None and ITEMS not in batch:
            self.kept.add(forwards[0])
            subject, self.kept = self._subject(forwards[0]), Forwards()
            with self._apart():
                self._is_share = is_share_of_step(subject, forwards)

    def also_steps_on(self, loss: Tensor) -> None:
        self.losses[-1] += float(loss)
        if self.check.subject.loss_fn is None:
            if self.step == 0:  # what was measured before the first step is without this part
                loss_so_far = self.losses[0]
                self.curve[0] = dataclasses.replace(self.curve[0], loss=loss_so_far, train_loss=loss_so_far)
            return
        first = dict(cast(Mapping[str, Any], next(self.kept())))
        first.pop(LOSS_INPUTS)
        forward = Forward(self.model, first, loss, None)
        self.kept, self.curve, self.baseline = Forwards(), [], ScriptBaseline()
        self.baseline.num_forwards.append(1)
        with self._apart():  # what was measured is that of a part of the loss
            self.kept.add(forward)
            self._first_loss = self.losses[0]
            self._check = self._started(forward)

    def after_step(self, *, skipped: float) -> bool:
        is_skipped = skipped > 0
        self.step += 1
        self._num_skipped += skipped == 1
        self._num_partly_skipped += 0 < skipped < 1
        if is_skipped and not math.isfinite(self._last_loss):
            self.losses.pop()  # its step was not taken, and the next ones are judged without it
        is_over = self.diverged_at is None and not math.isfinite(self._last_loss) and not is_skipped
        is_measured = self._is_measured(self.step)
        if is_over:
            self.diverged_at = self.step
        if is_over or is_measured:
            with self._apart():
                if self.step == self.settings.steps and not self._only_losses:
                    self._find_baseline()  # without it, batches that are no tokens are not compared
                self._measure(self.step if is_over else None)
                self.store_so_far()
        self.folder.count(self.step)
        if is_measured or self.step % TOLD == 0:
            self._tell(f"step {self.step} of {self.last}: loss {self._last_loss:.4g}", 0)
        return (is_over or self.step >= self.last) and not self._goes_on()

    def _goes_on(self) -> bool:
        """Whether the script takes more steps: a few that may end a doubt, or the batches of a whole run."""
        if self.step == self.followed == self.last and self._decision.in_doubt:
            self.last += EXTENSION
        elif self._needs_batches():
            self.followed = self.last = self.settings.whole
            self.folder.note(judged=True)
            who = "the remedies" if self.settings.try_remedies else "other learning rates"
            self._tell(f"following the script for {self.last} steps: {who} need as many batches", 0)
        else:
            return False
        self.folder.follow(self.last)
        return True

    def _needs_batches(self) -> bool:
        """Whether copies of the run are to be tried, which needs a rescue, and lack the script's batches."""
        options = self.settings
        wants = options.try_remedies or options.tries_longer
        if not wants or self.step >= options.whole or self._why_no_copy:
            return False
        with self._apart():
            self._judge()
        if not self.check.needs_rescue:
            return False
        self.check.earlier = self.check.forecast
        return True

    def finish(self) -> None:
        check, self._is_over = self.check, True
        with self._apart():
            is_whole = self.diverged_at is not None or self.step in (self.settings.steps, self.last)
            if not is_whole:  # the gradients of batches are compared at the last step
                before = self.curve.pop() if self.curve[-1].step == self.step else None
                self._measure(max(1, self.step))
                if before is not None:
                    self.curve[-1] = dataclasses.replace(self.curve[-1], update_ratio=before.update_ratio)
            check.cost["steps"] = round(time.perf_counter() - self._begin - self._apart_seconds, 4)
            if self._judged_at != self.step:
                self._judge()
            assert check.forecast is not None
            check.notes.extend(self.baseline.notes)
            check.cut_short = self._ended if self._is_short or self.ended else ""
            for count, part in ((self._num_skipped, ""), (self._num_partly_skipped, "some optimizers in ")):
                if count:
                    skipped = f"{part}{count} of {self.step} steps"
                    check.notes.append(f"the loss scaler skipped {skipped}: a gradient was not finite")
            if self.num_blind:
                check.notes.append(f"{self.num_blind} more optimizer steps had no backward from the model")
            try:
                self._try_copies()
            except CommunicationError as error:
                check.notes.append(f"no copy of the run was tried: {error}")
            check.measurements.extend(forecast_measurements(check.forecast))
            check.interrupted = self._is_short
            self._write_report(check)
        self.folder.tell("done")

    def _write_report(self, check: Check) -> None:
        """Store the report, with the next step at the full rate, which the first step may not have."""
        check.measurements = at_learning_rate(check.measurements, self._recipe().lr)
        self.folder.write_report(check.report())

    def store_so_far(self, stop: KeyboardInterrupt | None = None) -> None:
        """Store the report of a check that ends here, if it is interrupted; `stop` may hold results."""
        if self._check is not None:
            is_kept = stop is not None and keep(self._check, stop)
            if not is_kept and self.losses and self.curve:
                seen = f"only {self.step} of {self.settings.steps} steps were seen"
                of_copy = self._of_copy if self._of_copy and self._of_copy.warmup > self.step else None
                self._check.forecast, self._check.config = of_copy or self._forecast(seen), self._recipe()
            self._check.interrupted, self._check.cut_short = True, self.interrupted
            self._write_report(self._check)

    @property
    def interrupted(self) -> str:
        """Sentence on how far an interrupted check had come."""
        if self.step < self.last and not self._is_over:
            return f"the script was interrupted after {self.step} of {self.last} steps"
        return f"interrupted after the script's {self.step} steps, while copies of the run were tried"

    @property
    def _is_short(self) -> bool:
        """Whether the script took too few steps to judge, unless they failed already."""
        return self.step < self.settings.steps and self.diverged_at is None

    @property
    def _ended(self) -> str:
        return self.ended or f"the script ended after {self.step} of {self.settings.steps} steps"

    @property
    def _why_no_copy(self) -> str:
        """Reason why no copy of the run can be tried; empty if one can."""
        if self._is_short:
            return self._ended
        unrecorded = UNRECORDED if self.check.subject.loss_fn is None else ""
        return self.start.reason or self._only_losses or unrecorded

    def _judge(self) -> None:
        """Forecast the run: from its own steps, or from those of a copy where these lie in its warm-up."""
        check, self._judged_at, self._of_copy = self.check, self.step, None
        if not self._only_losses:
            self._find_baseline()
            self.curve = self.baseline.entered(self.curve, self.losses, check.subject, self.kept)
        check.forecast, check.config = self._forecast(self._ended), self._recipe()
        if self.diverged_at is not None:
            return
        if reason := self._why_no_copy:
            if self._fullest >= self.step - 1 > 0:
                why = f"the learning rate still rose after {self.step} steps, and no copy was tried: {reason}"
                check.forecast = dataclasses.replace(check.forecast, outcome="not measured", reason=why)
            return
        recipe = self._recipe_of_copies()
        if recipe.warmup > self.step:
            with timed(check.cost, "forecast"):
                self._of_copy = forecast(self._subject_of_copies(), check.anatomy, recipe)
            check.forecast = self._of_copy

    def _find_baseline(self) -> None:
        """Find the loss to beat in the batches so far."""
        check, first = self.check, self.model if self.start.model is None else self.start.model
        with timed(check.cost, "targets"):
            check.subject = self.baseline.found(check.subject, first, self.kept)

    def _recipe_of_copies(self) -> Recipe:
        return self.start.recipe(self.run, self.rates, self.settings.steps)

    def _subject_of_copies(self) -> Subject:
        assert self.start.model is not None
        num, steps = len(self.kept), self.baseline.num_forwards
        is_whole = num == sum(steps) and repeated_after(self.kept, num + 1) == num
        return dataclasses.replace(
            self.check.subject, model=self.start.model, recorded_steps=len(steps) if is_whole else 0
        )

    def _try_copies(self) -> None:
        """Try copies of the run at other rates and with remedies, and note on which batches."""
        check, options = self.check, self.settings
        assert check.forecast is not None
        if reason := self._why_no_copy:
            if options.forecast or options.rates or options.try_remedies:
                check.notes.append(f"no copy of the run was tried: {reason}")
            return
        check.config, check.subject = self._recipe_of_copies(), self._subject_of_copies()
        if self._of_copy is not None:
            losses = f"{self.curve[0].loss:.2f} to {self.curve[-1].loss:.2f}"
            check.notes.append(
                f"the script's {self.step} steps lie in its warm-up of about {check.config.warmup}: "
                f"the loss {FIXED} goes from {losses}; the forecast is that of a copy"
            )
        first = check.earlier
        if first is not None and not needs_rescue(check.forecast):
            check.notes.append(f"after {first.steps} steps the forecast was {first.outcome}: {first.reason}")
        with_remedies = options.try_remedies and check.needs_rescue
        if options.forecast or options.rates or with_remedies or self._of_copy is not None:
            check.notes.extend(self._notes_on_batches(with_remedies))
        check.rates = options.rates or (tuple(rates_around(check.config.lr)) if options.forecast else ())
        try_others(check, self._tell, 0)

    def _notes_on_batches(self, with_remedies: bool) -> Iterator[str]:
        """Sentences on the batches of copies: how many there are, and what they are too few for."""
        options, num, parts = self.settings, len(self.kept), self.run.accumulation
        longest = max(
            LADDER_STEPS, options.steps, options.refine or 0, LONGER * options.steps * with_remedies
        )
        different = steps_without_repeat(self.check.subject, max(longest, CRITERION_STEPS), parts)
        repeats = ", which repeat" if different < longest else ""
        yield f"copies were tried on the {num} batches of these steps{repeats}"
        if with_remedies and different < CRITERION_STEPS:
            wanted = CRITERION_STEPS * parts
            yield f"no remedy was tried over a whole run: that takes {wanted} batches, and there are {num}"

    # Measurements.

    def _started(self, first: Forward) -> Check:
        """The check after the look at the model before its first step."""
        options = self.settings
        check = Check(
            self._subject(first),
            self._recipe(),
            Spending(Budget.of(options.budget)),
            parse_codes(options.select, of=RULES),
            parse_codes(options.ignore),
            (),
            options.try_remedies,
            refine=options.refine,
            quantise=parse_formats(options.quantise),
            is_script=True,
        )
        self._check = check
        size = f"{sum(p.numel() for p in self.model.parameters()):,} weights"
        self._tell(f"measuring {type(self.model).__name__} ({size}) before its first step", 0)
        if self._only_losses:
            check.anatomy = Anatomy((), unread=(f"only the loss is judged: {self._only_losses}",))
        else:
            self.start = Start.of(self.run)
            with untouched(self.model):
                look(check, lambda stage, done: None, options.traceback)
        self._measure()
        self.store_so_far()
        return check

    def _subject(self, first: Forward) -> Subject:
        fed = {name: value for name, value in first.batch.items() if name != LOSS_INPUTS}
        loss_fn = self.kept.loss_fn
        if loss_fn is None:
            self._notes.append(f"no loss of copies: {UNRECORDED}")
        elif first.recording is not None and not first.recording.program.is_whole:
            self._notes.append(
                "a part of the loss is not of the model's output (a penalty on weights, a temperature); "
                "copies keep it as it was"
            )
        return Subject(
            model=self.model,
            batch=first.batch,
            loss_fn=loss_fn,
            batches=self.kept,
            seed=0,
            spec=self.settings.command,
            input=f"the script's own batches, {shapes(fed)}",
            notes=tuple(dict.fromkeys(self._notes)),
            run=dataclasses.replace(self.run, batches=self.kept, loss=loss_fn),
            has_own_batches=True,
        )

    def _recipe(self) -> Recipe:
        """The recipe of the script's own steps so far."""
        rows = tuple(self.rates) or (self._rates_now,)
        varied = rows if len(set(rows)) > 1 or not any(rows[0]) else ()  # a warm-up may begin at 0
        live = LiveOptimizers(self.model, self.run.optimizers, (), varied)
        is_rising = self._fullest == len(self.rates) - 1 > 0
        return Recipe.of(
            dataclasses.replace(self.run, scheduler=()),
            optimizer=live,
            lr=live.lr,
            warmup=live.warmup if is_rising else self._warmup,
            steps=self.settings.steps,
        )

    def _gradient_norms(self) -> dict[str, float]:
        """Gradient norms by block; none where an optimizer steps in the backward, before all are there."""
        own = [p for p in self.model.parameters() if p.requires_grad]
        num_there = sum(p.grad is not None for p in own)
        return gradient_norms(self.model, self.check.anatomy) if 2 * num_there > len(own) else {}

    @property
    def _last_loss(self) -> float:
        return self.losses[-1] if self.losses else math.nan

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.run.optimizers for group in optimizer.param_groups]

    @property
    def _rates_now(self) -> tuple[float, ...]:
        """Learning rate of each group as it is now."""
        return tuple(float(group["lr"]) for group in self._groups)

    def _trial(self, num_steps: int) -> WatchedTrial:
        recipe = dataclasses.replace(self.check.config, warmup=self._warmup, steps=num_steps)
        subject, anatomy = self.check.subject, self.check.anatomy
        return WatchedTrial(subject, anatomy, self.model, recipe, self.curve, False, self._states)

    @property
    def _decision(self) -> Decision:
        return self._trial(self._num_steps).decision

    @functools.cached_property
    def _states(self) -> HiddenStates:
        return HiddenStates(self.check.anatomy)

    @property
    def _num_steps(self) -> int:
        """Steps of the trial that the present measurement is a part of.

        It is a short trial first, and goes on as a whole one where the script is followed for longer.
        """
        whole = self.followed
        parts = (self.settings.steps, min(LONG, whole))
        return next((steps for steps in parts if steps >= self.step), whole)

    @property
    def _fullest(self) -> int:
        """First step, counted from 0, with the largest learning rate so far."""
        largest = [max(row) for row in self.rates]
        return largest.index(max(largest)) if largest else 0

    @property
    def _warmup(self) -> int:
        """Steps over which the largest learning rate rose, counted as `LiveOptimizers.warmup` counts."""
        return self._fullest + 1 if self._fullest else 0

    def _is_measured(self, step: int) -> bool:
        steps, followed = self.settings.steps, self.followed
        if self.diverged_at is not None:
            return False
        return step in {*measured_steps(steps), *measured_steps(followed), steps} or step >= followed

    def _measure(self, num_steps: int | None = None) -> None:
        """Measure the model, in a trial of so many steps; None takes `_num_steps`."""
        num_steps = num_steps or self._num_steps
        self.baseline.measured(self.step, num_steps)
        ratio = self._ratio.after() if self._ratio is not None else None
        self._ratio = None
        diversity: dict[str, float] = {}
        if not self._only_losses:
            try:
                if self.check.subject.loss_fn is not None:
                    with untouched(self.model):
                        self._trial(num_steps).measure(self.step, self.losses, ratio, self._gradients)
                    return
                diversity = self._diversity()
            except CommunicationError as error:
                self._only_losses = str(error)
                self.check.notes.append(f"from step {self.step} on only the losses are judged: {error}")
        loss = (self.losses or [self._first_loss])[-1]
        self.curve.append(
            ForecastStep(
                step=self.step,
                train_loss=self.losses[-1] if self.losses else None,
                loss=loss,
                diversity=diversity,
                update_ratio=ratio,
                gradients=self._gradients,
                recent_loss=mean_recent(self.losses, num_steps),
            )
        )

    def _diversity(self) -> dict[str, float]:
        """Token diversity of every stack, for which the loss is not needed."""
        subject = dataclasses.replace(self.check.subject, loss_fn=lambda output, batch: torch.zeros(()))
        with untouched(self.model):
            return Evaluator(subject, self.check.anatomy, self.model, self._states).state()[1]

    def _forecast(self, short: str) -> Forecast:
        """The forecast from the script's own steps; `short` is the reason where they are too few."""
        decision = self._decision
        if self._is_short and decision.outcome not in ("diverges", "collapses"):
            decision = dataclasses.replace(decision, outcome="not measured", reason=short)
        counts = Counter(type(optimizer).__name__ for optimizer in self.run.optimizers)
        names = " + ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())
        return Forecast(
            decision.outcome,
            decision.reason,
            names,
            max(map(max, self.rates)),
            self._warmup,
            self.diverged_at or self.step,
            self.check.subject.unigram_entropy,
            tuple(self.curve),
            decision.score,
            self.check.subject.best_constant,
            is_of_tokens(self.check.subject.batch),
            certainty(decision, self.curve),
            loss_unit=self.check.subject.loss_unit,
        )

    def _tell(self, words: str, done: int) -> None:
        self.folder.note(progress=words)

    @contextmanager
    def _apart(self, autocast: torch.dtype | None = None) -> Iterator[None]:
        """Context of normscope's own work, whose time is not the script's."""
        begin = time.perf_counter()
        try:
            with stoppable(), self._paused(), alone(), apart(self.model, autocast or self._autocast):
                yield
        finally:
            self._apart_seconds += time.perf_counter() - begin


def following(run: Run, folder: Folder, settings: Settings, notes: Sequence[str], paused: Paused) -> Counting:
    """Follow `run.model` in this process: to report on it, or only to count, in all but one of several.

    Args:
        notes: sentences for the report.
        paused: context in which the modules that run are normscope's own work.
    """
    if _rank() == 0 and folder.claim():
        return Following(run, folder, settings, notes, paused)
    return Counting(run.model, folder, settings)


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))
