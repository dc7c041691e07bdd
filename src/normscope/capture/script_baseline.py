"""The loss to beat of a script's run, in the batches that are kept of it."""

import dataclasses
import itertools
from collections.abc import Sequence

from torch import nn

from normscope.forecast import ForecastStep, with_baseline
from normscope.forecast.recent import recent_steps
from normscope.recording.calls import Forwards
from normscope.subjects import Subject


class ScriptBaseline:
    """The loss to beat, and its mean on the batches of each mean loss that was measured.

    Attributes:
        notes: sentences for the report.
        num_forwards: forwards of each step.
    """

    def __init__(self) -> None:
        self.notes: tuple[str, ...] = ()
        self.num_forwards: list[int] = []
        self._num_searched = 0
        self._num_losses: dict[int, int] = {}

    def found(self, subject: Subject, first: nn.Module, kept: Forwards) -> Subject:
        """The subject with the loss to beat, which is sought once in the same batches.

        Args:
            first: the model with its first weights: the last ones may be NaN.
        """
        if self._num_searched == len(kept):
            return subject
        self._num_searched = len(kept)
        unknown = dataclasses.replace(
            subject, model=first, unigram_entropy=None, best_constant=None, without_input=None
        )
        found, self.notes = with_baseline(unknown, taken=len(kept))  # all are those of its own steps
        return dataclasses.replace(found, model=subject.model)

    def measured(self, step: int, num_steps: int) -> None:
        """Note that the mean loss was measured after `step` steps, in a trial of `num_steps`."""
        self._num_losses[step] = recent_steps(num_steps)

    def entered(
        self, curve: Sequence[ForecastStep], losses: Sequence[float], subject: Subject, kept: Forwards
    ) -> list[ForecastStep]:
        """The measurements with the loss to beat of the batches of each mean loss, where it is known.

        It is unknown if a batch was not kept or a loss does not count. The last step of an epoch may have
        fewer forwards than the others.
        """
        known, starts = subject.without_input, [0, *itertools.accumulate(self.num_forwards)]
        if known is None or len(self.num_forwards) != len(losses) or len(kept) != starts[-1]:
            return list(curve)
        for number, batch in zip(range(len(kept)), kept(), strict=False):
            known.enter(number, batch)
        batches = list(itertools.starmap(range, itertools.pairwise(starts)))

        def mean(step: int) -> float | None:
            return known.mean(batches[max(0, step - self._num_losses[step]) : step])

        return [dataclasses.replace(each, recent_baseline=mean(each.step)) for each in curve]
