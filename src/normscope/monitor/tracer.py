"""Tracer: finds the first wrong value of a step by running the step again."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from normscope.capture.alone import CommunicationError, alone, num_processes
from normscope.capture.apart import apart
from normscope.monitor.alarms.wrong import GARBAGE_VALUE, NOT_FINITE, SKIPS
from normscope.monitor.plan import Plan
from normscope.monitor.row import FIRST_WRONG_VALUE, Event
from normscope.monitor.sharded import Sharded
from normscope.monitor.streams import Streams
from normscope.monitor.taken import Taken
from normscope.monitor.turns import TURNS
from normscope.rules import Finding


class Tracer:
    """Search for first wrong values; of wrong steps in a row, only that of the first is searched for.

    Weights and states are looked at in turns, so that a wrong one may not be seen at every step: steps are
    sound again after `TURNS` of them.

    Args:
        model: the model, without wrappers.
        optimizers: its optimizers.
        plan: what is watched in it.
        streams: its streams.
        sharded: how to read a model that is sharded over processes; None for others.
        rank: rank of this process.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        plan: Plan,
        streams: Streams,
        sharded: Sharded | None,
        rank: int,
    ) -> None:
        self._model, self._optimizers, self._plan, self._streams = model, optimizers, plan, streams
        self._sharded, self._rank = sharded, rank
        self._num_sound = TURNS  # steps since a wrong value
        self._was_zero = False  # whether the last gradient was 0 throughout
        self._last_update = 0  # number of the last step that changed the weights
        self._num_skipped = 1  # steps skipped since the last update; a loss scaler begins with a search

    def before_update(self, taken: Taken) -> Event | None:
        """Trace the first of the streams and gradients that is not finite, and a gradient of 0 throughout."""
        taken.num_checked = len(taken.parts)
        if not all(bool(part.squares.isfinite().all()) for part in taken.parts):
            return self._trace(taken, "the residual stream")
        gradients = np.zeros(0) if taken.gradients is None else taken.gradients.by_parameter()
        wrong = np.flatnonzero(~np.isfinite(gradients))
        if len(wrong):
            return self._trace(taken, f"the gradient of {self._plan.groups.names[wrong[0]]}")
        was_zero, self._was_zero = self._was_zero, len(gradients) > 0 and not gradients.any()
        if self._was_zero and not was_zero:  # clipping by a norm that overflows leaves zeros
            return self._trace(taken, "a value behind a gradient of 0", only_found=True)
        return None

    def after_update(self, taken: Taken, loss: float) -> Iterator[Event]:
        """Trace what is wrong in a step that has ended; at most one event."""
        sizes = np.zeros(0) if taken.sizes is None else taken.sizes.cpu().numpy()
        wrong = np.flatnonzero(~np.isfinite(sizes))
        found = [] if taken.num_checked == len(taken.parts) else [self.before_update(taken)]
        if len(wrong):
            found.append(self._trace(taken, f"{taken.names[wrong[0]]} after the update", is_after=True))
        if taken.loss is not None and not np.isfinite(loss):
            found.append(self._trace(taken, "the loss"))
        if taken.is_skipped:
            found.append(self._trace_skipped(taken))
        else:
            self._num_skipped, self._last_update = 0, taken.step
        yield from filter(None, found)

    def at_alarms(self, taken: Taken, alarms: Sequence[Finding]) -> Iterator[Event]:
        """Trace what only the alarms of a step have seen, such as a weight before its turn; the step ends."""
        for finding in alarms:
            if finding.code in (NOT_FINITE.code, GARBAGE_VALUE.code):
                first = finding.evidence[0]
                where = f"{first.quantity} at {first.site}" if first.site else first.quantity
                event = self._trace(taken, where, is_after=True, only_found=True)
                if event is not None:
                    yield event
        self._num_sound = 0 if taken.is_wrong else self._num_sound + 1

    def _trace_skipped(self, taken: Taken) -> Event | None:
        """Trace a step whose optimizer did not step, as after a wrong gradient that only a loss scaler saw.

        That is how a scaler finds its scale: in the first steps, and once in 2,000 after them. So a step is
        traced if it follows an update, and after so many skipped ones that the scale cannot be the reason.
        """
        self._num_skipped += 1
        if self._num_skipped - 1 in (0, SKIPS):
            return self._trace(taken, "the gradient of a skipped step", only_found=True)
        return None

    def _trace(
        self, taken: Taken, where: str, *, is_after: bool = False, only_found: bool = False
    ) -> Event | None:
        """The first wrong value of a step, as an event.

        Args:
            taken: the step.
            where: where it was seen.
            is_after: whether it was seen in what the update left, and not in what it was given.
            only_found: whether it may be no fault, as the scale of a loss scaler that is too large: then only
                what running it again shows counts.
        """
        is_first = not taken.is_wrong and self._num_sound >= TURNS
        taken.is_wrong = taken.is_wrong or not only_found
        if not is_first or not len(taken.forwards) or (self._sharded is not None and only_found):
            return None
        is_past = taken.weights is not None and not is_after
        known = () if is_past else self._optimizers  # the states are those after an update by wrong values
        is_updated = not is_past and taken.time > 0 and not taken.is_skipped
        try:
            with apart(self._model, None), alone(), ExitStack() as held:
                if is_past and taken.weights is not None:
                    held.enter_context(taken.weights.put())
                if self._sharded is not None:
                    return self._event(taken, where, self._in_shards(self._sharded, taken, where, known))
                found = taken.forwards.first_wrong(known, is_updated=is_updated)
        except CommunicationError as error:
            found, sentence = None, f"{where} is not finite; the step could not be replayed, because {error}"
        else:
            sentence = self._of_sound_replay(taken, where)
        if only_found:
            if found is None or found.is_of_scale:
                return None
            taken.is_wrong = True
        event = self._event(taken, where, {"sentence": sentence} if found is None else found.to_dict())
        is_earlier = found is not None and found.phase == "optimizer state" and not is_updated
        return self._at_last_update(event) if is_earlier and self._last_update else event

    def _at_last_update(self, event: Event) -> Event:
        """The event of a step whose wrong weights were written by the last update, as one of that step."""
        sentence = (
            f"{event.data['sentence']} The update of step {self._last_update} used it; step {event.step} "
        )
        data = {**event.data, "sentence": sentence + "met the weights that it wrote."}
        return dataclasses.replace(event, step=self._last_update, data=data)

    def _of_sound_replay(self, taken: Taken, where: str) -> str:
        sentence = f"{where} is not finite, but a replay of the step's forward and backward is: "
        sentence += "the cause lies on another rank, " if num_processes() > 1 else "the cause lies "
        sentence += "outside of the model"
        if taken.forwards.num_dropped:
            sentence += f", or in one of the step's first {taken.forwards.num_dropped} forwards"
        return sentence

    def _in_shards(
        self, sharded: Sharded, taken: Taken, where: str, optimizers: Sequence[Optimizer]
    ) -> dict[str, Any]:
        """The first wrong figure of a sharded model, as data of an event."""
        rms = self._streams.rms_of(taken.parts)[self._streams.columns]
        gradients = None if taken.gradients is None else taken.gradients.by_parameter()
        return sharded.first_wrong(where, taken.forwards.last(optimizers), self._plan, rms, gradients)

    def _event(self, taken: Taken, where: str, data: dict[str, Any]) -> Event:
        return Event(taken.step, self._rank, time.time(), FIRST_WRONG_VALUE, {"seen": where, **data})
