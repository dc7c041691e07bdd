"""Rescuer: what a monitor does to a run that goes wrong, before the optimizer changes a weight.

The decision is made once a step, before the first optimizer's update, by all processes together: each gives
its figures to all others (one `all_gather`), and each comes to the same decision on the same table. A process
that could not measure takes part with no opinion. So every process of a run must be given the same rescue.
"""

import contextlib
import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from normscope.errors import UsageError, describe
from normscope.monitor.alarms.columns import Floats
from normscope.monitor.alarms.rescued import GAVE_UP, RESCUED, TAKEN
from normscope.monitor.decision import NOTHING, Decider, Decision, Figures
from normscope.monitor.optimizers import after_closure
from normscope.monitor.reductions import local, squares
from normscope.monitor.rescue import Rescue
from normscope.monitor.ring import SNAPSHOTS, Ring
from normscope.monitor.row import RESCUE, SNAPSHOTS_KEPT, Event

LOG = logging.getLogger("normscope")
_GRAVE = {"back", "gave up", "failed"}
"""Actions that a user should read of at once."""


class Rescuer:
    """Hooks on the optimizers of a run that carry out its `Rescue`.

    Errors of a measurement leave this process without an opinion in that step. An error of the communication
    ends the rescue.

    Args:
        rescue: what may be done.
        model: the model of the run.
        optimizers: those of the run.
        has_wrong_stream: whether a stream of the step so far is not finite.
        say: called with a step, a sentence on what was done, and whether it is grave.
        rank: rank of this process.

    Attributes:
        rescued: value of the quantity "rescued" for the step so far.
        failure: why the rescue ended, None while it works.

    Raises:
        UsageError: an optimizer evaluates its closure several times in a step, or snapshots are too large.
    """

    def __init__(
        self,
        rescue: Rescue,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        has_wrong_stream: Callable[[], bool],
        say: Callable[[int, str, bool], None],
        rank: int = 0,
    ) -> None:
        if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
            raise UsageError(
                "rescue with LBFGS, which evaluates the model several times in a step",
                "an optimizer with one gradient per step",
                "leave rescue out",
            )
        self._rescue, self._optimizers = rescue, optimizers
        self._has_wrong_stream, self._tell, self._rank, self._step = has_wrong_stream, say, rank, 0
        self._decider = Decider(skip=rescue.skip, clip=rescue.clip, lower=rescue.lower, back=rescue.back)
        self._ring: Ring | None = None
        if rescue.back is not None:
            self._ring = Ring(model, optimizers, every=rescue.back, memory=rescue.memory)
        self.rescued = TAKEN
        self.failure: str | None = None
        self._held = ExitStack()
        self._events: list[Event] = []
        self._decision: Decision | None = None
        self._stepped: set[int] = set()
        self._depths: Counter[int] = Counter()  # of step(); one of a subclass may run its parent's
        self._seen: float | None = None
        self._loss: float | None = None
        self._said = ""
        self._withheld: list[tuple[Tensor, Tensor]] = []
        self._rates: list[tuple[dict[str, Any], Any]] = []

    @property
    def rate(self) -> float:
        """Factor of the learning rate in the step so far."""
        return 1.0 if self._decision is None else self._decision.rate

    def attach(self, step: int = 0) -> None:
        """Begin after step `step`, behind the hooks that are there."""
        self._step = step
        for optimizer in self._optimizers:
            self._held.callback(
                optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step)).remove
            )
            self._held.callback(
                optimizer.register_step_post_hook(torch.compiler.disable(self._after_step)).remove
            )

    def detach(self) -> None:
        """End."""
        self._give_back()
        self._held.close()

    def see_gradients(self) -> None:
        """Measure the gradients before the loop clips them."""
        if self._decision is None:
            with self._guarded():
                self._seen = self._squares(None)[0]

    def take_part(self) -> None:
        """Decide at the end of a step without an update, because the other processes wait for this one.

        A loss scaler that skips a step calls no optimizer. It may do so in one process alone.
        """
        if self._decision is None and self.failure is None and _num_ranks() > 1:
            self._decision = self._decide(None)
            self._carry_out(self._decision)

    def end_step(self, loss: Tensor | float | None) -> None:
        """End a step of the run; its loss is judged in the next one."""
        with self._guarded():
            value = loss.detach() if isinstance(loss, Tensor) else loss
            self._loss = None if value is None else float(value)
        self._step += 1
        self._decision, self._seen, self.rescued = None, None, TAKEN
        self._stepped.clear()
        self._depths.clear()

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    # One step.

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._depths[id(optimizer)] += 1
        if self._depths[id(optimizer)] > 1:
            return None
        return after_closure(args, kwargs, lambda: self._act(optimizer))

    def _act(self, optimizer: Optimizer) -> None:
        """Decide, if this optimizer is the first of a step; then prepare its update."""
        if self.failure is not None:
            return
        if torch._C._current_graph_task_id() != -1:
            raise UsageError(
                "rescue with an optimizer that steps inside the backward",
                "optimizers that step after it",
                "leave rescue out",
            )
        if self._decision is None or id(optimizer) in self._stepped:
            self._stepped.clear()
            self._decision = self._decide(optimizer)
            self._carry_out(self._decision)
        self._stepped.add(id(optimizer))
        decision = self._decision
        with self._guarded():
            if decision.action in ("skip", "back"):
                self._withhold(optimizer)
            elif decision.rate < 1:
                self._lower(optimizer, decision.rate)

    def _decide(self, optimizer: Optimizer | None) -> Decision:
        """The decision of all processes; without an optimizer this one has no opinion."""
        figures = Figures()
        if optimizer is not None:
            with self._guarded():
                figures = self._figures(optimizer)
        self._loss = None
        try:
            table = gathered(figures.row(), self._device())
        except Exception as error:  # a process that died; the others see the same
            self._fail(error)
            return NOTHING
        with self._guarded():
            decision = self._decider.decide(table)
            if decision.action == "back":
                return self._go_back(decision)
            if decision.action in ("", "clip") and self._decider.is_calm:
                self._keep()
            return decision
        return NOTHING

    def _keep(self) -> None:
        """Keep a snapshot if one is due; this process has then looked at its state before the decision."""
        if self._ring is None or not self._ring.is_due(self._step + 1):
            return
        try:
            size = self._ring.keep(self._step + 1)
        except Exception:  # out of memory: the other processes must know before they go back
            self._ring.give_up()
            raise
        if self._ring.is_full:
            sentence = f"no snapshots: {SNAPSHOTS} would take {size:.3g} MiB of host memory"
        else:
            sentence = f"{SNAPSHOTS} snapshots of the state take {size:.3g} MiB of host memory"
        if sentence != self._said:
            self._said = sentence
            self._say("snapshots", sentence, {"MiB": size})

    def _go_back(self, decision: Decision) -> Decision:
        """Go back, or give that up; the decision about the update that is due."""
        assert self._ring is not None
        now = self._step + 1
        snapshot = self._ring.go_back(now, now - decision.onset)
        if snapshot is None:
            self._decider.stop_going_back()
            self._ring.give_up()
            self.rescued = GAVE_UP
            sentence = f"not gone back, because that did not help: {decision.reason}"
            self._say("gave up", sentence, decision.figures)
            is_skipped = self._rescue.skip and decision.is_wrong
            return dataclasses.replace(decision, action="skip" if is_skipped else "")
        self._decider.went_back()
        figures = decision.figures | {"to": snapshot.step, "try": snapshot.tries}
        sentence = f"gone back to the state before step {snapshot.step}: {decision.reason}"
        self._say("back", sentence, figures)
        return decision

    def _figures(self, optimizer: Optimizer) -> Figures:
        """The figures of this process."""
        squares, is_full_step = self._squares(optimizer)
        if not is_full_step:  # the loss scaler's own skip
            return Figures()
        seen = squares if self._seen is None else self._seen
        is_wrong = not np.isfinite([squares, seen]).all()
        wrong_stream = self._has_wrong_stream()
        ring = self._ring
        is_looked_at = ring is not None and (is_wrong or wrong_stream or ring.is_due(self._step + 1))
        return Figures(
            is_known=True,
            squares=0.0 if is_wrong else squares,
            seen=0.0 if is_wrong else seen,
            wrong_gradient=is_wrong,
            wrong_stream=wrong_stream,
            wrong_state=ring is not None and is_looked_at and not ring.is_sound(),
            is_full=ring is not None and ring.is_full,
            loss=0.0 if self._loss is None else self._loss,
            has_loss=self._loss is not None,
        )

    def _squares(self, optimizer: Optimizer | None) -> tuple[float, bool]:
        """‖g‖² without a fused optimizer's loss scale; False if its scaler skips the step.

        The square of a part is multiplied by the number of parts, so that the processes' mean is that of the
        whole.
        """
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return 0.0, False
        scale = getattr(optimizer, "grad_scale", None)
        gradients = [gradient for _, gradient in self._gradients()]
        found = squares([local(gradient) for gradient in gradients]).double().cpu()
        total = float(found @ torch.tensor([_num_shards(each) for each in gradients]).double())
        return total / (1.0 if scale is None else float(scale) ** 2), True

    def _gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters of all optimizers that have a gradient, each once."""
        pairs = (pair for optimizer in self._optimizers for pair in _gradients(optimizer))
        yield from {id(pair[0]): pair for pair in pairs}.values()

    def _carry_out(self, decision: Decision) -> None:
        """Do what concerns all optimizers, and record it."""
        with self._guarded():
            if decision.action == "clip":
                scale([gradient for _, gradient in self._gradients()], decision.scale)
            self._record(decision)
        if decision.action in ("skip", "back"):
            self.rescued = max(self.rescued, RESCUED)

    def _record(self, decision: Decision) -> None:
        ranks = {"ranks": list(decision.ranks)} if len(decision.ranks) and _num_ranks() > 1 else {}
        figures: dict[str, Any] = decision.figures | ranks
        if decision.action in ("skip", "clip"):
            done = {"skip": "skipped", "clip": f"clipped by a factor of {decision.scale:.3g}"}
            figures |= {"scale": decision.scale} if decision.action == "clip" else {}
            self._say(decision.action, f"step {done[decision.action]}: {decision.reason}", figures)
        if decision.is_lowered:
            sentence = f"learning rate lowered to {decision.rate:.3g} of its value: {decision.reason}"
            self._say("lower", sentence, {"rate": decision.rate})
        if decision.is_recovered:
            self._say("recovered", "learning rate back at its value", {"rate": 1.0})

    def _say(self, action: str, sentence: str, figures: dict[str, Any]) -> None:
        data = {"action": action, "sentence": sentence, **figures}
        kind = SNAPSHOTS_KEPT if action == "snapshots" else RESCUE
        self._events.append(Event(self._step + 1, self._rank, time.time(), kind, data))
        self._tell(self._step + 1, sentence, action in _GRAVE)

    def _withhold(self, optimizer: Optimizer) -> None:
        """Take the gradients away for this update: PyTorch's optimizers pass over such parameters."""
        for parameter, gradient in list(_gradients(optimizer)):
            self._withheld.append((parameter, gradient))
            parameter.grad = None

    def _lower(self, optimizer: Optimizer, factor: float) -> None:
        """Lower the learning rates for this update; a scheduler sees nothing of it."""
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if rate is None:  # the optimizer sets its own
                continue
            if isinstance(rate, Tensor):  # in place: a compiled or captured step holds it
                self._rates.append((group, rate.clone()))
                rate.mul_(factor)
            else:
                self._rates.append((group, rate))
                group["lr"] = rate * factor

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depths[id(optimizer)] -= 1
        if self._depths[id(optimizer)] <= 0:
            self._give_back()

    def _give_back(self) -> None:
        for parameter, gradient in self._withheld:
            parameter.grad = gradient
        for group, rate in self._rates:
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._withheld, self._rates = [], []

    # Errors.

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Context whose errors are recorded; the rescue goes on, because the other processes count on it."""
        try:
            with torch.no_grad():
                yield
        except Exception as error:
            LOG.debug("error of the rescue", exc_info=error)
            self._say("failed", f"no opinion in this step: {describe(error)}", {})

    def _fail(self, error: Exception) -> None:
        self.failure = describe(error)
        LOG.debug("error of the rescue", exc_info=error)
        self._say("failed", f"rescue ended: {self.failure}", {})

    def _device(self) -> torch.device:
        """Device of a tensor that the processes exchange."""
        if not _num_ranks() > 1 or "cpu:" in str(dist.get_backend_config()):
            return torch.device("cpu")
        return next(p.device for o in self._optimizers for g in o.param_groups for p in g["params"])


def _gradients(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter, parameter.grad


def _num_shards(tensor: Tensor) -> int:
    """Number of parts that a tensor is split into over processes."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = [tensor.device_mesh.size(i) for i, each in enumerate(tensor.placements) if each.is_shard()]
    return math.prod(sizes)


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gathered(row: Floats, device: torch.device) -> Floats:
    """[ranks, fields] the rows of all processes, in the order of their ranks."""
    if _num_ranks() == 1:
        return row[None]
    own = torch.tensor(row, device=device)
    rows = [torch.empty_like(own) for _ in range(_num_ranks())]
    dist.all_gather(rows, own)
    return torch.stack(rows).cpu().numpy()


@torch.no_grad()
def scale(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients in place."""
    sparse = [gradient for gradient in gradients if gradient.is_sparse]
    if dense := [local(gradient) for gradient in gradients if not gradient.is_sparse]:
        torch._foreach_mul_(dense, factor)
    for gradient in sparse:
        gradient.mul_(factor)
