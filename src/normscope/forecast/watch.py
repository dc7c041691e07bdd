"""Trials that are measured between their steps, and the decision that follows."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from torch import nn

from normscope.anatomy import Anatomy
from normscope.forecast.evaluator import Evaluator, gradient_norms
from normscope.forecast.record import ForecastStep
from normscope.forecast.rule import DEAD, EXTENSION, TRANSIENT, Decision, decide, last_diversity
from normscope.subjects import Subject
from normscope.subjects.feed import tensors_in
from normscope.train import TrialConfig, Trials, UpdateRatio, endless
from normscope.train.stack_forward import LossOf

Progress = Callable[[int, int], None]

COHERENCE_BATCHES = 6
"""Batches whose token gradients are compared; each costs about two thirds of a training step."""


RECENT = 10  # training losses whose mean is `recent_loss`


def loss_of(subject: Subject) -> LossOf:
    """The subject's loss as a trial wants it."""
    return lambda model, batch: subject.loss(batch, model)


def short(config: TrialConfig, warmup: int) -> TrialConfig:
    """The first steps of the run of `config`: its schedule has not begun to fall by then."""
    return dataclasses.replace(config, warmup=warmup, schedule="constant")


@dataclass
class WatchedTrial:
    """One trial and its measurements.

    Attributes:
        curve: one entry a measurement, the first before the first step.
        measure_at: the steps after which to measure, beside the last; None for the usual ones.
        batches: number of batches that are compared at the end.
    """

    subject: Subject
    anatomy: Anatomy
    model: nn.Module
    config: TrialConfig
    curve: list[ForecastStep] = field(default_factory=list)
    measure_at: Set[int] | None = None
    batches: int = COHERENCE_BATCHES

    @property
    def decision(self) -> Decision:
        """The decision from the measurements so far."""
        entropy, warmup = self.subject.unigram_entropy, self.config.warmup
        return decide(self.curve, entropy, tokens=self._fed_tokens, warmup=warmup)

    def measure(self, step: int, losses: Sequence[float], update_ratio: float | None) -> None:
        """Append the measurement after `step` to the curve; `losses` are those of the training batches."""
        evaluator = Evaluator(self.subject, self.anatomy, self.model)
        recent = losses[-RECENT:]
        loss, diversity = evaluator.state()
        deep = self._fed_tokens and step >= self.config.steps and math.isfinite(loss)
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
                gradients=gradient_norms(self.model, self.anatomy) if step else {},
                recent_loss=sum(recent) / len(recent) if recent else None,
            )
        )

    @property
    def hopeless(self) -> bool:
        """Whether nothing can change the decision any more."""
        last = self.curve[-1]
        return last.step >= TRANSIENT and bool(last.diversity) and last_diversity(last) <= DEAD

    @property
    def _fed_tokens(self) -> bool:
        """Whether the batches are token ids, which have something in common to learn."""
        if self.subject.unigram_entropy is not None:
            return True
        first = next(iter(tensors_in(self.subject.batch)), None)
        return first is not None and not first.is_floating_point() and not first.is_complex()


def watched(
    trials: Trials, watches: Sequence[WatchedTrial], checkpoint: Callable[[], None], progress: Progress
) -> list[Decision] | None:
    """Step `trials` to their end and measure on the way; a decision each, or None where nothing is learnt.

    A trial in doubt at the end goes on for `EXTENSION` steps. None: no parameter gets a gradient.
    """
    for watch in watches:
        watch.measure(0, (), None)
    steps = watches[0].config.steps
    for last in (steps, steps + EXTENSION):
        while trials.step < last and trials.live:
            checkpoint()
            progress(trials.step, last)
            if not _advance(trials, watches, last):
                return None
        for k in list(trials.live):
            if not watches[k].decision.in_doubt:
                trials.drop(k)
    progress(trials.step, trials.step)
    return [watch.decision for watch in watches]


def _advance(trials: Trials, watches: Sequence[WatchedTrial], last: int) -> bool:
    """One step, measured when it is time or when the loss is not finite; False: nothing to learn."""
    usual = _measured_steps(watches[0].config.steps)
    steps = usual if watches[0].measure_at is None else watches[0].measure_at
    stepped, measuring = list(trials.live), trials.step + 1 in {*steps, last}
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
            watches[k].measure(trials.step, trials.losses[k], ratios[k].after() if measuring else None)
            if alive and watches[k].hopeless:
                trials.drop(k)
    return True


def _measured_steps(steps: int) -> set[int]:
    """The steps after which to measure: 5, 10, 20, 40, …, half way, and the last."""
    return {
        steps,
        max(1, steps // 2),
        *itertools.takewhile(lambda step: step < steps, (5 * 2**k for k in range(20))),
    }
