"""Types of a forecast of a run from a few training steps."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from normscope.subjects.subject import Baseline
from normscope.subjects.targets import Hidden

Outcome = Literal[
    "trains", "collapses", "plateau", "diverges", "slow", "needs-warmup", "undecided", "not measured"
]


SURE = 0.9
"""Probability of either result from which a forecast is sure."""
EVEN = 0.5
"""Probability of training from which a run is likelier to train than to fail."""
SAME_RATE = 0.01
"""Relative difference of learning rates up to which they are one: that of a rounded rate in a ladder."""


def is_same_rate(a: float, b: float) -> bool:
    """Whether two learning rates differ by 1 % at most."""
    return math.isclose(a, b, rel_tol=SAME_RATE)


@dataclass(frozen=True)
class ForecastStep:
    """One measurement after `step` optimiser steps, in eval mode on the fixed batch unless said otherwise.

    Attributes:
        step: optimiser steps taken so far, 0 before the first.
        train_loss: loss of the training batch of this step, dropout on; None at step 0.
        loss: loss of the fixed batch.
        diversity: token diversity of the last hidden state by stack name; positions count at most half, see
            `evaluator.differences`.
        coherence: cosine between batches of the lower blocks' gradients of the loss's pull on each token
            beyond their mean (see `evaluator.TokenPull`); None where it was not measured.
        alignment: share of that pull along the current token differences, −1..1; None where it was not
            measured.
        update_ratio: median over weight matrices of RMS(update)/RMS(weight) of the last step.
        gradients: gradient norm by block site, of the last step.
        recent_loss: mean loss of the last 10 training batches, or 20 in a trial longer than 100 steps; None
            at step 0.
        recent_baseline: mean loss without the input on the batches of `recent_loss`, where known.
        batch_entropy: unigram entropy of the targets of the batch of `train_loss`, in nats, where known.
        largest_loss: largest loss of a training batch so far; inf once one was not finite; None at step 0.
        largest_gradient: largest norm of all gradients of a step together so far, before clipping; None where
            the steps are not normscope's own.
    """

    step: int
    train_loss: float | None
    loss: float
    diversity: dict[str, float]
    coherence: float | None = None
    update_ratio: float | None = None
    gradients: dict[str, float] = field(default_factory=dict)
    alignment: float | None = None
    recent_loss: float | None = None
    batch_entropy: float | None = None
    largest_loss: float | None = None
    largest_gradient: float | None = None
    recent_baseline: float | None = None


@dataclass(frozen=True)
class Forecast:
    """The trial and its judgement.

    Attributes:
        outcome: the judgement; "not measured" comes with its reason.
        reason: one sentence with the figures it rests on.
        optimizer, lr, warmup, steps: settings of the run and the trial, as given.
        unigram_entropy: nats per target of the whole text, None where the targets are not tokens.
        curve: the measurements (of the last attempt, where a warm-up was tried too).
        score: margin by which it trains: above 0 where it does, larger is more certain; None where it is
            unknown. Compare scores only between forecasts on the same text, as for changes to one model.
        best_constant: loss of the best constant output, for a loss that is no cross-entropy; None if unknown.
        tokens: whether the model is fed token ids.
        certainty: probability from 0 to 1 that the run trains; None if the outcome leaves it open.
        hidden: what hides the targets, see `subjects.targets.hides_targets`.
        divergence: risk from 0 to 1 that the run diverges within 300 steps, see `divergence_risk`; None if it
            is unknown.
        loss_unit: number of times that the loss is the mean cross-entropy of its targets.
    """

    outcome: Outcome
    reason: str
    optimizer: str
    lr: float
    warmup: int
    steps: int
    unigram_entropy: float | None
    curve: tuple[ForecastStep, ...] = ()
    score: float | None = None
    best_constant: float | None = None
    tokens: bool = True
    certainty: float | None = None
    hidden: Hidden = ""
    divergence: float | None = None
    loss_unit: float = 1.0

    @property
    def baseline(self) -> Baseline:
        """The loss to beat."""
        return Baseline.of(self.unigram_entropy, self.best_constant, self.loss_unit)

    @property
    def trains(self) -> bool:
        """Whether the run is under the unigram entropy by 0.1 nats after 300 steps; "slow" is not."""
        return self.outcome in ("trains", "needs-warmup")

    @property
    def failed(self) -> bool:
        """Whether the run does not train, however long it takes."""
        return self.outcome in ("collapses", "plateau", "diverges")

    @property
    def is_near_limit(self) -> bool:
        """Whether the outcome and the probability of training are on different sides of a half.

        The outcome follows the smallest margin alone; the probability also weighs the others, as runs went.
        """
        if self.certainty is None or not (self.trains or self.failed or self.outcome == "slow"):
            return False
        return self.trains != (self.certainty >= EVEN)

    @property
    def is_untried(self) -> bool:
        """Whether larger learning rates decided the outcome without a trial."""
        return not self.curve and self.outcome != "not measured"

    @property
    def is_half(self) -> bool:
        """Whether the trial was stopped half-way, because its outcome was clear."""
        return bool(self.curve) and 4 * self.last_step <= 3 * self.steps

    @property
    def last_step(self) -> int:
        """Step of the last measurement; 0 without any."""
        return self.curve[-1].step if self.curve else 0

    @property
    def trial_warmup(self) -> int:
        """Steps of warm-up in the measured trial: a warm-up that is longer than the trial is not tried.

        Where only a warm-up helped ("needs-warmup"), one over half the trial was measured.
        """
        if self.warmup <= self.steps:
            return self.warmup
        return max(1, self.steps // 2) if self.outcome == "needs-warmup" else 0

    def is_of_run(self, other: "Forecast") -> bool:
        """Whether both forecast one run: the same learning rate, to 1 %, and warm-up."""
        return is_same_rate(self.lr, other.lr) and self.warmup == other.warmup

    @property
    def is_sure(self) -> bool:
        """Whether the forecast is sure, that the run trains or that it does not."""
        return self.certainty is not None and max(self.certainty, 1 - self.certainty) >= SURE

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, for the report's JSON."""
        settings = "outcome reason optimizer lr warmup steps unigram_entropy best_constant loss_unit"
        names = f"{settings} score certainty divergence"
        plain = {name: getattr(self, name) for name in names.split()}
        return plain | {"curve": [vars(step) for step in self.curve]}


class ForecastInterrupted(KeyboardInterrupt):
    """Ctrl-C during a forecast; `forecast` holds the measurements until then, as "not measured"."""

    def __init__(self, forecast: Forecast) -> None:
        self.forecast = forecast
        super().__init__(forecast.reason)


@dataclass(frozen=True)
class BestRate:
    """The learning rate to use.

    Attributes:
        rate: the one with the lowest loss predicted for 300 steps; it may lie between two that were tested.
            None where none can be named.
        low, high: ends of the range in which the loss is predicted to fall by 95 % as much; None where
            only one of the tested rates does not fail.
        reason: what bounds the rate, or why there is none.
        warmup: least steps of warm-up that the rate needs, where the tested rates have none; 0 for none.
    """

    rate: float | None
    low: float | None
    high: float | None
    reason: str
    warmup: int = 0


@dataclass(frozen=True)
class ScaledRate:
    """The learning rate to expect at another size.

    Attributes:
        axis: "width" or "depth", the size that changes.
        times: multiple of the model's own width or depth.
        parametrisation: "standard", or "mup" for a model that is scaled by μP from its present size.
        rate, low, high: the rate and its range.
    """

    axis: str
    times: int
    parametrisation: str
    rate: float
    low: float
    high: float


@dataclass(frozen=True)
class AtScale:
    """The learning rates to expect at other sizes, and why there are none where there are none."""

    rates: tuple[ScaledRate, ...]
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, for the report's JSON."""
        return {"rates": [vars(each) for each in self.rates], "reason": self.reason}


@dataclass(frozen=True)
class LadderForecast:
    """Forecasts of one model over a ladder of learning rates.

    Attributes:
        rungs: one forecast per learning rate, ascending; up to an interrupt.
        largest_rate: the largest learning rate that trains; None where none does.
        warmup: sentence on whether the wanted learning rate needs a warm-up, and of how many steps.
        warmup_steps: the shortest that helped in its trial, a lower bound; 0 where no warm-up is needed, None
            where none helped or none was tried.
        best: the learning rate to use; None for a ladder that was interrupted before all rates were tried.
        ramps: forecasts of the wanted learning rate with a warm-up, in the order in which they were tried.
        at_scale: the learning rates to expect at other sizes; None for a ladder that was interrupted.
        notes: remarks for the reader of the report.
        range_test: learning rate at which the loss diverged in a range test, the last one (10) where it did
            not; None where none was made. A part of the risk of divergence.
    """

    rungs: tuple[Forecast, ...]
    largest_rate: float | None
    warmup: str
    warmup_steps: int | None
    best: BestRate | None = None
    ramps: tuple[Forecast, ...] = ()
    at_scale: AtScale | None = None
    notes: tuple[str, ...] = ()
    range_test: float | None = None

    @property
    def judged(self) -> tuple[Forecast, ...]:
        """The rungs that were judged; the others are "not measured"."""
        return tuple(rung for rung in self.rungs if rung.outcome != "not measured")

    @property
    def largest_is_bound(self) -> bool:
        """Whether no rate above the largest that trains was judged: larger ones may train too."""
        return self.largest_rate is not None and self.largest_rate == max(rung.lr for rung in self.judged)

    def same_run(self, forecast: Forecast) -> Forecast | None:
        """The rung of the run of `forecast`; None without one."""
        return next((rung for rung in self.rungs if rung.is_of_run(forecast)), None)

    def longest(self, trial: Forecast) -> Forecast:
        """The longer one of `trial` and the rung of the same run: the one that a verdict rests on."""
        again = self.same_run(trial)
        return trial if again is None or again.last_step <= trial.last_step else again

    def with_chances(self, trial: Forecast) -> Forecast:
        """`trial` with the probabilities of its rung, which know the others, if that is the same trial."""
        again = self.same_run(trial)
        if again is None or again is trial or (again.curve, again.outcome) != (trial.curve, trial.outcome):
            return trial
        return replace(trial, certainty=again.certainty, divergence=again.divergence)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, for the report's JSON."""
        words = {"largest_rate": self.largest_rate, "warmup": self.warmup, "warmup_steps": self.warmup_steps}
        best = None if self.best is None else vars(self.best)
        more = {
            "largest_is_bound": self.largest_is_bound,
            "ramps": [ramp.to_dict() for ramp in self.ramps],
            "at_scale": None if self.at_scale is None else self.at_scale.to_dict(),
            "range_test": self.range_test,
        }
        return {"rungs": [rung.to_dict() for rung in self.rungs], **words, "best": best, **more}


class LadderInterrupted(KeyboardInterrupt):
    """Ctrl-C on a ladder; `ladder` holds the rungs that were tried until then."""

    def __init__(self, ladder: LadderForecast) -> None:
        self.ladder = ladder
        super().__init__(ladder.warmup)
