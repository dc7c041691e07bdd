"""Monitor: measures a run at every step, stores it, and raises alarms."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from normscope.errors import UsageError, describe
from normscope.monitor.alarms import NOT_MEASURED
from normscope.monitor.entropy import RunEntropy
from normscope.monitor.hook import hook_calls, is_hooked
from normscope.monitor.instruments import Instruments, facts_of
from normscope.monitor.journal import Journal
from normscope.monitor.look import ASKED, Look, Looker
from normscope.monitor.optimizers import after_closure, innermost, optimizers_of
from normscope.monitor.recorder import Recorder
from normscope.monitor.replica import own_class
from normscope.monitor.rescue import Rescue
from normscope.monitor.rescuer import Rescuer
from normscope.monitor.row import NOISE, Event
from normscope.monitor.sharded import Sharded, is_sharded
from normscope.monitor.store import RunReader, RunStore
from normscope.monitor.taken import Taken, Weights, gradients_of, is_on_device, rate_of, scale_of
from normscope.monitor.tracer import Tracer
from normscope.monitor.trackers import Trackers
from normscope.monitor.unwatched import Unwatched
from normscope.recording.calls import bare, named_arguments
from normscope.rules import Finding

LOG = logging.getLogger("normscope")
EVERY = 10

Method = TypeVar("Method", bound=Callable[..., Any])


def _guarded(method: Method) -> Method:
    """A method whose errors end the monitor, and never the run; the monitor's own forwards do not call it."""

    @functools.wraps(method)
    def call(self: "Monitor", *args: Any, **kwargs: Any) -> Any:
        if self.failure is not None or self._is_working:
            return None
        self._is_working = True
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._fail(error)
            return None
        finally:
            self._is_working = False

    return call  # type: ignore[return-value]


class Monitor:
    """Context of a training loop that measures each step.

        with normscope.Monitor(model, optimizer, store="run.db") as monitor:
            for batch in batches:
                loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(loss)

    At each step: the loss, the RMS of the residual stream at every block, the gradient's norm by block and
    kind, learning rate, time, tokens. Every `every` steps also the figures of `sites.py`, such as what each
    branch adds to the stream. A value that is not finite is traced to the operation that made it.

    Args:
        model: the module that the loop calls; wrappers (DDP, `torch.compile`) are looked through.
        optimizer: the optimizer, or several; accelerate's wrapper is looked through.
        store: SQLite file to write, for `normscope watch`; None keeps only `alarms`.
        every: steps between two looks at all figures, and between two writes to the store.
        entropy: entropy of the targets in nats, with which the loss is compared; None estimates it from the
            targets of the first steps, with the loss's label smoothing, see `entropy.py`.
        on_alarm: called with each new alarm; None logs it as a warning of the logger "normscope".
        resume: whether `store` may hold earlier steps of this run.
        start: number of steps that the run took before; None takes the last one of `store` to `resume`.
        steps: planned number of steps of the whole run, which `normscope watch` shows.
        trackers: objects that get the figures of each step on rank 0, see `trackers.py`: those of accelerate,
            a run of W&B or trackio, `mlflow`, a `SummaryWriter`, `JsonLines`. One that raises is dropped.
        rescue: what the monitor may do to a run that goes wrong, see `Rescue`; None only watches.
        scaler: the GradScaler of float16 training, whose scale is then a figure of each step.
        look: when the probes of `check` are run on the model, see `Look`; None only where `look` is called.

    Attributes:
        alarms: every alarm so far.
        failure: why the monitor stopped, None while it works. An error of the monitor never ends the run.
        notes: sentences on what is not watched, and why.
        scaler: the loss scaler; it may be set later.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        store: str | Path | None = None,
        every: int = EVERY,
        entropy: float | None = None,
        on_alarm: Callable[[Finding], object] | None = None,
        resume: bool = False,
        start: int | None = None,
        steps: int | None = None,
        trackers: Sequence[Any] = (),
        rescue: Rescue | None = None,
        look: Look | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        if every < 1:
            raise UsageError(f"every={every}", "at least 1", "leave it out for 10")
        self.failure: str | None = None
        self.scaler = scaler
        given = optimizers_of(model, optimizer)
        self._called, self._model = model, bare(model)
        self._optimizers = [innermost(each) for each in given]
        self._every, self._on_alarm = every, on_alarm
        self._rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._rescuer = None
        if rescue is not None:
            self._rescuer = Rescuer(
                rescue,
                self._model,
                self._optimizers,
                has_wrong_stream=lambda: self._has_wrong_stream,
                say=self._say_rescue,
                rank=self._rank,
            )
        self._facts: dict[str, Any] = {} if entropy is None else {"entropy": entropy}
        self._sharded = Sharded(self._model) if is_sharded(self._model) else None
        self._facts["sharded"] = self._sharded is not None
        self._instruments: Instruments | None = None
        self._recorder: Recorder | None = None
        self._looker = Looker(look, self._model, self._rank)
        self._held = ExitStack()
        self._is_working = False
        self._state, self._num_steps = "made", 0
        self._is_on_device = False
        self._weights: Weights | None = None
        opened = None if store is None else RunStore(store, rank=self._rank, resume=resume)
        if opened is not None and resume and start is None:
            with RunReader(opened.path) as reader:
                start = reader.last_step
        self._step, self._clock = start or 0, time.perf_counter()
        self._journal = Journal(
            opened,
            Trackers(trackers if self._rank == 0 else ()),
            self._facts,
            rank=self._rank,
            every=every,
            start=self._step,
        )
        self._entropy = RunEntropy(self._model, self._optimizers, self._facts, self._journal)
        self.alarms, self.notes = self._journal.alarms, self._journal.notes
        self._unwatched = Unwatched(self._model, self._journal)
        self._clear()
        self._journal.note("model", own_class(self._model).__name__)
        self._journal.note("entropy", entropy)
        self._journal.note("every", every)
        self._journal.note("steps", steps)
        self._journal.note("sharded", self._facts["sharded"])
        if rescue is not None:
            self._journal.note("rescue", dataclasses.asdict(rescue))

    # Context.

    def __enter__(self) -> "Monitor":
        self._require_first_use()
        self._state = "entered"
        hooks = hook_calls(self._called, self._forward_begins, self._forward_ends)
        for optimizer in self._optimizers:
            hooks.append(optimizer.register_step_pre_hook(torch.compiler.disable(self._before_update)))
        for hook in hooks:
            self._held.callback(hook.remove)
        if self._rescuer is not None:
            self._rescuer.attach(self._step)
        return self

    def _require_first_use(self) -> None:
        """Raise UsageError for a monitor that was used before, and for a model that another one watches."""
        if self._state != "made":
            raise UsageError(f"a Monitor that has {self._state}", "a new one", "make one for each run")
        if is_hooked(self._called):
            given = f"a second Monitor on one {type(self._called).__name__}"
            raise UsageError(given, "one for each model", "end the first, or give both optimizers to one")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._state = "ended"
        if self._is_updated and self.failure is None and self._instruments is not None:
            self._unwatched.missing_step(self._num_steps)
        self._held.close()
        if self._rescuer is not None:
            self._rescuer.detach()
            self._journal.enter(*self._rescuer.take_events())
        self._finish_last()
        self._forget()
        try:
            self._entropy.close()
            self._journal.flush()
            for finding in self._journal.compared(self._step):
                self._say(finding, self._step)
            if isinstance(error, SystemExit) and not error.code:  # sys.exit(0) is no failure
                error = None
            self._journal.end("" if error is None else describe(error))
        except Exception as failed:
            if self.failure is None:
                self._fail(failed)
        finally:
            self._journal.close()

    @_guarded
    def _finish_last(self) -> None:
        if self._recorder is not None:
            self._recorder.record_waiting()

    def _fail(self, error: Exception) -> None:
        """Stop, and say so. The hooks stay until the step ends: one that runs must not be removed."""
        self.failure = describe(error)
        self._forget()
        self._say_failure(error)
        failed = Event(self._step, self._rank, time.time(), "monitor-failed", {"error": self.failure})
        self._journal.enter(failed)
        try:
            self._journal.flush()
        except Exception as second:  # what could not be stored may be the reason
            LOG.warning("the last figures could not be stored: %s", second)
            self._journal.drop()

    def _forget(self) -> None:
        """Free what is kept of the run: batches, gradients of outputs, weights."""
        self._now.forget()
        if self._recorder is not None:
            self._recorder.forget()
        self._weights = None
        self._looker.forget()
        self._clear()

    @property
    def is_working(self) -> bool:
        """Whether the monitor itself works at this moment, and may run the model."""
        return self._is_working

    def _say_failure(self, error: Exception) -> None:
        LOG.warning(
            "the monitor stopped at step %d, the run goes on: %s", self._step, self.failure, exc_info=error
        )

    # One step, in the order of its events.

    def _clear(self) -> None:
        """Begin a step."""
        self._now = Taken()
        if self._instruments is not None:
            self._instruments.begin(self._now.parts)
        self._is_updated = self._is_searching = False

    @property
    def _is_late(self) -> bool:
        """Whether the numbers of this step are read at the next one, so that the host never waits for it."""
        return self._is_on_device and not self._is_measured

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward; call it only where the monitor is entered while this forward already runs."""
        self._forward_begins(self._called, args, kwargs)

    @_guarded
    def _forward_begins(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self._is_searching:
            return
        if self._instruments is None:
            self._begin(args, kwargs)
        self._open(args, kwargs)

    def _open(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Keep the state at the beginning of a forward, and take its streams."""
        if not self._has_wrong_stream:  # else it lies in an earlier forward of this step, which is kept
            self._now.forwards.open(self._model, args, kwargs, self._autocast)
        self._looker.hold(args, kwargs)
        if self._instruments is not None:
            self._instruments.open(is_measured=self._is_measured)

    @property
    def _has_wrong_stream(self) -> bool:
        """Whether a stream of the step so far is known not to be finite."""
        return self._instruments is not None and not self._is_late and self._instruments.streams.is_wrong

    @property
    def _autocast(self) -> torch.dtype | None:
        """The dtype of the autocast that is on now."""
        device = next(self._model.parameters()).device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def _begin(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Read the model at its first forward."""
        batch = named_arguments(self._model, args, kwargs)
        cast = self._autocast if self._sharded is None else self._sharded.cast or self._autocast
        self._facts |= facts_of(self._model, batch, cast)
        self._instruments = made = Instruments(
            self._model,
            self._called,
            self._optimizers,
            batch,
            dtype=self._facts["dtype"],
            sharded=self._sharded,
            every=self._every,
        )
        self._held.callback(made.remove)
        self._looker.begin(made.plan.anatomy, self._facts["dtype"])
        made.begin(self._now.parts)
        self._is_on_device = self._rescuer is None and is_on_device(self._model)
        tracer = Tracer(self._model, self._optimizers, made.plan, made.streams, self._sharded, self._rank)
        self._recorder = Recorder(made, tracer, self._journal, self._entropy, self._say, self._note_wrong)
        self._journal.declare(made.layouts(is_rescued=self._rescuer is not None))
        self._journal.remark(*made.notes)
        self._journal.note("facts", self._facts)

    @_guarded
    def _forward_ends(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        is_ours = torch.is_grad_enabled() and not self._is_searching
        if torch.compiler.is_compiling() or not is_ours or self._instruments is None:
            return
        was_wrong = self._has_wrong_stream
        self._now.tokens += self._instruments.close(args, kwargs, is_measured=self._is_measured)
        if not was_wrong:
            self._now.forwards.close(output, with_rows=self._sharded is None and self._entropy.wants_rows)

    @property
    def _is_measured(self) -> bool:
        """Whether all figures are measured at the step that has begun."""
        return self._is_due(self._step + 1)

    def _is_due(self, step: int) -> bool:
        return step % self._every == 0 or step == 1

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Begin an update; with a closure, after its first call, which is the step's forward and backward.

        Later calls search.
        """

        def begin_call() -> None:
            self._is_searching = self._is_updated

        return after_closure(args, kwargs, lambda: self._begin_update(optimizer), before=begin_call)

    @_guarded
    def _begin_update(self, optimizer: Optimizer) -> None:
        now, instruments, recorder = self._now, self._instruments, self._recorder
        given = getattr(optimizer, "found_inf", None)  # of a GradScaler, if it is fused
        found_inf = given if isinstance(given, Tensor) else None
        if instruments is None or recorder is None or self._is_updated:
            if now.found_inf is not None:  # one that steps is enough
                now.found_inf = None if found_inf is None else torch.minimum(now.found_inf, found_inf)
            return
        if found_inf is not None and not self._is_late and bool(found_inf):
            return
        self._is_updated = True
        recorder.record_waiting()  # a trace needs the weights of then
        parameters = instruments.plan.groups.parameters
        scale, is_seen = getattr(optimizer, "grad_scale", None), now.gradients is not None
        now.step = self._step + 1
        if now.gradients is None:
            now.gradients = gradients_of(parameters, scale)
        if self._is_late:
            now.found_inf = found_inf
            self._weights = now.weights = self._weights or Weights(parameters)
            self._weights.take()
            return
        recorder.before_update(now)
        if self._is_measured:
            clipped = gradients_of(parameters, scale) if is_seen else now.gradients
            if reason := instruments.before_update(now, clipped.by_parameter()):
                said = "the diversities are those of forwards with dropout, which can hide a collapse (NS808)"
                self._journal.remark(f"{said}: {reason}")
                self._journal.note(NOISE, reason)

    def see_gradients(self) -> None:
        """Measure the gradients as they are now; call it before they are clipped.

        Without it they are measured when the optimizer steps, after clipping.
        """
        if self._rescuer is not None:
            self._rescuer.see_gradients()
        self._see_gradients()

    @_guarded
    def _see_gradients(self) -> None:
        if self._instruments is not None and not self._is_updated:
            self._now.gradients = gradients_of(self._instruments.plan.groups.parameters)

    def _note_wrong(self, event: Event) -> None:
        """Enter the first wrong value of a step."""
        self._journal.enter(event)

    def step(self, loss: Tensor | float | None = None) -> list[Finding]:
        """End a step, after the optimizer's; return its new alarms.

        Args:
            loss: the loss that was differentiated, a scalar; the mean over the batches of a step.
        """
        if self.failure is not None:
            self._held.close()
        self._num_steps += 1
        done: list[Event] = []
        if self._rescuer is not None:
            self._rescuer.take_part()
            done = self._rescuer.take_events()
        self._journal.enter(*done)
        new = self._end_step(loss) or []
        if self._rescuer is not None:
            self._rescuer.end_step(loss)
        if self.failure is not None and done:
            self._flush_rescue()
        return new

    def _flush_rescue(self) -> None:
        """Store what a rescue does after the monitor's end, which it outlives."""
        try:
            self._journal.flush()
        except Exception as error:
            LOG.warning("an event of the rescue could not be stored: %s", error)

    @_guarded
    def _end_step(self, loss: Tensor | float | None) -> list[Finding]:
        now, is_late = self._now, self._is_late
        now.step, now.loss = self._step + 1, loss.detach() if isinstance(loss, Tensor) else loss
        if self._is_updated and self._instruments is not None:
            self._instruments.after_update(now, is_measured=self._is_measured)
        self._step += 1
        if self._instruments is None or self._recorder is None:
            self._unwatched.no_forward(self._step, is_entered=self._state == "entered")
            return []
        now.is_due = self._is_due(self._step)
        if now.is_due:
            self._test_hooks(self._instruments)
            if self._sharded is None:
                self._unwatched.new_weights(self._instruments.plan)
        self._note_state(now)
        new = self._recorder.record(now, is_late=is_late)
        if (done := self._looker.at_end(self._step, new, now.forwards.cotangents)) is not None:
            self._enter_look(done[0])
        if not is_late:
            now.forget()
        self._clear()
        return new

    def _note_state(self, now: Taken) -> None:
        """Enter time, learning rate, loss scale and rescue of a step that ends."""
        clock = time.perf_counter()
        now.time, now.seconds, self._clock = time.time(), clock - self._clock, clock
        factor = 1.0 if self._rescuer is None else self._rescuer.rate
        rates = [rate_of(group) for optimizer in self._optimizers for group in optimizer.param_groups]
        now.rate = max((factor * rate for rate in rates if rate is not None), default=NOT_MEASURED)
        now.rescued = None if self._rescuer is None else self._rescuer.rescued
        now.is_skipped, now.scale = not self._is_updated, scale_of(self.scaler)
        if now.is_skipped:  # gradients that were seen before a scaler skipped them are those of its scale
            now.gradients = None

    def look(self, *, jacobian: bool = False) -> list[Finding]:
        """Run the probes and rules of `check` on the model as it is, with the last batch of the run.

        Within a step, after its forward or in `on_alarm`, the look waits for the end of the step, and the
        result is empty; the store has its findings. It takes the time of several steps; an error is logged,
        and ends nothing.

        Args:
            jacobian: also measure Jacobians, at most 160 forwards of one sequence.
        """
        look = Look(jacobian=jacobian)
        if self._is_working:
            self._looker.ask(look)
            return []
        return self._look_now(look) or []

    @_guarded
    def _look_now(self, look: Look) -> list[Finding]:
        if len(self._now.forwards) or self._instruments is None:
            self._looker.ask(look)
            return []
        event, found = self._looker.look(self._step, ASKED, look)
        self._enter_look(event)
        return found

    def _enter_look(self, event: Event) -> None:
        """Store a look, which does not count as time of the next step."""
        self._clock += event.data["seconds"]
        self._journal.enter(event)
        self._journal.flush()

    def _test_hooks(self, instruments: Instruments) -> None:
        """Note what the first step with all figures did not show."""
        parts, unseen = self._now.parts, instruments.unseen
        self._unwatched.hooks(instruments.plan, parts, unseen, is_updated=self._is_updated)

    def _say(self, finding: Finding, step: int) -> None:
        if self._on_alarm is not None:
            self._on_alarm(finding)
        else:
            LOG.warning("step %d: %s: %s", step, finding.name, finding.message)

    def _say_rescue(self, step: int, sentence: str, is_grave: bool) -> None:
        LOG.log(logging.WARNING if is_grave else logging.INFO, "step %d: %s", step, sentence)
