"""Trials under watch: steps, looks between them, and what is decided from those."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from torch import nn

from normscope.anatomy import Anatomy
from normscope.probes._layout import tensors_in
from normscope.probes.forecast_look import Eye, gradient_norms
from normscope.probes.forecast_record import ForecastStep
from normscope.probes.forecast_rule import DEAD, EXTENSION, TRANSIENT, Decision, decide, last_diversity
from normscope.subjects import Batch, Subject
from normscope.train import TrialConfig, Trials, UpdateRatio, endless
from normscope.train.stack_forward import LossOf

Progress = Callable[[int, int], None]

COHERENCE_BATCHES = 6
"""Batches whose token gradients are compared; each costs about two thirds of a training step."""


RECENT = 10
"""Training losses whose mean is `recent_loss`."""


def loss_of(subject: Subject) -> LossOf:
    """The subject's loss as a trial wants it."""
    return lambda model, batch: subject.loss(batch, model)


def short(config: TrialConfig, warmup: int) -> TrialConfig:
    """The first steps of a run as `config` says: a schedule has not begun to fall by then."""
    return dataclasses.replace(config, warmup=warmup, schedule="constant")


@dataclass
class Watch:
    """One trial and what was seen of it.

    Attributes:
        looks: after which steps to look, beside the last; None for the usual ones.
        batches: how many are compared at the end.
    """

    subject: Subject
    anatomy: Anatomy
    model: nn.Module
    config: TrialConfig
    curve: list[ForecastStep] = field(default_factory=list)
    looks: Set[int] | None = None
    batches: int = COHERENCE_BATCHES

    @property
    def decision(self) -> Decision:
        """What the looks so far say."""
        entropy, warmup = self.subject.unigram_entropy, self.config.warmup
        return decide(self.curve, entropy, tokens=self._fed_tokens, warmup=warmup)

    def look(self, step: int, losses: Sequence[float], update_ratio: float | None) -> None:
        """Put what can be seen after `step` behind the curve; `losses` are those of the training batches."""
        eye = Eye(self.subject, self.anatomy, self.model)
        loss, diversity = eye.state()
        deep = self._fed_tokens and step >= self.config.steps and math.isfinite(loss)
        coherence, aligned = eye.pull(self._sample()) if deep else (None, None)
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
                recent_loss=_mean(losses[-RECENT:]),
            )
        )

    @property
    def hopeless(self) -> bool:
        """Whether nothing that comes can change what is decided."""
        last = self.curve[-1]
        return last.step >= TRANSIENT and bool(last.diversity) and last_diversity(last) <= DEAD

    @property
    def _fed_tokens(self) -> bool:
        """Whether the batches are token ids, so that they have something in common to learn."""
        if self.subject.unigram_entropy is not None:
            return True
        first = next(tensors_in(self.subject.batch), None)
        return first is not None and not first.is_floating_point() and not first.is_complex()

    def _sample(self) -> list[Batch]:
        return list(itertools.islice(endless(self.subject.batches), self.batches))


def watched(
    trials: Trials, watches: Sequence[Watch], checkpoint: Callable[[], None], progress: Progress
) -> list[Decision] | None:
    """Step `trials` to their end, with looks on the way; a decision each, or None where nothing is learnt.

    A trial in doubt at the end goes on for `EXTENSION` steps. None: no parameter gets a gradient.
    """
    for watch in watches:
        watch.look(0, (), None)
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


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _advance(trials: Trials, watches: Sequence[Watch], last: int) -> bool:
    """One step, with a look after it when it is time or when the loss is gone; False: nothing to learn."""
    looks = _looks(watches[0].config.steps) if watches[0].looks is None else watches[0].looks
    stepped, looking = list(trials.live), trials.step + 1 in {*looks, last}
    ratios = {k: UpdateRatio(watches[k].model) for k in stepped} if looking else {}
    for ratio in ratios.values():
        ratio.before()
    trials.advance()
    for k in stepped:
        alive = k in trials.live
        if alive and (looking or trials.step == 1):
            trials.share_gradients(k)
        if alive and trials.step == 1 and all(p.grad is None for p in watches[k].model.parameters()):
            return False
        if looking or not alive:
            watches[k].look(trials.step, trials.losses[k], ratios[k].after() if looking else None)
            if alive and watches[k].hopeless:
                trials.drop(k)
    return True


def _looks(steps: int) -> set[int]:
    """After which steps to look: 5, 10, 20, 40, …, half way, and the last."""
    return {
        steps,
        max(1, steps // 2),
        *itertools.takewhile(lambda step: step < steps, (5 * 2**k for k in range(20))),
    }
