"""The loss without the input on the batches of a trial, with which their own losses are compared.

Batches differ in it: the mean of 20 batches of 4 × 64 tokens differs by 0.05 nats from that of the text, half
of the margin that means "trains", and on a series with bursts by 17 %.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from normscope.subjects import Batch
from normscope.subjects.subject import LossWithoutInput


@dataclass
class BatchBaselines:
    """Losses without the input of the batches of trials that see the same ones, by their number from 0.

    Attributes:
        of: gives one of them; None if they are unknown.
        parts: batches of a step.
    """

    of: LossWithoutInput | None
    parts: int = 1
    _known: dict[int, float | None] = field(default_factory=dict)

    def join(self, others: Iterable["BatchBaselines"]) -> None:
        """Share what is known with others of the same batches, from now on too: their trials may go on."""
        for number, other in enumerate(others):
            if number == 0:
                self._known = other._known  # the one that others hold as well
            self._known |= other._known
            other._known = self._known

    def seen(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of a trial, which are entered."""
        for number, batch in enumerate(batches):
            self.enter(number, batch)
            yield batch

    def enter(self, number: int, batch: Batch) -> None:
        """Enter a batch; once is enough for all trials."""
        if self.of is not None and number not in self._known:
            self._known[number] = self.of(number, batch)

    def mean(self, step: int, num: int) -> float | None:
        """Mean over the last `num` of the first `step` steps; None if a batch's is unknown."""
        numbers = range(max(0, step - num) * self.parts, step * self.parts)
        found = [self._known.get(number) for number in numbers]
        known = [each for each in found if each is not None]
        return sum(known) / len(known) if known and len(known) == len(found) else None
