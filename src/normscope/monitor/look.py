"""Look: the probes and rules of `check` on the model of a run, at its current weights and on its last batch.

It measures signal propagation, attention, gradients, precision and, if asked, Jacobians, in eval mode and in
the model's own precision. The gradients are those of the run's own loss: the gradient that the backward gave
to the model's output is carried back through the model. Between two steps, where none is kept, they are those
of a random linear functional of the output.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy
from normscope.capture.alone import alone, require_no_sync
from normscope.capture.apart import apart
from normscope.errors import UsageError, describe
from normscope.monitor.row import LOOK, Event
from normscope.monitor.sharded import is_sharded
from normscope.probes import PROBES, Budget, Measurement, Measurements, Spending, measure_jacobian
from normscope.recording.calls import named_arguments, reaches
from normscope.rules import Finding, Severity, judge, matches
from normscope.subjects import Batch, LossFn, Subject
from normscope.subjects.feed import map_tensors, tensors_of

LOG = logging.getLogger("normscope")
NAMES = ("weights", "signal", "attention", "gradient", "precision")
"""Probes of a look. That of the wiring needs a loss and an optimizer of its own."""
FAMILIES = ("NS2", "NS3", "NS4", "NS5")
"""Findings of a look: signal, gradient, Jacobian, precision. The structure does not change in a run."""
LEAST_APART = 100
"""Fewest steps between two looks at errors, and between two at other alarms."""
ASKED, SCHEDULED = "asked for", "on schedule"


Cotangents = Sequence[Tensor | None]
"""Gradient of each floating-point output of a forward; None where it has none."""


@dataclass(frozen=True)
class Look:
    """When a `Monitor` runs the probes of `check` on the model, `Monitor(…, look=Look(every=1000))`.

    Attributes:
        every: optimizer steps between two looks of rank 0; None has no schedule.
        at_alarm: look at the step of an alarm; in 100 steps at one error at most, and at one other alarm.
        jacobian: also measure Jacobians, at most 160 forwards of one sequence.

    Raises:
        UsageError: `every` is less than 1.
    """

    every: int | None = None
    at_alarm: bool = False
    jacobian: bool = False

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise UsageError(f"every={self.every}", "at least 1 step", "use 1000, or None for no schedule")


class Looker:
    """The looks of one rank.

    Args:
        look: when to look; None is on demand only.
        model: the model without wrappers.
        rank: rank of this process.
    """

    def __init__(self, look: Look | None, model: nn.Module, rank: int) -> None:
        self._look, self._model, self._rank = look or Look(), model, rank
        self._inputs: tuple[Any, dict[str, Any]] | None = None
        self._asked: Look | None = None
        self._anatomy, self._dtype = Anatomy(()), ""
        self._last: dict[bool, int] = {}  # step of the last look at an alarm, by whether it was an error

    def begin(self, anatomy: Anatomy, dtype: str) -> None:
        """Set the reading of the model, and the precision in effect."""
        self._anatomy, self._dtype = anatomy, dtype

    def hold(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Hold the arguments of a forward, without their graph; none where they cannot be held."""
        try:
            self._inputs = map_tensors(Tensor.detach, args), map_tensors(Tensor.detach, kwargs)
        except Exception:  # arguments can be anything, and only a look needs them
            self._inputs = None

    def forget(self) -> None:
        """Free the arguments."""
        self._inputs = None

    def ask(self, look: Look) -> None:
        """Look at the end of the step."""
        self._asked = look

    def at_end(
        self, step: int, alarms: Sequence[Finding], cotangents: Cotangents
    ) -> tuple[Event, list[Finding]] | None:
        """The look that is due at the end of a step; None where none is.

        Args:
            step: the step that ends.
            alarms: its alarms on this rank.
            cotangents: gradient of each floating-point output of the last forward, None where it has none.
        """
        asked, self._asked = self._asked, None
        is_scheduled = self._rank == 0 and self._look.every is not None and step % self._look.every == 0
        if asked is not None:
            return self.look(step, ASKED, asked, cotangents)
        if is_scheduled:
            return self.look(step, SCHEDULED, self._look, cotangents)
        alarm = next((each for each in alarms if each.severity is Severity.ERROR), next(iter(alarms), None))
        if not self._look.at_alarm or alarm is None:
            return None
        is_error = alarm.severity is Severity.ERROR
        if step - self._last.get(is_error, -LEAST_APART) < LEAST_APART:
            return None
        self._last[is_error] = step
        why = f"at the alarm {alarm.code} {alarm.name}"
        return self.look(step, why, self._look, cotangents)

    def look(
        self, step: int, why: str, look: Look, cotangents: Cotangents = ()
    ) -> tuple[Event, list[Finding]]:
        """Look now; an error is told by the event, and goes no further."""
        began = time.perf_counter()
        found: list[Finding] = []
        try:
            rows, unmeasured = self._measured(look, cotangents)
            found = [each for each in judge(self._anatomy, rows, None, self._dtype) if _is_kept(each)]
            data: dict[str, Any] = {
                "sentence": _sentence(found, len(rows)),
                "findings": [each.to_dict() for each in found],
                "measurements": [each.to_dict() for each in rows if each.measured],
                "unmeasured": unmeasured,
            }
        except Exception as error:
            LOG.warning("step %d: a look at the model failed: %s", step, describe(error), exc_info=error)
            data = {"sentence": f"the model could not be looked at: {describe(error)}"}
        data |= {"why": why, "seconds": round(time.perf_counter() - began, 4)}
        return Event(step, self._rank, time.time(), LOOK, data), found

    def _measured(self, look: Look, cotangents: Cotangents) -> tuple[Measurements, list[str]]:
        """The measurements, and for each probe that failed its name and the reason."""
        if self._inputs is None:
            raise ValueError("no forward with gradients has been seen whose arguments could be held")
        if not self._anatomy.stacks:
            raise ValueError("no residual stream was read")
        if is_sharded(self._model):
            raise ValueError("its weights are sharded over processes, and one process cannot run it alone")
        require_no_sync(self._model)
        batch = named_arguments(self._model, *self._inputs)
        subject = self._subject(batch, _loss_of(cotangents))
        probes: dict[str, Callable[[Subject, Anatomy], Iterable[Measurement]]] = {
            name: PROBES[name] for name in NAMES
        }
        if look.jacobian:
            probes["jacobian"] = partial(measure_jacobian, spending=Spending(Budget.of("fast")))
        rows, unmeasured = Measurements(), []
        with apart(self._model, None), alone():  # each probe restores the model
            for name, probe in probes.items():
                try:
                    rows.extend(probe(subject, self._anatomy))
                except Exception as error:
                    unmeasured.append(f"{name}: {describe(error)}")
        return rows, unmeasured

    def _subject(self, batch: Batch, loss: LossFn | None) -> Subject:
        return Subject(
            model=self._model,
            batch=batch,
            loss_fn=loss,
            batches=lambda start=0: itertools.repeat(batch),
            seed=0,
            spec=type(self._model).__name__,
            input="the last batch of the run",
            has_own_batches=True,
        )


def _loss_of(cotangents: Cotangents) -> LossFn | None:
    """Σ ⟨cotangent, output⟩, whose gradient is that of the run's own loss; None without a cotangent."""
    if all(each is None for each in cotangents):
        return None

    def loss(output: Any, batch: Batch) -> Tensor:
        outputs = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
        pairs = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if g is not None]
        # An output from which another one is made (logits beside a loss) got that one's gradient as well.
        last = [
            (y, g) for y, g in pairs if not any(reaches(other, [y]) for other, _ in pairs if other is not y)
        ]
        return torch.stack([(y * g.detach().to(y)).sum() for y, g in last]).sum()

    return loss


def _is_kept(finding: Finding) -> bool:
    """Whether a finding belongs to a look; a note, on a precision that the run does not use, does not."""
    return finding.severity != Severity.NOTE and any(matches(finding, family) for family in FAMILIES)


def _sentence(found: Sequence[Finding], count: int) -> str:
    if not found:
        return f"{count} measurements, nothing found"
    names = dict.fromkeys(f"{each.code} {each.name}" for each in found)
    return f"{count} measurements, {len(found)} finding{'s' * (len(found) > 1)}: {', '.join(names)}"
