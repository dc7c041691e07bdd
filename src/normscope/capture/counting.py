"""A process of a script that takes its steps with the one that reports."""

import time
from collections.abc import Sequence

from torch import Tensor, nn

from normscope.capture.folder import Folder, Settings
from normscope.recording.calls import Forward

POLL_SECONDS = 0.05


class Counting:
    """A process that does not report: it takes as many steps as the one that does, and ends with it.

    Attributes:
        step, last: number of steps so far, and of the last one, which the process that reports may move.
        num_blind: optimizer steps of which no forward was recorded; they are not counted as steps.
    """

    def __init__(self, model: nn.Module, folder: Folder, settings: Settings) -> None:
        self.model, self.folder = model, folder
        self.step, self.last = 0, settings.followed
        self.num_blind = 0

    def before_step(self, forwards: Sequence[Forward]) -> None:
        """A step is about to be taken."""

    def also_steps_on(self, loss: Tensor) -> None:
        """A part of the step that has begun is on another loss of the same forwards.

        Args:
            loss: its mean over them, or the part of one forward in that mean.
        """

    def after_step(self, *, skipped: float) -> bool:
        """A step was taken; True if it was the last.

        Args:
            skipped: share of the optimizers whose step a loss scaler skipped.
        """
        self.step += 1
        while self.step >= self.last:
            if self.folder.told("done"):
                return True
            time.sleep(POLL_SECONDS)
            self.last = max(self.last, self.folder.last())
        return False

    def finish(self) -> None:
        """The process that reports has done so."""
