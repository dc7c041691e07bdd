"""Entropy of the targets' frequencies, found in the gradients of the first steps.

The gradient of a cross-entropy by a row of logits is softmax − target, up to a factor: its most negative
entry is the target, wherever the labels are and however they are shifted or masked. The entropy of the whole
text is estimated from these targets, with an error (`normscope.forecast.entropy`). Label smoothing adds to
it: some rows of the output show its share (`normscope.forecast.smoothing`).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from normscope.forecast.entropy import GROUPS, estimate_of_counts
from normscope.forecast.smoothing import smoothed_entropy, smoothing_without_loss
from normscope.forecast.targets import LARGEST_ERROR
from normscope.probes.wiring.targets import in_places, targets_in
from normscope.recording.calls import named_arguments
from normscope.subjects import Batch
from normscope.subjects.feed import tensors_in
from normscope.subjects.targets import num_random_ids

if TYPE_CHECKING:  # both import the alarms, whose text names `STEPS`
    from normscope.monitor.journal import Journal
    from normscope.monitor.taken import Taken

STEPS = 256
"""Steps whose targets are read at most."""
EACH, APART = 32, 8
"""Steps after each of which the entropy is estimated, and steps between two estimates after them."""
LARGEST = 1 << 24
"""Entries of a gradient that are read: of larger ones, the first sequences."""


class TargetsEntropy:
    """Estimate that grows with each step until it is good enough, or given up.

    Only the counts of the ids are kept, for each of the groups of sequences that the error is estimated from.

    Attributes:
        is_over: whether no more steps are wanted.
        reason: why the entropy is not known, "" if it is or may still be.
        smoothing: share of label smoothing in the loss; None until a step shows it.
    """

    def __init__(self) -> None:
        self.is_over, self.reason = False, ""
        self.smoothing: float | None = None
        self._width = 0
        self._counts = np.zeros((GROUPS, 0), dtype=np.int64)
        self._num_sequences = self._num_steps = 0

    def see(
        self, cotangents: Iterable[Tensor], batch: Batch, rows: Iterable[tuple[Tensor, Tensor]] = ()
    ) -> float | None:
        """Enter the targets of a step; the entropy in nats once its error is at most `LARGEST_ERROR`.

        Args:
            cotangents: gradients of the loss by the outputs of the model; the device is waited for.
            batch: arguments of its forward.
            rows: some rows of these outputs, and their gradients.
        """
        if num_random_ids(batch) is not None:
            self._end("the ids look random")
            return None
        found = next(filter(None, (list(_sequences(each, batch)) for each in cotangents)), None)
        if found is None:
            self._end("the loss is no cross-entropy of an output of the model")
            return None
        self._count(found)
        self._num_steps += 1
        if self.smoothing is None:
            self._find_smoothing(rows)
        is_due = self._num_steps <= EACH or not self._num_steps % APART
        # Logits that stay even are those of a loss at ln V: smoothing says nothing there.
        is_known = self.smoothing is not None or self._num_steps >= STEPS
        if is_due and is_known and self._num_sequences >= GROUPS:
            result = estimate_of_counts(self._counts[:, self._counts.any(axis=0)])
            if result.error <= LARGEST_ERROR:
                value = self._smoothed(result.value)
                self._end("")
                return value
        if self._num_steps >= STEPS:
            self.close()
        return None

    def _find_smoothing(self, rows: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Find the share of label smoothing in the first of these outputs that is logits."""
        for logits, gradient in rows:
            counted = gradient.any(-1)
            if logits.shape[-1] > 1 and bool(counted.any()) and targets_in(gradient.float()) is not None:
                self._width = logits.shape[-1]
                self.smoothing = smoothing_without_loss(logits[counted].cpu(), gradient[counted].cpu())
                return

    def _smoothed(self, entropy: float) -> float:
        """The entropy with label smoothing."""
        if not self.smoothing:
            return entropy
        counts = np.pad(self._counts.sum(0), (0, max(0, self._width - self._counts.shape[1])))
        return smoothed_entropy(counts, entropy, self.smoothing)

    def close(self) -> None:
        """Want no more steps, because the run ends or enough were read."""
        if self._num_steps and not self.is_over:
            steps = f"{self._num_steps} step{'s' * (self._num_steps > 1)}"
            if self.smoothing is None and self._num_steps < STEPS:
                self._end(f"the logits of {steps} do not show whether the loss has label smoothing")
            else:
                self._end(f"the targets of {steps} are too few to estimate it")

    def _count(self, found: list[NDArray[np.int64]]) -> None:
        """Count the targets of each sequence in its group."""
        groups = (self._num_sequences + np.arange(len(found))) % GROUPS
        ids = np.concatenate(found)
        new = int(ids.max()) + 1 - self._counts.shape[1]
        if new > 0:
            self._counts = np.pad(self._counts, ((0, 0), (0, new)))
        np.add.at(self._counts, (np.repeat(groups, [len(each) for each in found]), ids), 1)
        self._num_sequences += len(found)

    def _end(self, reason: str) -> None:
        self.is_over, self.reason, self._counts = True, reason, np.zeros((GROUPS, 0), dtype=np.int64)


class RunEntropy:
    """Search for the entropy of a run's targets, which becomes one of its facts.

    Args:
        model: the model, without wrappers.
        optimizers: its optimizers.
        facts: facts of the run; with an entropy, none is searched for.
        journal: it stores what is found, or why nothing was.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], facts: dict[str, Any], journal: "Journal"
    ) -> None:
        self._model, self._optimizers, self._facts, self._journal = model, optimizers, facts, journal
        self._targets = TargetsEntropy()

    @property
    def wants_rows(self) -> bool:
        """Whether some rows of the outputs would tell more."""
        return not self._is_over and self._targets.smoothing is None

    @property
    def _is_over(self) -> bool:
        return self._targets.is_over or "entropy" in self._facts

    def see(self, taken: "Taken") -> None:
        """Enter the targets of a step, if a cross-entropy of a whole step is seen."""
        if self._is_over:
            return
        cotangents = [each for each in taken.forwards.cotangents if each is not None]
        if not cotangents or taken.is_wrong:
            return
        last = taken.forwards.last(self._optimizers)
        batch = named_arguments(self._model, last.args, last.kwargs)
        found = self._targets.see(cotangents, batch, taken.forwards.rows)
        if found is not None:
            self._facts["entropy"] = found
            self._journal.note("smoothing", self._targets.smoothing or None)
        if self._targets.is_over:
            self._journal.note("entropy", found)
            self._journal.note("entropy-unknown", self._targets.reason)
            self._journal.note("facts", self._facts)

    def close(self) -> None:
        """Note why the entropy is not known, because the run ends."""
        if not self._targets.is_over:
            self._targets.close()
            self._journal.note("entropy-unknown", self._targets.reason)


def _sequences(cotangent: Tensor, batch: Batch) -> Iterator[NDArray[np.int64]]:
    """The targets of each sequence, or of each sample that has one; none if it is no cross-entropy."""
    if cotangent.ndim < 2 or cotangent.shape[-1] < 2 or not cotangent.numel():
        return
    each = cotangent[0].numel()
    ids = targets_in(cotangent[: max(1, LARGEST // each)].float())
    if ids is None:
        return
    first = next(iter(tensors_in(batch)), None)
    if ids.ndim == 1 and first is not None and first.ndim == 2 and ids.numel() >= first.numel() - len(first):
        placed = in_places(ids, first)
        ids = ids.reshape(1, -1) if placed is None else placed
    rows = ids.reshape(-1, 1) if ids.ndim == 1 else ids.flatten(0, -2)
    for row in rows.cpu().numpy():
        if len(known := row[row >= 0]):
            yield known
