"""Trackers: where the figures of a run go besides its store, such as W&B, MLflow or TensorBoard.

A tracker has one of three methods:

    log(values, step=…)            accelerate's trackers and Accelerator, a run of W&B or trackio, `JsonLines`
    log_metrics(values, step=…)    the module `mlflow`, Lightning's loggers
    add_scalar(name, value, step)  `torch.utils.tensorboard.SummaryWriter`

A NaN is passed on as it is; a figure that was not measured is left out.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from normscope.errors import UsageError, describe
from normscope.monitor.alarms import is_measured
from normscope.monitor.row import Layout

LOG = logging.getLogger("normscope")
Log = Callable[[Mapping[str, float], int], object]


class Trackers:
    """The trackers of a run; one that raises is dropped, and the run goes on.

    Raises:
        UsageError: an object has none of the three methods.
    """

    def __init__(self, trackers: Sequence[Any]) -> None:
        self._logs = [(type(each).__name__, _log_of(each)) for each in trackers]

    def log(
        self, step: int, figures: Sequence[tuple[Layout, NDArray[Any]]], *, with_sites: bool = False
    ) -> None:
        """Hand on the figures of a step: "loss", and "stream/rms/SITE".

        Args:
            step: number of the step.
            figures: layouts with their values.
            with_sites: whether to hand on the figures of single sites too.
        """
        if not self._logs:
            return
        values = {
            f"{quantity}/{site}" if site else quantity: float(value)
            for layout, row in figures
            for (quantity, site), value, known in zip(layout, row, is_measured(row), strict=True)
            if known and (with_sites or not site)
        }
        kept = []
        for name, log in self._logs:
            try:
                log(dict(values), step)
                kept.append((name, log))
            except Exception as error:
                LOG.warning(
                    "step %d: the tracker %s gets no more figures: %s",
                    step,
                    name,
                    describe(error),
                    exc_info=error,
                )
        self._logs = kept


def _log_of(tracker: Any) -> Log:
    for name in ("log", "log_metrics"):
        method = getattr(tracker, name, None)
        if callable(method):
            return lambda values, step, method=method: method(values, step=step)  # type: ignore[misc]
    add = getattr(tracker, "add_scalar", None)
    if callable(add):
        return lambda values, step: [add(name, value, step) for name, value in values.items()]
    raise UsageError(
        f"a tracker of type {type(tracker).__name__}",
        "an object with log(values, step=…), log_metrics(values, step=…) or add_scalar(name, value, step)",
        "hand the figures on by an object of your own with a method log",
    )
