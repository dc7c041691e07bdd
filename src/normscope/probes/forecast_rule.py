"""What a trial's curve says: the decision rule of the forecast, with its thresholds.

See docs/forecast.md for the runs that the thresholds were set on and the ones they were then tried on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from normscope.probes.forecast_record import ForecastStep, Outcome

EXTENSION = 5
"""Steps that an undecided trial goes on for, once."""

LEARNT = 0.1  # nats under the unigram entropy: the model uses its context
ALIVE = 1e-3  # token diversity above which no run that was tried got stuck
DEAD = 1e-10  # and below which none came back: float32 tells tokens apart to about 1e-14
COHERENT = 0.1  # cosine of two batches' token gradients above which token differences grow back


@dataclass(frozen=True)
class Decision:
    """An outcome and the sentence that says why."""

    outcome: Outcome
    reason: str

    @property
    def failed(self) -> bool:
        """Whether the run will not train this way."""
        return self.outcome in ("collapses", "plateau", "diverges")


def decide(curve: Sequence[ForecastStep], unigram_entropy: float | None) -> Decision:
    """The outcome of a trial from what was seen on the way, its last state above all."""
    first, last = curve[0], curve[-1]
    losses = [last.loss] if last.train_loss is None else [last.loss, last.train_loss]
    if not all(map(math.isfinite, losses)):
        return Decision("diverges", f"the loss is not finite after {last.step} steps")
    if last.loss > first.loss:
        return Decision(
            "diverges", f"the loss went from {first.loss:.2f} to {last.loss:.2f} in {last.step} steps"
        )
    if unigram_entropy is not None and max(losses) < unigram_entropy - LEARNT:
        return Decision("trains", f"loss {last.loss:.2f} is under the unigram entropy {unigram_entropy:.2f}")
    if not last.diversity:
        return Decision(
            "undecided", f"no stack was read, and the loss {last.loss:.2f} alone does not tell yet"
        )
    return _by_diversity(list(last.diversity.values())[-1], last)


def _by_diversity(diversity: float, last: ForecastStep) -> Decision:
    figures = f"token diversity of the last hidden state is {diversity:.1e} after {last.step} steps"
    if diversity >= ALIVE:
        return Decision("trains", f"{figures}: tokens stay apart")
    if diversity <= DEAD:
        return Decision("collapses", f"{figures}: every token looks the same")
    if last.coherence is None:
        return Decision("undecided", figures)
    agree = f"the gradients that would part tokens agree between batches to {last.coherence:.2f}"
    if last.coherence >= COHERENT:
        return Decision("trains", f"{figures}, and {agree}")
    return Decision("collapses", f"{figures}, and {agree}")
