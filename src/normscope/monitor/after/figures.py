"""Figures of a whole run: steps, loss at its begin, end and best, time, tokens; and what was not measured."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.monitor.store import RunReader

WATCHED = {"loss": "the loss", "gradient/norm": "gradients", "stream/rms": "the residual stream"}
"""Quantities without which a run is not judged healthy, and their names in sentences."""
ENOUGH = 0.99
"""Share of the steps that must have figures."""


@dataclass(frozen=True)
class Figures:
    """Figures of the first rank of a run. A figure is None where no step has it.

    Attributes:
        first_step, last_step, num_steps: first and last step with figures, and their number.
        first_loss, last_loss: loss of the first and of the last step that has one; may be NaN or infinite.
        best_loss, best_step: the smallest finite loss, and its step.
        seconds: seconds of all steps; tokens: tokens of all steps; step_seconds: median seconds of a step.
        tokens_per_second: tokens over seconds, of the steps that have both.
        skipped: number of steps in which no optimizer stepped.
        unmeasured: names of `WATCHED` that were measured at too few steps.
    """

    first_step: int | None
    last_step: int | None
    num_steps: int
    first_loss: float | None
    last_loss: float | None
    best_loss: float | None
    best_step: int | None
    seconds: float | None
    tokens: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    skipped: int
    unmeasured: tuple[str, ...]

    @property
    def num_missing(self) -> int:
        """Number of steps between the first and the last that have no figures."""
        if self.first_step is None or self.last_step is None:
            return 0
        return self.last_step - self.first_step + 1 - self.num_steps

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        return vars(self) | {"unmeasured": list(self.unmeasured), "num_missing": self.num_missing}


def figures_of(reader: RunReader, rank: int, until: int | None) -> Figures:
    """The figures of a rank up to a step."""
    known = set(reader.columns(rank))

    def series(quantity: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        if quantity not in known:
            return np.empty(0, np.int64), np.empty(0)
        grid = reader.grid(quantity, rank)
        kept = grid.present.any(axis=1) & (grid.steps <= (until or 0))
        return grid.steps[kept], grid.values[kept, 0]

    steps, losses = series("loss")
    finite = np.isfinite(losses)
    best = int(np.argmin(np.where(finite, losses, np.inf))) if finite.any() else None
    of_time, seconds = series("seconds")
    of_tokens, tokens = series("tokens")
    seconds, of_time = seconds[np.isfinite(seconds)], of_time[np.isfinite(seconds)]
    shared = np.isin(of_time, of_tokens)
    both = float(seconds[shared].sum())
    skipped = series("skipped")[1]
    every = of_time if len(of_time) else steps
    return Figures(
        first_step=int(every[0]) if len(every) else None,
        last_step=int(every[-1]) if len(every) else None,
        num_steps=len(every),
        first_loss=float(losses[0]) if len(losses) else None,
        last_loss=float(losses[-1]) if len(losses) else None,
        best_loss=None if best is None else float(losses[best]),
        best_step=None if best is None else int(steps[best]),
        seconds=float(seconds.sum()) if len(seconds) else None,
        tokens=float(tokens.sum()) if len(tokens) else None,
        step_seconds=float(np.median(seconds)) if len(seconds) else None,
        tokens_per_second=float(tokens.sum()) / both if both > 0 and tokens.any() else None,
        skipped=int((skipped == 1).sum()),
        unmeasured=tuple(
            name
            for quantity, name in WATCHED.items()
            if len(series(quantity)[0]) < ENOUGH * len(every) - (skipped == 1).sum()
        ),
    )


def gaps(figures: Figures) -> Iterator[str]:
    """Sentences on the figures that a verdict of the whole run would need and that are missing."""
    if figures.unmeasured:
        names = " and ".join(filter(None, [", ".join(figures.unmeasured[:-1]), figures.unmeasured[-1]]))
        yield f"{names} {'was' if len(figures.unmeasured) == 1 else 'were'} not measured at every step"
    if figures.num_missing > (1 - ENOUGH) * max(1, figures.num_steps):
        yield f"{figures.num_missing} steps before the last have no figures"
