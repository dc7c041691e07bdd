"""Monitor: measures a run at every step, stores it, and raises alarms."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from normscope.anatomy import named_parameters
from normscope.capture.apart import apart
from normscope.errors import UsageError, describe
from normscope.monitor.alarms import NOT_MEASURED
from normscope.monitor.attention import AttentionWatch
from normscope.monitor.entropy import TargetsEntropy
from normscope.monitor.hook import Hook
from normscope.monitor.in_place import CompiledCalls, is_compiled
from normscope.monitor.journal import Journal
from normscope.monitor.look import ASKED, Look, Looker
from normscope.monitor.noise import Noise
from normscope.monitor.plan import Plan, plan_of
from normscope.monitor.replica import own_class
from normscope.monitor.rescue import Rescue
from normscope.monitor.rescuer import Rescuer, after_closure
from normscope.monitor.row import NOISE, SITES, STEP, Event, Row
from normscope.monitor.sharded import Sharded, is_sharded
from normscope.monitor.sites import Sites
from normscope.monitor.store import RunReader, RunStore
from normscope.monitor.streams import Streams
from normscope.monitor.taken import Taken, Weights, gradients_of, is_on_device, rate_of, scale_of
from normscope.monitor.tracer import Tracer
from normscope.monitor.trackers import Trackers
from normscope.monitor.turns import Turns
from normscope.recording.calls import bare, named_arguments
from normscope.rules import Finding
from normscope.subjects.feed import tensors_in

LOG = logging.getLogger("normscope")
EVERY = 10
SCALARS = ("loss", "gradient/norm", "lr", "seconds", "tokens", "skipped", "loss-scale")
Floats = NDArray[np.float64]

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
            targets of the first steps, see `entropy.py`.
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
        given = _optimizers(model, optimizer)
        self._called, self._model = model, bare(model)
        self._optimizers = [_innermost(each) for each in given]
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
        self._entropy = TargetsEntropy()
        self._plan: Plan | None = None
        self._looker = Looker(look, self._model, self._rank)
        self._held = ExitStack()
        self._is_working = self._is_tested = self._has_unwatched = False
        self._state, self._num_steps = "made", 0
        self._is_on_device = False
        self._weights: Weights | None = None
        self._waiting: Taken | None = None
        self._late_alarms: list[Finding] = []
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
        self.alarms, self.notes = self._journal.alarms, self._journal.notes
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
        hooks: list[RemovableHandle | CompiledCalls]
        if is_compiled(self._called):
            hooks = [CompiledCalls(self._called, self._forward_ends, self._forward_begins)]
        else:
            hooks = [
                self._called.register_forward_pre_hook(Hook(self._forward_begins), with_kwargs=True),
                self._called.register_forward_hook(Hook(self._forward_ends), with_kwargs=True),
            ]
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
        if any(isinstance(each, Hook) for each in self._called._forward_hooks.values()):
            given = f"a second Monitor on one {type(self._called).__name__}"
            raise UsageError(given, "one for each model", "end the first, or give both optimizers to one")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._state = "ended"
        if self._is_updated and self.failure is None and self._plan is not None:
            self._warn_of_missing_step()
        self._held.close()
        if self._rescuer is not None:
            self._rescuer.detach()
            self._journal.enter(*self._rescuer.take_events())
        self._finish_last()
        self._forget()
        try:
            if not self._entropy.is_over:
                self._entropy.close()
                self._journal.note("entropy-unknown", self._entropy.reason)
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

    def _warn_of_missing_step(self) -> None:
        """Say that optimizers stepped, and `step` was not called after it."""
        said = f"step() was called {self._num_steps} times, and the optimizer has stepped after the last call"
        self._journal.remark(f"{said}: call monitor.step(loss) at the end of each step")
        if not self._num_steps:
            LOG.warning(self.notes[-1])

    @_guarded
    def _finish_last(self) -> None:
        self._late_alarms += self._finish_waiting()

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
        for taken in filter(None, (self._now, self._waiting)):
            taken.forget()
        self._waiting = self._weights = None
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
        if self._plan is not None:
            self._streams.begin(self._now.parts)
        self._given = np.zeros(0)  # the squares of the gradients that the optimizer got, after clipping
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
        if self._plan is None:
            self._begin(args, kwargs)
        self._open(args, kwargs)

    def _open(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Keep the state at the beginning of a forward, and take its streams."""
        if not self._has_wrong_stream:  # else it lies in an earlier forward of this step, which is kept
            self._now.forwards.open(self._model, args, kwargs, self._autocast)
        self._looker.hold(args, kwargs)
        if self._plan is not None:
            self._streams.open(all_places=self._is_measured)
            if self._is_measured:
                self._attention.open()
                self._noise.open()

    @property
    def _has_wrong_stream(self) -> bool:
        """Whether a stream of the step so far is known not to be finite."""
        return self._plan is not None and not self._is_late and self._streams.is_wrong

    @property
    def _autocast(self) -> torch.dtype | None:
        """The dtype of the autocast that is on now."""
        device = next(self._model.parameters()).device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def _begin(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Read the model at its first forward."""
        batch = named_arguments(self._model, args, kwargs)
        if self._sharded is not None:
            plan, self._attention = self._sharded.read(batch)
        else:
            with apart(self._model, None):
                plan = plan_of(self._model, batch)
                self._attention = AttentionWatch(self._model, plan.anatomy, batch)
        self._plan = plan
        first = next(iter(tensors_in(batch)), None)
        self._facts["tokens"] = first is not None and not first.is_floating_point()
        cast = self._autocast if self._sharded is None else self._sharded.cast or self._autocast
        self._facts["dtype"] = str(cast or next(self._model.parameters()).dtype).removeprefix("torch.")
        trained = (each for each in self._model.parameters() if each.requires_grad)
        self._facts["weights"] = str(next(trained, next(self._model.parameters())).dtype).removeprefix(
            "torch."
        )
        self._is_on_device = self._rescuer is None and is_on_device(self._model)
        self._streams = Streams(self._model, plan)
        self._streams.begin(self._now.parts)
        self._noise = Noise(self._model, self._called, is_sharded=self._sharded is not None)
        self._held.callback(self._streams.remove)
        self._held.callback(self._attention.remove)
        is_float16 = self._facts["dtype"] == "float16"
        self._sites = Sites(plan, self._optimizers, with_headroom=is_float16)
        self._tracer = Tracer(self._model, self._optimizers, plan, self._streams, self._sharded, self._rank)
        self._turns = Turns(plan.groups.parameters, plan.groups.names, self._optimizers, self._every)
        layouts = {
            STEP: (
                *((name, "") for name in SCALARS),
                *(("stream/rms", each.site) for each, _ in plan.of("stream")),
                *(("gradient/block", block) for block in plan.groups.blocks),
                *(("gradient/kind", kind) for kind in plan.groups.kinds),
                *([] if self._rescuer is None else [("rescued", "")]),
            ),
            SITES: (*self._sites.layout, *self._attention.layout),
        }
        self._journal.declare(layouts)
        self._journal.remark(*plan.notes, *self._attention.notes)
        self._journal.note("facts", self._facts)

    @_guarded
    def _forward_ends(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        is_ours = torch.is_grad_enabled() and not self._is_searching and self._plan is not None
        if torch.compiler.is_compiling() or not is_ours:
            return
        assert self._plan is not None
        was_wrong = self._has_wrong_stream
        held = self._streams.close()
        self._attention.close()
        first = next(iter(tensors_in(named_arguments(self._model, args, kwargs))), None)
        if first is not None and not first.is_floating_point():
            self._now.tokens += first.numel()
        if self._is_measured:
            shape = () if first is None else tuple(first.shape)
            self._sites.see(held, self._streams.last_rms(), shape)
            self._noise.close(shape)
        if not was_wrong:
            self._now.forwards.close(output)

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
        now, given = self._now, getattr(optimizer, "found_inf", None)  # of a GradScaler, if it is fused
        found_inf = given if isinstance(given, Tensor) else None
        if self._plan is None or self._is_updated:
            if now.found_inf is not None:  # one that steps is enough
                now.found_inf = None if found_inf is None else torch.minimum(now.found_inf, found_inf)
            return
        if found_inf is not None and not self._is_late and bool(found_inf):
            return
        self._is_updated = True
        self._late_alarms += self._finish_waiting()  # a trace needs the weights of then
        scale, is_seen = getattr(optimizer, "grad_scale", None), now.gradients is not None
        now.step = self._step + 1
        if now.gradients is None:
            now.gradients = gradients_of(self._plan.groups.parameters, scale)
        if self._is_late:
            now.found_inf = found_inf
            self._weights = now.weights = self._weights or Weights(self._plan.groups.parameters)
            self._weights.take()
            return
        if (event := self._tracer.before_update(now)) is not None:
            self._note_wrong(event)
        if self._is_measured:
            clipped = gradients_of(self._plan.groups.parameters, scale) if is_seen else now.gradients
            self._given = clipped.by_parameter()
            self._sites.before_step()
            self._remove_noise()

    def _remove_noise(self) -> None:
        """Measure the diversities again without the noise of dropout, if there was any."""
        if self._has_wrong_stream or not len(self._now.forwards):  # the last forward is not the one kept
            return
        if self._noise.remove(self._streams, self._sites, self._now.forwards.last(self._optimizers)):
            reason = self._noise.reason
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
        if self._plan is not None and not self._is_updated:
            self._now.gradients = gradients_of(self._plan.groups.parameters)

    def _note_wrong(self, event: Event) -> None:
        """Enter the first wrong value of a step."""
        self._journal.enter(event)

    def _look_after_update(self, taken: Taken) -> None:
        """Look at some of the weights and states, and measure the update where it is due."""
        taken.names, taken.sizes = self._turns.look(taken.step - 1)
        if self._is_measured:
            figures = self._sites.after_step(self._given)
            taken.measured = np.concatenate([figures, self._attention.values()])

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
        if self._is_updated:
            self._look_after_update(now)
        self._step += 1
        if self._plan is None:
            if not self._is_tested:
                self._is_tested = True
                self._journal.remark(
                    "no forward of the model was seen before the first step: nothing is watched"
                    if self._state == "entered"
                    else "the Monitor was not entered: write `with Monitor(…) as monitor:` around the loop"
                )
                LOG.warning("step %d: %s", self._step, self.notes[-1])
            return []
        if not self._is_tested and self._is_due(self._step):
            self._test_itself()
        if self._is_due(self._step) and not self._has_unwatched and self._sharded is None:
            self._find_unwatched()
        clock = time.perf_counter()
        now.time, now.seconds, self._clock = time.time(), clock - self._clock, clock
        factor = 1.0 if self._rescuer is None else self._rescuer.rate
        rates = [rate_of(group) for optimizer in self._optimizers for group in optimizer.param_groups]
        now.rate = max((factor * rate for rate in rates if rate is not None), default=NOT_MEASURED)
        now.is_skipped, now.scale = not self._is_updated, scale_of(self.scaler)
        if now.is_skipped:  # gradients that were seen before a scaler skipped them are those of its scale
            now.gradients = None
        new = self._late_alarms + self._finish_waiting()
        self._late_alarms = []
        if is_late:
            now.send()
            self._waiting = now
        else:
            new += self._finish(now)
        self._look_if_due(new, now)
        if not is_late:
            now.forget()
        self._clear()
        return new

    def _finish_waiting(self) -> list[Finding]:
        """Finish the step whose numbers were sent to the host; its new alarms."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return []
        new = self._finish(waiting)
        waiting.forget()
        return new

    def _finish(self, taken: Taken) -> list[Finding]:
        """Read the numbers of a step, trace what is wrong, judge and store; its new alarms."""
        taken.receive()
        loss = NOT_MEASURED if taken.loss is None else float(taken.loss)
        for event in self._tracer.after_update(taken, loss):
            self._note_wrong(event)
        if not self._entropy.is_over and "entropy" not in self._facts:
            self._find_entropy(taken)
        rows = [Row(taken.step, self._rank, taken.time, STEP, self._values(taken, loss))]
        if taken.measured is not None:
            rows.append(Row(taken.step, self._rank, taken.time, SITES, taken.measured))
        new = self._journal.judge(rows)
        for event in self._tracer.at_alarms(taken, new):
            self._note_wrong(event)
        new += self._journal.keep(rows, new, with_sites=self._is_due(taken.step))
        for finding in new:
            self._say(finding, taken.step)
        return new

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
        if len(self._now.forwards) or self._plan is None:
            self._looker.ask(look)
            return []
        event, found = self._looker.look(self._step, ASKED, look, self._plan.anatomy, self._facts["dtype"])
        self._clock += event.data["seconds"]
        self._journal.enter(event)
        self._journal.flush()
        return found

    def _look_if_due(self, alarms: Sequence[Finding], now: Taken) -> None:
        """Look at the model at the end of a step where that is due; it does not count as time of the next."""
        assert self._plan is not None
        cotangents, dtype = now.forwards.cotangents, self._facts["dtype"]
        done = self._looker.at_end(self._step, alarms, self._plan.anatomy, dtype, cotangents)
        if done is not None:
            self._clock += done[0].data["seconds"]
            self._journal.enter(done[0])
            self._journal.flush()

    def _find_entropy(self, taken: Taken) -> None:
        """Estimate the entropy of the targets, if a cross-entropy of a whole step is seen."""
        cotangents = [each for each in taken.forwards.cotangents if each is not None]
        if not cotangents or taken.is_wrong:
            return
        last = taken.forwards.last(self._optimizers)
        found = self._entropy.see(cotangents, named_arguments(self._model, last.args, last.kwargs))
        if found is not None:
            self._facts["entropy"] = found
        if self._entropy.is_over:
            self._journal.note("entropy", found)
            self._journal.note("entropy-unknown", self._entropy.reason)
            self._journal.note("facts", self._facts)

    def _test_itself(self) -> None:
        """After the first step with all figures, note the hooks that did not fire, and what that loses."""
        assert self._plan is not None
        self._is_tested = True
        wanted = np.array(sorted(self._plan.places), dtype=np.intp)
        columns = {column for part in self._now.parts for column in part.columns}
        seen = np.array([column in columns for column in wanted], dtype=bool)
        if not seen.all():
            lost = f"{(~seen).sum()} of {len(wanted)} hooks on modules did not fire"
            self._journal.remark(f"{lost} (compiled code runs none): the streams there are not watched")
        if self._attention.unseen:
            lost = ", ".join(self._attention.unseen)
            self._journal.remark(f"the attention figures of these branches cannot be measured: {lost}")
        if not self._is_updated:
            self._journal.remark(
                "no optimizer stepped before the first call of step(): gradients and updates are not watched"
            )

    def _find_unwatched(self) -> None:
        """Note weights that train by now and did not at the first forward, as unfrozen ones or a new head."""
        assert self._plan is not None
        watched = set(map(id, self._plan.groups.parameters))
        trained = (each for each in self._model.parameters() if each.requires_grad)
        new = {id(each) for each in trained if each.is_floating_point() and id(each) not in watched}
        if not new:
            return
        self._has_unwatched = True
        first, *rest = [name for name, each in named_parameters(self._model) if id(each) in new]
        self._journal.remark(
            "weights that train since a later step than the first one are not watched: "
            + (f"{first} and {len(rest)} more" if rest else first)
        )

    def _values(self, taken: Taken, loss: float) -> Floats:
        """Values of the layout `STEP`."""
        assert self._plan is not None
        groups = self._plan.groups
        if taken.gradients is None or taken.is_skipped:  # no optimizer stepped
            gradients = np.full(1 + len(groups.blocks) + len(groups.kinds), NOT_MEASURED)
        else:
            sums = taken.gradients.by_parameter()
            gradients = np.sqrt([groups.shared(sums).sum(), *groups.by_block(sums), *groups.by_kind(sums)])
        scale = NOT_MEASURED if taken.scale is None else float(taken.scale)
        scalars = [loss, gradients[0], taken.rate, taken.seconds, taken.tokens, taken.is_skipped, scale]
        streams = self._streams.rms_of(taken.parts)[self._streams.columns]
        rescued = [] if self._rescuer is None else [self._rescuer.rescued]
        return np.array([*scalars, *streams, *gradients[1:], *rescued])

    def _say(self, finding: Finding, step: int) -> None:
        if self._on_alarm is not None:
            self._on_alarm(finding)
        else:
            LOG.warning("step %d: %s: %s", step, finding.name, finding.message)

    def _say_rescue(self, step: int, sentence: str, is_grave: bool) -> None:
        LOG.log(logging.WARNING if is_grave else logging.INFO, "step %d: %s", step, sentence)


def _optimizers(model: object, given: object) -> list[Optimizer]:
    """The optimizers as a list; UsageError for anything else."""
    each = list(given) if isinstance(given, Sequence) else [given]
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model={type(model).__name__}", "a torch.nn.Module", "write Monitor(model, optimizer)"
        )
    if not each or not all(callable(getattr(one, "register_step_pre_hook", None)) for one in each):
        names = ", ".join(type(one).__name__ for one in each) or "none"
        raise UsageError(
            f"optimizer={names}", "a torch.optim.Optimizer, or several", "write optimizer=[a, b]"
        )
    return cast(list[Optimizer], each)


def _innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside wrappers such as accelerate's, whose hooks do not run."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer
