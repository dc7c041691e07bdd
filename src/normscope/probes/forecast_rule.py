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
ALIGNED = 3.0  # what alignment weighs against coherence: the one is small where the other is not
NEEDED = 0.10  # coherence + 3·alignment that a run needs at a diversity of 1e-4 to grow it back,
PER_DECADE = 0.05  # the more for each decade that the diversity is lower, and the less above
DOUBT = 0.03  # half the width of the band around it in which an undecided trial goes on


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


def needed_drive(diversity: float) -> float:
    """The drive, coherence + 3·alignment, that grows token differences back from `diversity` > 0."""
    return max(0.0, NEEDED - PER_DECADE * (math.log10(diversity) + 4))


def drive(step: ForecastStep) -> float | None:
    """coherence + 3·alignment of a look, None where it was not taken or there was nothing to compare."""
    if step.coherence is None or step.alignment is None:
        return None
    return step.coherence + ALIGNED * step.alignment


def _by_diversity(diversity: float, curve: Sequence[ForecastStep]) -> Decision:
    last = curve[-1]
    figures = f"token diversity of the last hidden state is {diversity:.1e} after {last.step} steps"
    if diversity <= DEAD:
        return Decision("collapses", f"{figures}: every token looks the same")
    needed = needed_drive(diversity)
    if needed == 0:
        return Decision("trains", f"{figures}: tokens stay apart")
    seen = [found for found in map(drive, curve) if found is not None]
    if not seen:
        return Decision("undecided", f"{figures}, and no gradients could be compared")
    mean = sum(seen) / len(seen)
    agreement = f"batches agree on parting them to {mean:.2f}, {needed:.2f} being needed"
    if len(seen) == 1 and abs(mean - needed) < DOUBT:
        return Decision("undecided", f"{figures}; {agreement}")
    return Decision("trains" if mean >= needed else "collapses", f"{figures}; {agreement}")
