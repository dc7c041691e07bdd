"""Monitor whose steps are events of a training script, instead of hooks and calls of `step`."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from normscope.monitor.instruments import Instruments
from normscope.monitor.launch import say
from normscope.monitor.monitor import Monitor
from normscope.monitor.row import Event
from normscope.rules import Finding


class Driven(Monitor):
    """Monitor without hooks on the model and the optimizers; its owner tells it what happens.

    The first forward is read at its end: PyTorch's global hooks see the arguments only there. The streams of
    that one are not measured, but it can be replayed. An error of a method is for `stop`.

    Args:
        model: the outermost module that the script calls.
        optimizers: those that hold its weights.
        options: see `Monitor`.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], **options: Any) -> None:
        super().__init__(model, optimizers, **options)
        self._begun = 0
        if self._rescuer is not None:
            self._rescuer.attach(self._step)

    @property
    def is_over(self) -> bool:
        """Whether the monitor has stopped, and no rescue goes on without it."""
        return self.failure is not None and self._rescuer is None

    def forward_begins(self) -> None:
        """Begin a forward of the model with gradients."""
        if self.failure is None:
            self._open((), {})  # the arguments come at its end

    def forward_ends(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """End it; read the model if it was the first."""
        if self.failure is not None:
            return
        if self._instruments is None:
            self._begin(args, kwargs)
            self._begun = self._step + 1
        if not self._has_wrong_stream:
            self._now.forwards.give(args, kwargs)
        self._looker.hold(args, kwargs)
        self._forward_ends(self._called, args, kwargs, output)

    def before_update(self, optimizer: Optimizer) -> None:
        """Measure before the first optimizer of a step changes the weights."""
        self._begin_update(optimizer)

    def close(self, error: BaseException | None = None) -> None:
        """Write the rest; `error` is what ended the script."""
        self.__exit__(None if error is None else type(error), error, None)

    def discard(self) -> None:
        """End without a record, because another module is the model."""
        if self._rescuer is not None:
            self._rescuer.detach()
        self._held.close()
        self._forget()
        self._journal.close()

    def stop(self, error: Exception) -> None:
        """End because of an error of a method."""
        if self.failure is None:
            self._fail(error)

    # What the script's user reads.

    def _say(self, finding: Finding, step: int) -> None:
        say(f"{self._place(step)}: {finding.name}: {finding.message}")

    def _say_rescue(self, step: int, sentence: str, is_grave: bool) -> None:
        say(f"{self._place(step)}: rescue: {sentence}")

    def _say_failure(self, error: Exception) -> None:
        say(f"{self._place(self._step)}: the monitor stopped, the run goes on: {self.failure}")

    def _note_wrong(self, event: Event) -> None:
        super()._note_wrong(event)
        say(f"{self._place(event.step)}: first wrong value: {event.data['sentence']}")

    def _test_hooks(self, instruments: Instruments) -> None:
        if self._step > self._begun:  # no hook fires in the first forward
            super()._test_hooks(instruments)

    def _place(self, step: int) -> str:
        return f"step {step}" + (f", rank {self._rank}" if self._rank else "")
