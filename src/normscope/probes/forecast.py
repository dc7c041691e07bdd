"""Forecast: take the first real steps on a copy of the model, watch them, and say what comes of the run."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from normscope.anatomy import Anatomy
from normscope.errors import UsageError
from normscope.probes._layout import tensors_in
from normscope.probes.forecast_look import Eye, gradient_norms
from normscope.probes.forecast_record import Forecast, ForecastInterrupted, ForecastStep, Outcome
from normscope.probes.forecast_rule import EXTENSION, Decision, decide
from normscope.probes.measurement import Measurement, not_measured
from normscope.subjects import Batch, Subject, untouched
from normscope.subjects.memory import is_out_of_memory
from normscope.train import Trial, TrialConfig, UpdateRatio, endless, in_flushed_thread, working_copy

__all__ = ["Forecast", "ForecastInterrupted", "ForecastStep", "Outcome", "forecast", "forecast_measurements"]

Progress = Callable[[int, int], None]

COHERENCE_BATCHES = 6
"""Batches whose token gradients are compared; each costs about two thirds of a training step."""

NO_LOSS = "no loss function is known for this model; give one, as loss_fn or from the factory"


def forecast(
    subject: Subject, anatomy: Anatomy, config: TrialConfig, progress: Progress | None = None
) -> Forecast:
    """Train a copy for `config.steps` steps as the user would, and judge what is seen on the way.

    The trial runs in a thread that flushes denormals, on a copy, with the modes (dropout) the model comes in,
    except that a model given in eval mode trains in train mode. Where the warm-up is longer than the trial,
    the full rate is tried without it, and if that fails a ramp over half the trial: failing only the first is
    "needs-warmup".

    Args:
        progress: called as `progress(step, steps)` before each step and at the end.

    Raises:
        ForecastInterrupted: Ctrl-C; its `.forecast` holds what was seen.
        UsageError: this torch has no Muon.
    """
    run = _Run(subject, anatomy, config, progress or (lambda step, steps: None))
    if subject.loss_fn is None:
        return run.result("not measured", NO_LOSS)
    if config.steps == 0:
        return run.result("not measured", "no steps were asked for")
    if not any(p.requires_grad for p in subject.model.parameters()):
        return run.result("not measured", "no parameter of the model requires a gradient")
    try:
        with untouched(subject.model):
            return run.judged()
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        if not _is_ours_to_tell(error):
            raise
        words = " ".join(str(error).split())[:300]
        return run.result("not measured", f"a training step raised {type(error).__name__}: {words}")
    except KeyboardInterrupt as stop:
        seen = run.curve[-1].step if run.curve else 0
        raise ForecastInterrupted(
            run.result("not measured", f"interrupted after step {seen} of {config.steps}")
        ) from stop


@dataclass
class _Run:
    """One forecast on its way."""

    subject: Subject
    anatomy: Anatomy
    config: TrialConfig
    progress: Progress
    curve: list[ForecastStep] = field(default_factory=list)

    def judged(self) -> Forecast:
        postponed = self.config.warmup > self.config.steps
        decision = self.attempt(0 if postponed else self.config.warmup)
        if not (postponed and decision.failed):
            return self.result(decision.outcome, decision.reason)
        ramp = max(1, self.config.steps // 2)
        rescued = self.attempt(ramp)
        if rescued.failed:
            return self.result(
                rescued.outcome, f"with a ramp over {ramp} steps as without one, {rescued.reason}"
            )
        return self.result(
            "needs-warmup",
            f"at the full rate from the first step, {decision.reason}; with a ramp over {ramp} steps, "
            f"{rescued.reason}",
        )

    def attempt(self, warmup: int) -> Decision:
        """Train once, from the start, with this warm-up; in the original where a copy does not learn."""
        decision = in_flushed_thread(lambda checkpoint: self._train(warmup, checkpoint, in_place=False))
        if decision is None:
            decision = in_flushed_thread(lambda checkpoint: self._train(warmup, checkpoint, in_place=True))
        return decision or Decision("not measured", "no parameter of the model gets a gradient from the loss")

    def _train(self, warmup: int, checkpoint: Callable[[], None], *, in_place: bool) -> Decision | None:
        """The decision, or None where the loss does not reach the parameters of the copy."""
        self.curve.clear()
        torch.manual_seed(self.config.seed)
        with working_copy(self.subject.model, in_place=in_place) as model:
            if not self.subject.model.training:
                model.train()
            eye = Eye(self.subject, self.anatomy, model)
            batches = endless(self.subject.batches)
            trial = Trial(model, batches, lambda m, b: self.subject.loss(b, m), self.config, warmup)
            return self._watched(trial, eye, checkpoint)

    def _watched(self, trial: Trial, eye: Eye, checkpoint: Callable[[], None]) -> Decision | None:
        self.look(trial, eye, None)
        steps = self.config.steps
        for last in (steps, steps + EXTENSION):
            for step in range(trial.step, last):
                checkpoint()
                self.progress(step, last)
                ratio = UpdateRatio(trial.model)
                looking = step + 1 in _looks(steps) or step + 1 == last
                if looking:
                    ratio.before()
                trial.advance()
                if step == 0 and not (trial.diverged or trial.has_gradient):
                    return None
                if looking or trial.diverged:
                    self.look(trial, eye, ratio.after() if looking else None)
                if trial.diverged:
                    return self.decision()
            decision = self.decision()
            if not decision.in_doubt:
                break
        self.progress(trial.step, trial.step)
        return decision

    def decision(self) -> Decision:
        return decide(self.curve, self.subject.unigram_entropy, tokens=self.fed_tokens)

    @property
    def fed_tokens(self) -> bool:
        """Whether the batches are token ids, so that they have something in common to learn."""
        return self.subject.unigram_entropy is not None or _fed_ids(self.subject.batch)

    def look(self, trial: Trial, eye: Eye, update_ratio: float | None) -> None:
        """Put what can be seen now behind the curve."""
        loss, diversity = eye.state()
        deep = self.fed_tokens and trial.step >= self.config.steps and math.isfinite(loss)
        coherence, aligned = eye.pull(self._sample()) if deep else (None, None)
        self.curve.append(
            ForecastStep(
                step=trial.step,
                train_loss=trial.losses[-1] if trial.losses else None,
                loss=loss,
                diversity=diversity,
                coherence=coherence,
                alignment=aligned,
                update_ratio=update_ratio,
                gradients=gradient_norms(trial.model, self.anatomy) if trial.step else {},
            )
        )

    def _sample(self) -> list[Batch]:
        return list(itertools.islice(endless(self.subject.batches), COHERENCE_BATCHES))

    def result(self, outcome: Outcome, reason: str) -> Forecast:
        config = self.config
        return Forecast(
            outcome,
            reason,
            config.optimizer,
            config.lr,
            config.warmup,
            config.steps,
            self.subject.unigram_entropy,
            tuple(self.curve),
        )


def _fed_ids(batch: Batch) -> bool:
    """Whether the first tensor of a batch holds integers."""
    first = next(tensors_in(batch), None)
    return first is not None and not first.is_floating_point() and not first.is_complex()


def _is_ours_to_tell(error: Exception) -> bool:
    """Whether a model that raised this cannot be trained as it is; lack of memory is the caller's to tell."""
    return not isinstance(error, UsageError) and not is_out_of_memory(error)


def _looks(steps: int) -> set[int]:
    """After which steps to look: 5, 10, 20, 40, … and the last."""
    return {steps, *itertools.takewhile(lambda step: step < steps, (5 * 2**k for k in range(20)))}


def forecast_measurements(forecast: Forecast) -> list[Measurement]:
    """The forecast as rows of the table: one figure a look, in the order of the steps."""
    if not forecast.curve:
        return [not_measured("forecast/loss", "", forecast.reason, "nats")]
    curve = forecast.curve
    rows = [
        Measurement("forecast/step", "", tuple(float(s.step) for s in curve), "steps"),
        Measurement("forecast/loss", "", tuple(s.loss for s in curve), "nats"),
    ]
    for name in curve[-1].diversity:
        values = tuple(s.diversity.get(name, math.nan) for s in curve)
        rows.append(Measurement("forecast/diversity", name, values))
    if curve[-1].diversity:
        rows.append(Measurement("forecast/diversity", "", rows[-1].value))
    scalars = {
        "forecast/unigram-entropy": (forecast.unigram_entropy, "nats"),
        "forecast/coherence": (curve[-1].coherence, "1"),
        "forecast/alignment": (curve[-1].alignment, "1"),
        "forecast/update-ratio": (curve[-1].update_ratio, "1"),
    }
    for quantity, (value, unit) in scalars.items():
        if value is None:
            rows.append(not_measured(quantity, "", _MISSING[quantity], unit))
        else:
            rows.append(Measurement(quantity, "", value, unit))
    return rows + [Measurement("forecast/gradient", site, norm) for site, norm in curve[-1].gradients.items()]


_NO_DRIVE = "the trial did not come to its end, the batches are not tokens, or there is nothing to compare"
_MISSING = {
    "forecast/unigram-entropy": "the targets are not tokens",
    "forecast/coherence": _NO_DRIVE,
    "forecast/alignment": _NO_DRIVE,
    "forecast/update-ratio": "the trial took no whole step, or the model has no weight matrices",
}
