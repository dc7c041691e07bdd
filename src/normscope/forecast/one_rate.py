"""Forecast at one learning rate: train a copy of the model for the first steps, measure and judge them."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from normscope.anatomy import Anatomy
from normscope.errors import UsageError
from normscope.forecast.certainty import certainty
from normscope.forecast.divergence import divergence_risk
from normscope.forecast.record import Forecast, ForecastInterrupted, ForecastStep
from normscope.forecast.rule import Decision
from normscope.forecast.watch import Progress, train_copies
from normscope.probes.measurement import Measurement, not_measured
from normscope.subjects import Subject, untouched
from normscope.subjects.feed import is_of_tokens
from normscope.subjects.memory import is_out_of_memory
from normscope.subjects.repeats import sequences_repeat
from normscope.subjects.targets import hides_targets
from normscope.train import LiveOptimizers, Recipe, in_flushed_thread

NO_LOSS = "no loss function is known for this model; give one, as loss_fn or from the factory"
NO_GRADIENT = "the loss of the last step was not finite, so it has no gradients"
NO_PULL = "the trial stopped early, the batches are not tokens, or there are no gradients to compare"
NO_UPDATE = "the trial completed no step, or the model has no weight matrices"


def forecast(
    subject: Subject, anatomy: Anatomy, config: Recipe, progress: Progress | None = None
) -> Forecast:
    """Train a copy for `config.steps` steps as the user would, and judge the measurements.

    The trial runs in a thread that flushes denormals, on a copy in the model's own modes (dropout); a model
    given in eval mode trains in train mode. Where the warm-up is longer than the trial, the full learning
    rate is tried without it. If that fails, a warm-up over half the trial is tried; if only the first fails,
    the outcome is "needs-warmup".

    Args:
        progress: called as `progress(step, steps)` before each step and at the end.

    Raises:
        ForecastInterrupted: Ctrl-C; its `.forecast` holds the measurements until then.
        UsageError: Muon without support in this torch.
    """
    run = _Run(subject, anatomy, config, progress or (lambda step, steps: None))
    if reason := why_not_tried(subject, config):
        return run.unmeasured(reason)
    try:
        with untouched(subject.model):
            return run.judged()
    except Exception as error:
        if not is_model_error(error):
            raise
        words = " ".join(str(error).split())[:300]
        return run.unmeasured(f"a training step raised {type(error).__name__}: {words}")
    except KeyboardInterrupt as stop:
        raise ForecastInterrupted(run.unmeasured(interrupted(run.curve, config))) from stop


@dataclass
class _Run:
    """One forecast while it runs."""

    subject: Subject
    anatomy: Anatomy
    config: Recipe
    progress: Progress
    curve: list[ForecastStep] = field(default_factory=list)

    def judged(self) -> Forecast:
        postponed = self.config.warmup > self.config.steps
        decision = self.attempt(0 if postponed else self.config.warmup)
        if not (postponed and decision.failed):
            return self.result(decision)
        ramp = max(1, self.config.steps // 2)
        rescued = self.attempt(ramp)
        if rescued.failed:
            said = f"with a warm-up over {ramp} steps as without one, {rescued.reason}"
            return self.result(dataclasses.replace(rescued, reason=said))
        said = (
            f"at the full learning rate from the first step, {decision.reason}; "
            f"with a warm-up over {ramp} steps, "
            f"{rescued.reason}"
        )
        if rescued.is_whole and rescued.outcome != "trains":
            return self.result(dataclasses.replace(rescued, reason=said))
        return self.result(dataclasses.replace(rescued, outcome="needs-warmup", reason=said))

    def attempt(self, warmup: int) -> Decision:
        """Train once from the start with this warm-up; in the original where a copy does not learn."""
        configs = [self.config.with_warmup(warmup)]
        train = functools.partial(
            train_copies, self.subject, self.anatomy, configs, [self.curve], self.progress
        )
        for in_place in (False, True):
            self.curve.clear()
            decisions = in_flushed_thread(functools.partial(train, in_place=in_place))
            if decisions is not None:
                return decisions[0]
        return Decision("not measured", "no parameter of the model gets a gradient from the loss")

    def result(self, decision: Decision) -> Forecast:
        return as_forecast(decision, self.subject, self.anatomy, self.config, self.curve)

    def unmeasured(self, reason: str) -> Forecast:
        return self.result(Decision("not measured", reason))


def as_forecast(
    decision: Decision, subject: Subject, anatomy: Anatomy, config: Recipe, curve: Sequence[ForecastStep]
) -> Forecast:
    """A decision with its trial and measurements."""
    may_be_slow = decision.outcome == "trains" and subject.baseline.loss is None
    if may_be_slow:
        said = f"{decision.reason}. Whether it is too slow is not judged: the loss to beat is not known"
        decision = dataclasses.replace(decision, reason=said)
    found = Forecast(
        decision.outcome,
        decision.reason,
        config.optimizer_name,
        config.lr,
        config.warmup,
        config.steps,
        subject.unigram_entropy,
        tuple(curve),
        decision.score,
        subject.best_constant,
        is_of_tokens(subject.batch),
        None if may_be_slow else certainty(decision, curve),
        hides_targets(subject.batch),
        divergence_risk(config.optimizer_name, config.lr, curve, anatomy),
        subject.loss_unit,
    )
    return unless_noise(found, subject, config)


def unless_noise(found: Forecast, subject: Subject, config: Recipe) -> Forecast:
    """The forecast, without a loss to beat where the ids may be noise.

    Ids that look random are none if the trial gets under their entropy and has not learnt them by heart.
    """
    if hides_targets(subject.batch) != "random" or subject.best_constant is not None:
        return found
    if found.outcome == "trains":
        taken = (found.last_step or config.steps) * config.accumulation
        if found.unigram_entropy is not None and not sequences_repeat(subject.batches, taken):
            return found
        said = f"{found.reason}. The ids look random, and what repeats of them may be learnt by heart"
        found = dataclasses.replace(found, outcome="undecided", reason=said, score=None, certainty=None)
    return dataclasses.replace(found, unigram_entropy=None)


def why_not_tried(subject: Subject, config: Recipe) -> str | None:
    """Reason why there is nothing to train; None where there is."""
    if subject.loss_fn is None:
        return NO_LOSS
    if config.steps == 0:
        return "no steps were requested"
    if isinstance(config.optimizer, LiveOptimizers) and (reason := config.optimizer.why_not_stepped()):
        return reason
    if not any(p.requires_grad for p in subject.model.parameters()):
        return "no parameter of the model requires a gradient"
    return None


def is_model_error(error: Exception) -> bool:
    """Whether the error means that the model cannot be trained as it is; out of memory does not."""
    kinds = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, OSError)
    return isinstance(error, kinds) and not isinstance(error, UsageError) and not is_out_of_memory(error)


def interrupted(curve: Sequence[ForecastStep], config: Recipe) -> str:
    """Reason of a trial that was interrupted."""
    return f"interrupted after step {curve[-1].step if curve else 0} of {config.steps}"


def forecast_measurements(forecast: Forecast) -> list[Measurement]:
    """The forecast as rows of the table, in the order of the steps."""
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
    last = curve[-1]
    if forecast.best_constant is not None:
        rows.append(Measurement("forecast/best-constant", "", forecast.best_constant, "1"))
    for name, value, unit, missing in (
        ("unigram-entropy", forecast.unigram_entropy, "nats", "the targets are not tokens"),
        ("coherence", last.coherence, "1", NO_PULL),
        ("alignment", last.alignment, "1", NO_PULL),
        ("update-ratio", last.update_ratio, "1", NO_UPDATE),
    ):
        quantity = f"forecast/{name}"
        if value is None:
            rows.append(not_measured(quantity, "", missing, unit))
        else:
            rows.append(Measurement(quantity, "", value, unit))
    if last.step and not last.gradients:
        rows.append(not_measured("forecast/gradient", "", NO_GRADIENT))
    return rows + [Measurement("forecast/gradient", site, norm) for site, norm in last.gradients.items()]
