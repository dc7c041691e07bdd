"""Decision: what a rescue does before an update, a function of all ranks' figures.

Each rank gives one row of figures. All ranks see the same table and hold the same windows, so that they come
to the same decision.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from normscope.monitor.alarms.columns import Floats
from normscope.monitor.alarms.spikes import (
    ALONE,
    GRADIENT_RATIO,
    GRADIENT_SIGMAS,
    LOSS_RISE,
    SIGMAS,
    TWICE_IN,
)
from normscope.monitor.alarms.window import ANEW, Window
from normscope.rules import figure

WRONG_IN_ROW = 5
"""Steps with a gradient that is not finite, in a row, that blame the state: the next batches were others."""
LEFT_IN_ROW = 10
"""Losses above the limit, in a row, of a run whose loss has left its level; the window takes `ANEW` of them
for the new level."""
RECOVERY = 100
"""Steps in which a learning rate that was lowered once comes back."""
LOWEST = 3
"""Lowerings beyond which the learning rate is not lowered further."""


@dataclass(frozen=True)
class Figures:
    """One rank before an update, finite where nothing is wrong.

    Attributes:
        is_known: whether this rank could measure. Else it follows the others.
        squares: ‖g‖² of its gradients as they would be used; the ranks' mean is that of the whole.
        seen: the same before the loop clipped them, if that is known; else as `squares`.
        wrong_gradient, wrong_stream, wrong_state: whether a gradient, a stream, or a weight, buffer or
            optimizer state is not finite or above 1.8e19. States are not looked at in every step.
        loss: loss of the step before; NaN or infinite if it was that.
        has_loss: whether there was one.
        is_full: whether this rank holds no snapshots, because they are too large.
    """

    is_known: bool = False
    squares: float = 0.0
    seen: float = 0.0
    wrong_gradient: bool = False
    wrong_stream: bool = False
    wrong_state: bool = False
    loss: float = 0.0
    has_loss: bool = False
    is_full: bool = False

    def row(self) -> Floats:
        """[fields] float64."""
        return np.array(dataclasses.astuple(self), dtype=np.float64)


FIELDS = [field.name for field in dataclasses.fields(Figures)]


@dataclass(frozen=True)
class Decision:
    """Actions of one step.

    Attributes:
        action: "skip", "clip", "back", or "" for nothing.
        reason: a sentence without the full stop.
        scale: factor of the gradients.
        rate: factor of the learning rates.
        figures: gradient norm, its median and limit, the loss's limit, as far as they are known.
        ranks: ranks that saw something wrong.
        is_wrong: whether a value is not finite.
        onset: for "back", steps before this one from which a state is old enough.
        is_lowered, is_recovered: whether the learning rate was lowered, or has just come back.
    """

    action: str = ""
    reason: str = ""
    scale: float = 1.0
    rate: float = 1.0
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    is_wrong: bool = False
    onset: int = 0
    is_lowered: bool = False
    is_recovered: bool = False


NOTHING = Decision()


class Level:
    """Window of one series on a logarithmic scale, with its limit.

    A series that has been negative is judged as it is after that, by a rise of `least` − 1 of its median.
    """

    def __init__(self, sigmas: float, least: float) -> None:
        self._sigmas, self._least = sigmas, least
        self._is_log = True
        self._window = Window(1, sigmas=sigmas, effect=math.log(least))

    @property
    def limit(self) -> float:
        """Value from which the next one is a spike, infinite while it is not known."""
        return self._back(float(self._window.limits[0]))

    def is_spike(self, value: float) -> tuple[bool, float]:
        """Whether a finite value is a spike, which is not entered; and the median before it."""
        if value < 0 and self._is_log:
            self._is_log, self._window = False, Window(1, sigmas=self._sigmas, relative=self._least - 1)
        if self._is_log and value == 0:
            return False, math.nan
        entry = math.log(value) if self._is_log else value
        spikes, medians = self._window.judge(np.array([entry]), np.array([True]))
        return bool(spikes[0]), self._back(float(medians[0]))

    def _back(self, entry: float) -> float:
        return math.exp(entry) if self._is_log and math.isfinite(entry) else entry


class Decider:
    """The decisions of a run, one before each update.

    Args:
        skip, clip: what may be done.
        lower: factor of the learning rate after a spike, None for none.
        back: steps between two snapshots, None for none.
    """

    def __init__(self, *, skip: bool, clip: bool, lower: float | None, back: int | None) -> None:
        self._skip, self._clip, self._lower, self._back = skip, clip, lower, back
        self._gradient = Level(GRADIENT_SIGMAS, GRADIENT_RATIO)
        self._loss = Level(SIGMAS, 1 + LOSS_RISE)
        self._since_spike = TWICE_IN
        self._wrong = self._wrong_streams = self._left = 0
        self._rate = 1.0
        self._is_measured = False

    @property
    def is_calm(self) -> bool:
        """Whether all ranks measure, and neither the loss nor a gradient has jumped lately."""
        return self._is_measured and not self._left and self._since_spike >= TWICE_IN

    def decide(self, table: Floats) -> Decision:
        """The decision on a table [ranks, fields] of `Figures`."""
        columns = dict(zip(FIELDS, table.T, strict=True))
        known = columns["is_known"] == 1
        self._is_measured = bool(known.all())
        if not known.any():
            return Decision(rate=self._recovered()) if self._rate < 1 else NOTHING
        loss_limit = self._enter_loss(columns)
        wrong = [(name, known & (columns[name] == 1)) for name in ("wrong_state", "wrong_gradient")]
        wrong.append(("wrong_stream", self._wrong_stream(known & (columns["wrong_stream"] == 1))))
        name, ranks = next(((name, mask) for name, mask in wrong if mask.any()), ("", known))
        self._wrong = self._wrong + 1 if name else 0
        may_go_back = self._back is not None and not columns["is_full"].any()
        if name:
            found = self._on_wrong(name, may_go_back)
            seen = tuple(int(rank) for rank in np.flatnonzero(ranks))
            return dataclasses.replace(found, rate=self._rate, ranks=seen, is_wrong=True)
        found = self._on_finite(
            math.sqrt(float(columns["squares"][known].mean())),
            math.sqrt(float(columns["seen"][known].mean())),
        )
        if may_go_back and self._left >= LEFT_IN_ROW:
            reason = f"the loss has left its level for {self._left} steps in a row"
            figures = {"loss limit": loss_limit} if math.isfinite(loss_limit) else {}
            assert self._back is not None
            found = Decision("back", reason, figures=figures, onset=self._left + self._back // 2)
        return self._with_rate(found)

    def went_back(self) -> None:
        """Begin to count anew, because the run has gone back to an earlier state."""
        self._wrong = self._left = 0
        self._since_spike = TWICE_IN

    def stop_going_back(self) -> None:
        """Decide never again to go back."""
        self._back = None

    def _enter_loss(self, columns: dict[str, Floats]) -> float:
        """Enter the mean of the losses; the limit before it."""
        limit = self._loss.limit
        given = columns["loss"][columns["has_loss"] == 1]
        if not len(given):
            return limit
        mean = float(given.mean())
        is_beyond = not math.isfinite(mean) or self._loss.is_spike(mean)[0]
        self._left = self._left + 1 if is_beyond else 0
        return limit

    def _wrong_stream(self, mask: np.ndarray) -> np.ndarray:
        """The ranks with a wrong stream; none once that is the run's normal state."""
        self._wrong_streams = self._wrong_streams + 1 if mask.any() else 0
        return mask & (self._wrong_streams <= ANEW)

    def _on_wrong(self, name: str, may_go_back: bool) -> Decision:
        said = _WRONG[name]
        if may_go_back and (name == "wrong_state" or self._wrong >= WRONG_IN_ROW):
            times = f", for {self._wrong} steps in a row" if self._wrong > 1 else ""
            return Decision("back", said + times, onset=self._wrong - 1)
        return Decision("skip", said) if self._skip else NOTHING

    def _on_finite(self, norm: float, seen: float) -> Decision:
        """Judge a finite gradient norm: `seen` by the window, `norm` by how far it must be scaled."""
        limit = self._gradient.limit
        is_spike, median = self._gradient.is_spike(seen)
        self._since_spike += 1
        again = self._since_spike < TWICE_IN
        if not is_spike:
            return NOTHING
        self._since_spike = 0
        is_alarm = again or seen >= ALONE * median  # as NS805
        figures = {"norm": norm, "median": median, "limit": limit}
        reason = f"the gradient norm is {figure(seen)}, {figure(seen / median)} times its median"
        if self._skip and is_alarm:
            return Decision("skip", reason, figures=figures)
        if self._clip:
            return Decision("clip", reason, scale=min(1.0, limit / norm), figures=figures)
        return Decision("", reason, figures=figures) if is_alarm else NOTHING

    def _with_rate(self, found: Decision) -> Decision:
        """The decision with the learning rate's factor, lowered by a spike."""
        if self._lower is None:
            return found
        if found.reason:
            lowest = self._lower**LOWEST
            is_lowered = self._rate > lowest
            self._rate = max(self._rate * self._lower, lowest)
            return dataclasses.replace(found, rate=self._rate, is_lowered=is_lowered)
        was_lower = self._rate < 1
        rate = self._recovered()
        return dataclasses.replace(found, rate=rate, is_recovered=was_lower and rate == 1)

    def _recovered(self) -> float:
        """The factor one step later: it grows geometrically, one lowering in `RECOVERY` steps."""
        if self._rate < 1:
            assert self._lower is not None
            rate = self._rate * self._lower ** (-1 / RECOVERY)
            self._rate = 1.0 if rate > 1 - 1e-9 else rate
        return self._rate


_WRONG = {
    "wrong_state": "a weight, a buffer or an optimizer state is not finite",
    "wrong_gradient": "a gradient is not finite",
    "wrong_stream": "the residual stream is not finite",
}
