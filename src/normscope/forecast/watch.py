"""Trials that are measured between their steps, and their decision."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from torch import nn

from normscope.anatomy import Anatomy
from normscope.forecast.evaluator import Evaluator, gradient_norms
from normscope.forecast.hidden import HiddenStates
from normscope.forecast.kept import KeptTrial, kept_trials, side_by_side
from normscope.forecast.margins import last_diversity
from normscope.forecast.recent import mean_baseline, mean_recent
from normscope.forecast.record import ForecastStep
from normscope.forecast.rule import Decision, decide
from normscope.forecast.stopping import EARLIEST, best_place, is_hasty, is_settled
from normscope.forecast.thresholds import DEAD, EXTENSION, LONG, TRANSIENT
from normscope.subjects import Subject
from normscope.subjects.feed import is_of_tokens
from normscope.subjects.targets import batch_entropy, hides_targets
from normscope.train import (
    Recipe,
    Trials,
    UpdateRatio,
    endless,
    working_copy,
)

Progress = Callable[[int, int], None]

COHERENCE_BATCHES = 6
"""Batches whose token gradients are compared; each costs about two thirds of a training step."""
SPARSE_BATCHES = 4  # the same in a ladder of many rungs


@dataclass
class WatchedTrial:
    """One trial and its measurements.

    Attributes:
        curve: the measurements, the first one before the first step.
        sparse: whether the trial is measured no more often than the rule needs, as in a ladder.
        states: reader of the hidden states, which copies of a model share.
    """

    subject: Subject
    anatomy: Anatomy
    model: nn.Module
    config: Recipe
    curve: list[ForecastStep]
    sparse: bool
    states: HiddenStates

    @property
    def decision(self) -> Decision:
        """The decision from the measurements so far."""
        subject = self.subject
        return decide(
            self.curve,
            subject.baseline,
            tokens=is_of_tokens(subject.batch),
            hidden=hides_targets(subject.batch),
            warmup=self.config.warmup,
        )

    def measure(
        self,
        step: int,
        losses: Sequence[float],
        update_ratio: float | None,
        gradients: dict[str, float] | None = None,
        norms: Sequence[float] = (),
    ) -> None:
        """Append the measurement after `step` to the curve.

        Args:
            losses: those of the training batches so far.
            update_ratio: of the last step, see `UpdateRatio`.
            gradients: norms by block of the last step's gradients; None reads them from the model.
            norms: norms of all gradients of each step so far, where known.
        """
        loss, diversity = Evaluator(self.subject, self.anatomy, self.model, self.states).state()
        self.curve.append(
            ForecastStep(
                step=step,
                train_loss=losses[-1] if losses else None,
                loss=loss,
                diversity=diversity,
                update_ratio=update_ratio,
                gradients=gradients if gradients is not None else self._gradients(step),
                recent_loss=mean_recent(losses, self.config.steps),
                recent_baseline=mean_baseline(self.subject, self.config, step),
                batch_entropy=self._entropy_of(step - 1) if step else None,
                largest_loss=_largest(losses),
                largest_gradient=_largest(self._known(norms, losses)),
            )
        )
        if step >= self.config.steps and not (self.sparse and self.is_settled):
            self.compare_gradients()

    def compare_gradients(self) -> None:
        """Add to the last measurement how far several batches agree, if the rule asks for it."""
        judged = is_of_tokens(self.subject.batch) or self.subject.baseline.loss is not None
        if not judged or not math.isfinite(self.curve[-1].loss):
            return
        num = SPARSE_BATCHES if self.sparse else COHERENCE_BATCHES
        batches = list(itertools.islice(endless(self.subject.batches), num))
        coherence, aligned = Evaluator(self.subject, self.anatomy, self.model, self.states).pull(batches)
        self.curve[-1] = dataclasses.replace(self.curve[-1], coherence=coherence, alignment=aligned)

    @property
    def is_settled(self) -> bool:
        """Whether the trial is decided without more steps, see `stopping`."""
        tokens = is_of_tokens(self.subject.batch)
        return is_settled(self.curve, self.subject.baseline, tokens=tokens, warmup=self.config.warmup)

    @property
    def is_hasty(self) -> bool:
        """Whether half of the trial is not enough, see `stopping`."""
        return is_hasty(self.decision, self.curve[-1], self.subject.baseline)

    def _known(self, norms: Sequence[float], losses: Sequence[float]) -> list[float]:
        """The norms of gradients that are known, inf where the loss was not finite.

        Left out are those that cannot be computed, and overflows of scaled gradients in float16: the scaler
        skips such a step.
        """
        known = []
        for norm, loss in zip(norms, losses, strict=False):
            skipped = self.config.precision == "float16" and not math.isfinite(norm)
            if not math.isfinite(loss):
                known.append(math.inf)
            elif not math.isnan(norm) and not skipped:
                known.append(norm)
        return known

    def _gradients(self, step: int) -> dict[str, float]:
        return gradient_norms(self.model, self.anatomy) if step else {}

    def _entropy_of(self, number: int) -> float | None:
        """Unigram entropy of training batch `number`, from 0; None where that of the text is not known."""
        if self.subject.unigram_entropy is None or self.subject.has_own_batches:
            return None
        return batch_entropy(next(itertools.islice(endless(self.subject.batches), number, None)))

    @property
    def hopeless(self) -> bool:
        """Whether nothing can change the decision any more."""
        last = self.curve[-1]
        return last.step >= TRANSIENT and bool(last.diversity) and last_diversity(last) <= DEAD


def train_copies(
    subject: Subject,
    anatomy: Anatomy,
    configs: Sequence[Recipe],
    curves: Sequence[list[ForecastStep]],
    progress: Progress,
    checkpoint: Callable[[], None],
    *,
    in_place: bool = False,
    sparse: bool = False,
    brief: bool = False,
    kept: dict[float, KeptTrial] | None = None,
) -> list[Decision] | None:
    """Train a copy of the model under each of `configs`, measure it into its curve, and decide each.

    Schedules are treated as constant, because none falls within a trial. A model given in eval mode trains in
    train mode.

    Args:
        in_place: train the original, see `working_copy`.
        sparse: measure no more often than the rule needs, and compare fewer batches.
        brief: stop half-way each trial that is not hasty, see `stopping`.
        kept: shorter trials under the same configs, by learning rate. They go on and are removed, and trials
            that were stepped one after another are added. None keeps none.

    Returns:
        None where no parameter gets a gradient, or where a model that cannot be copied has several configs.
    """
    configs = [config.at_start() for config in configs]
    earlier = [kept.pop(config.lr, None) if kept else None for config in configs]
    models: list[nn.Module] = []
    with contextlib.ExitStack() as held:
        for before in earlier:
            if before is not None:
                models.append(before.trial.model)
                continue
            models.append(held.enter_context(working_copy(subject.model, in_place=in_place)))
            if len(configs) > 1 and models[-1] is subject.model:
                return None
            if not subject.model.training:
                models[-1].train()
        trials = side_by_side(subject, models, configs, earlier)
        states = HiddenStates(anatomy)
        watches = []
        for model, config, curve, before in zip(models, configs, curves, earlier, strict=True):
            curve.extend(before.measurements(subject, config) if before else ())
            watches.append(WatchedTrial(subject, anatomy, model, config, curve, sparse, states))
        measure_at = measured_steps(configs[0].steps, sparse)
        decisions = _watched(trials, watches, measure_at, checkpoint, progress, brief)
        if kept is not None and models[0] is not subject.model:
            kept |= kept_trials(trials, curves)
        return decisions


def _watched(
    trials: Trials,
    watches: Sequence[WatchedTrial],
    measure_at: Set[int],
    checkpoint: Callable[[], None],
    progress: Progress,
    brief: bool,
) -> list[Decision] | None:
    """Step `trials` to their end, and `EXTENSION` steps more where in doubt; measure between steps.

    Of several trials, those that are decided half-way stop there; `brief` ones are decided there. Trials
    longer than `LONG` steps go on: they are compared at their ends, and what has learnt soonest may be best.
    """
    new = [watch for watch in watches if not watch.curve]
    for watch in new[:1]:
        watch.measure(0, (), None)
    for watch in new[1:]:  # the copies are alike before the first step
        watch.curve.append(new[0].curve[0])
    steps = watches[0].config.steps
    stops = (brief or (len(watches) > 1 and steps <= LONG)) and steps // 2 >= EARLIEST
    for last in (steps // 2 if stops else steps, steps, steps + EXTENSION):
        while trials.step < last and trials.live:
            checkpoint()
            progress(trials.step, max(last, steps))
            if not _advance(trials, watches, {*measure_at, last}):
                return None
        ended = _decided(trials, watches, brief) if last < steps else _sure(trials, watches)
        for k in ended:
            trials.drop(k)
    progress(trials.step, trials.step)
    return [watch.decision for watch in watches]


def _sure(trials: Trials, watches: Sequence[WatchedTrial]) -> list[int]:
    """Live trials that end after their steps: all that are not in doubt."""
    return [k for k in trials.live if not watches[k].decision.in_doubt]


def _decided(trials: Trials, watches: Sequence[WatchedTrial], brief: bool) -> list[int]:
    """Live trials that end half-way: the settled ones, or (`brief`) all that are not hasty.

    Unless they are brief, the trial that is predicted to have the lowest loss and its neighbours go on: the
    best rate is among them.
    """
    if brief:
        for k in trials.live:
            if not watches[k].is_settled:
                watches[k].compare_gradients()
        return [k for k in trials.live if not watches[k].is_hasty]
    healthy = {k: watches[k].curve for k in trials.live if not watches[k].decision.failed}
    best = best_place(healthy, watches[0].config.warmup)
    beside = set() if best is None else {best - 1, best, best + 1} & healthy.keys()
    return [k for k in trials.live if watches[k].is_settled and k not in beside]


def _advance(trials: Trials, watches: Sequence[WatchedTrial], measure_at: Set[int]) -> bool:
    """Take one step; measure at `measure_at` or where the loss is not finite. False where nothing learns."""
    stepped, measuring = [k for k in trials.live if not trials.is_ahead(k)], trials.step + 1 in measure_at
    ratios = {k: UpdateRatio(watches[k].model) for k in stepped} if measuring else {}
    for ratio in ratios.values():
        ratio.before()
    trials.advance()
    for k in stepped:
        alive = k in trials.live
        if alive and (measuring or trials.step == 1):
            trials.share_gradients(k)
        if alive and trials.step == 1 and all(p.grad is None for p in watches[k].model.parameters()):
            return False
        if measuring or not alive:
            changed = ratios[k].after() if measuring else None
            watches[k].measure(trials.step, trials.losses[k], changed, norms=trials.gradient_norms[k])
            if alive and watches[k].hopeless:
                trials.drop(k)
    return True


def _largest(values: Sequence[float]) -> float | None:
    """The largest of `values`, inf where one is not finite; None without any."""
    if not values:
        return None
    return max(values) if all(map(math.isfinite, values)) else math.inf


def measured_steps(steps: int, sparse: bool = False) -> set[int]:
    """Steps after which to measure, besides the last.

    These are half-way, and 5, 10, 20, …; or (`sparse`) a quarter of the way, and 10 steps before the end.
    """
    if sparse:
        return {max(1, steps // 4), max(1, steps // 2), max(1, steps - 10)}
    often = itertools.takewhile(lambda step: step < steps, (5 * 2**k for k in range(20)))
    return {max(1, steps // 2), *often}
