"""Trials that are measured between their steps, and their decision."""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import nn

from normscope.anatomy import Anatomy
from normscope.forecast.evaluator import Evaluator, gradient_norms
from normscope.forecast.record import ForecastStep
from normscope.forecast.rule import DEAD, EXTENSION, TRANSIENT, Decision, decide, last_diversity
from normscope.subjects import Subject
from normscope.subjects.feed import is_of_tokens
from normscope.subjects.targets import batch_entropy, hides_targets
from normscope.train import Recipe, Trials, UpdateRatio, endless, many_trials, working_copy

Progress = Callable[[int, int], None]

COHERENCE_BATCHES = 6
"""Batches whose token gradients are compared; each costs about two thirds of a training step."""
SPARSE_BATCHES = 4  # the same in a ladder of many rungs

RECENT = 10  # training losses whose mean is `recent_loss`


@dataclass
class WatchedTrial:
    """One trial and its measurements.

    Attributes:
        curve: the measurements, the first one before the first step.
        batches: number of batches compared at the end.
    """

    subject: Subject
    anatomy: Anatomy
    model: nn.Module
    config: Recipe
    curve: list[ForecastStep]
    batches: int

    @property
    def decision(self) -> Decision:
        """The decision from the measurements so far."""
        subject = self.subject
        return decide(
            self.curve,
            subject.baseline.loss,
            unit=subject.baseline.unit,
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
        evaluator = Evaluator(self.subject, self.anatomy, self.model)
        recent = losses[-RECENT:]
        loss, diversity = evaluator.state()
        judged = is_of_tokens(self.subject.batch) or self.subject.baseline.loss is not None
        deep = judged and step >= self.config.steps and math.isfinite(loss)
        coherence, aligned = None, None
        if deep:
            batches = itertools.islice(endless(self.subject.batches), self.batches)
            coherence, aligned = evaluator.pull(list(batches))
        self.curve.append(
            ForecastStep(
                step=step,
                train_loss=losses[-1] if losses else None,
                loss=loss,
                diversity=diversity,
                coherence=coherence,
                alignment=aligned,
                update_ratio=update_ratio,
                gradients=gradients if gradients is not None else self._gradients(step),
                recent_loss=sum(recent) / len(recent) if recent else None,
                batch_entropy=self._entropy_of(step - 1) if step else None,
                largest_loss=_largest(losses),
                largest_gradient=_largest(norms),
            )
        )

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
) -> list[Decision] | None:
    """Train a copy of the model under each of `configs`, measure it into its curve, and decide each.

    Schedules are treated as constant, because none falls within a trial. A model given in eval mode trains in
    train mode.

    Args:
        in_place: train the original, see `working_copy`.
        sparse: measure no more often than the rule needs, and compare fewer batches.

    Returns:
        None where no parameter gets a gradient, or where a model that cannot be copied has several configs.
    """
    configs = [config.at_start() for config in configs]
    models: list[nn.Module] = []
    with contextlib.ExitStack() as held:
        for _ in configs:
            models.append(held.enter_context(working_copy(subject.model, in_place=in_place)))
            if len(configs) > 1 and models[-1] is subject.model:
                return None
            if not subject.model.training:
                models[-1].train()
        torch.manual_seed(configs[0].seed)
        feeds = [endless(subject.batches) for _ in models]
        trials = many_trials(models, feeds, lambda model, batch: subject.loss(batch, model), configs)
        batches = SPARSE_BATCHES if sparse else COHERENCE_BATCHES
        watches = [
            WatchedTrial(subject, anatomy, model, config, curve, batches)
            for model, config, curve in zip(models, configs, curves, strict=True)
        ]
        measure_at = measured_steps(configs[0].steps, sparse)
        return _watched(trials, watches, measure_at, checkpoint, progress)


def _watched(
    trials: Trials,
    watches: Sequence[WatchedTrial],
    measure_at: Set[int],
    checkpoint: Callable[[], None],
    progress: Progress,
) -> list[Decision] | None:
    """Step `trials` to their end, and `EXTENSION` steps more where in doubt; measure between steps."""
    watches[0].measure(0, (), None)
    for watch in watches[1:]:  # the copies are alike before the first step
        watch.curve.append(watches[0].curve[0])
    steps = watches[0].config.steps
    for last in (steps, steps + EXTENSION):
        while trials.step < last and trials.live:
            checkpoint()
            progress(trials.step, last)
            if not _advance(trials, watches, {*measure_at, last}):
                return None
        for k in list(trials.live):
            if not watches[k].decision.in_doubt:
                trials.drop(k)
    progress(trials.step, trials.step)
    return [watch.decision for watch in watches]


def _advance(trials: Trials, watches: Sequence[WatchedTrial], measure_at: Set[int]) -> bool:
    """Take one step; measure at `measure_at` or where the loss is not finite. False where nothing learns."""
    stepped, measuring = list(trials.live), trials.step + 1 in measure_at
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
    """Steps after which to measure, besides the last: half way, and 5, 10, … or (`sparse`) 10 before it."""
    often = itertools.takewhile(lambda step: step < steps, (5 * 2**k for k in range(20)))
    return {max(1, steps // 2), *((max(1, steps - 10),) if sparse else often)}
