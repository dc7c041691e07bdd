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
DEAD = 1e-10  # token diversity that no run came back from; float32 tells tokens apart to about 1e-14
COHERENT = 0.1  # cosine of token gradients that a run needs at a diversity of 1e-4 to grow it back,
PER_DECADE = 0.06  # the more for each decade that the diversity is lower, and the less above
DOUBT = 0.04  # half the width of the band around it in which an undecided trial goes on


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
    return _by_diversity(list(last.diversity.values())[-1], curve)


def needed_coherence(diversity: float) -> float:
    """Cosine of token gradients that grows token differences back from `diversity` > 0."""
    return max(0.0, COHERENT - PER_DECADE * (math.log10(diversity) + 4))


def _by_diversity(diversity: float, curve: Sequence[ForecastStep]) -> Decision:
    last = curve[-1]
    figures = f"token diversity of the last hidden state is {diversity:.1e} after {last.step} steps"
    if diversity <= DEAD:
        return Decision("collapses", f"{figures}: every token looks the same")
    needed = needed_coherence(diversity)
    if needed == 0:
        return Decision("trains", f"{figures}: tokens stay apart")
    seen = [step.coherence for step in curve if step.coherence is not None]
    if not seen:
        return Decision("undecided", f"{figures}, and no gradients could be compared")
    coherence = sum(seen) / len(seen)
    agree = f"the gradients that part tokens agree between batches to {coherence:.2f}, needed is {needed:.2f}"
    if len(seen) == 1 and abs(coherence - needed) < DOUBT:
        return Decision("undecided", f"{figures}, and {agree}")
    return Decision("trains" if coherence >= needed else "collapses", f"{figures}, and {agree}")
