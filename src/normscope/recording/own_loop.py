"""Batches of a training loop that is not ours: each is recorded by running the loop's own loss once."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import UsageError, describe
from normscope.recording.calls import Call, Forward, bare, recorded_forward
from normscope.recording.events import Events, Silent
from normscope.recording.tape import replayed_loss
from normscope.subjects import Run, untouched


class _LastForward(Silent):
    """Listener that records the last forward of the largest module that runs."""

    def __init__(self) -> None:
        self.call: Call | None = None

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.call is not None and _size(module) < _size(self.call.module):
            return
        if self.call is not None:
            self.call.tape.stop()
        self.call = Call.of(module, args, kwargs, output)
        self.call.tape.start()


def recorded(compute: Callable[[], Tensor]) -> Forward | None:
    """The forward that `compute()` runs, with the loss that it returns; None if the loss is not of it."""
    listener = _LastForward()
    with Events(listener).attach(), torch.enable_grad():
        loss = compute()
        if listener.call is None:
            return None
        listener.call.tape.stop()
        return recorded_forward(listener.call, loss)


def run_of_loop(
    batches: Iterable[Any], loss_of: Callable[[Any], Tensor], owner: nn.Module, name: str, **fields: Any
) -> Run:
    """A Run of a loop that computes its loss as `loss_of(batch)`.

    Args:
        batches: the loop's batches; they repeat at their end.
        loss_of: runs the model on a batch, and returns the scalar loss.
        owner: module that holds all that a forward changes; it is restored after each.
        name: the loop in words, for errors.
        fields: further fields of the Run.

    Raises:
        UsageError: there are no batches, or the loss does not come from one forward of a module.
    """

    def forwards() -> Iterator[Forward]:
        while True:
            is_empty = True
            for number, batch in enumerate(batches, 1):
                is_empty = False
                with untouched(owner), _blamed(name, number):
                    owner.train()
                    forward = recorded(partial(loss_of, batch))
                if forward is None or forward.recording is None:
                    raise UsageError(
                        f"the loss of {name}",
                        "a scalar that PyTorch's functions compute from the output of one forward",
                        "check its script as it is: normscope check -- python train.py",
                    )
                yield forward
            if is_empty:
                raise UsageError(f"the data of {name} (no batch)", "at least one batch", "check its loader")

    source = forwards()
    first = next(source)

    def endless() -> Iterator[Any]:
        yield first.batch
        yield from (forward.batch for forward in source)

    return Run(model=bare(first.module), batches=endless(), loss=replayed_loss, **fields)


@contextmanager
def _blamed(name: str, number: int) -> Iterator[None]:
    """Name the model and its loss for their error: whoever draws the batches would blame these."""
    try:
        yield
    except (UsageError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the user's code may raise anything
        raise UsageError(
            f"the model or the loss of {name}, which raised {describe(error)} on batch {number}",
            "a forward and a loss that run on every batch",
            "fix the model or the loss, or check what that batch holds",
        ) from error


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
