"""`losses.jsonl`: a line a step, appended as the run goes; a view of what the checkpoints hold exactly."""

import json
import math
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path

from normscope.atomic import disk_refusals, write_text

Validations = list[tuple[int, float]]
"""(steps taken, validation loss)."""

Figures = Mapping[str, float]

GO_ON = "make room, or choose another folder, and go on with --resume"


class History:
    """The file of losses of a run.

    Each line is `{"step": n, "loss": x, "lr": r, "gradient_norm": g}`, the loss before the n-th step from 0,
    its learning rate and its gradients' norm before clipping; or `{"step": n, "validation": x}`, after n
    steps. A figure that is not finite is null.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None

    def start(self, steps: Sequence[Figures], validations: Validations) -> None:
        """Make the file hold these and nothing else, whatever a killed run has appended."""
        lines = [(step, 1, _line(step, figures)) for step, figures in enumerate(steps)]
        lines += [(step, 0, _line(step, {"validation": loss})) for step, loss in validations]
        with disk_refusals(f'"{self.path}"', GO_ON):
            write_text(self.path, "".join(line for *_, line in sorted(lines)))
            self._file = FileIO(self.path, "a")

    def append(self, step: int, figures: Figures) -> None:
        """One more line, out of this process at once."""
        assert self._file is not None, "start first"
        with disk_refusals(f'"{self.path}"', GO_ON):
            self._file.write(_line(step, figures).encode())

    def close(self) -> None:
        """No more lines."""
        if self._file is not None:
            self._file.close()


def _line(step: int, figures: Figures) -> str:
    finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    return json.dumps({"step": step, **finite}) + "\n"
