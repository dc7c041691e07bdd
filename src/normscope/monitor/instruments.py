"""Instruments: all that measures one model and its optimizers in a step, made at its first forward."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from normscope.capture.apart import apart
from normscope.monitor import step_figures
from normscope.monitor.attention import AttentionWatch
from normscope.monitor.noise import Noise
from normscope.monitor.plan import plan_of
from normscope.monitor.row import SITES, STEP, Layout
from normscope.monitor.sharded import Sharded
from normscope.monitor.sites import Floats, Sites
from normscope.monitor.streams import Part, Streams
from normscope.monitor.taken import Taken
from normscope.monitor.turns import Turns
from normscope.recording.calls import named_arguments
from normscope.subjects import Batch
from normscope.subjects.feed import tensors_in


class Instruments:
    """Hooks on a model, and measurements of its forwards and updates.

    Args:
        model: the model, without wrappers.
        called: the module that the loop calls.
        optimizers: its optimizers.
        batch: the batch of its first forward.
        dtype: name of the precision in effect.
        sharded: how to read a model that is sharded over processes; None for others.
        every: steps between two measurements of all figures.

    Attributes:
        plan: what is watched.
        streams: sizes of the streams.
        notes: sentences on what is not watched, and why.
    """

    def __init__(
        self,
        model: nn.Module,
        called: nn.Module,
        optimizers: Sequence[Optimizer],
        batch: Batch,
        *,
        dtype: str,
        sharded: Sharded | None,
        every: int,
    ) -> None:
        self._model, self._optimizers = model, optimizers
        if sharded is not None:
            self.plan, self._attention = sharded.read(batch)
        else:
            with apart(model, None):
                self.plan = plan_of(model, batch)
                self._attention = AttentionWatch(model, self.plan.anatomy, batch)
        self.notes = (*self.plan.notes, *self._attention.notes)
        groups = self.plan.groups
        with ExitStack() as held:
            held.callback(self._attention.remove)
            self.streams = Streams(model, self.plan)
            held.callback(self.streams.remove)
            self._noise = Noise(model, called, is_sharded=sharded is not None)
            self._sites = Sites(self.plan, optimizers, with_headroom=dtype == "float16")
            self._turns = Turns(groups.parameters, groups.names, optimizers, every)
            self._held = held.pop_all()
        self._clipped: Floats = np.zeros(0)

    def remove(self) -> None:
        """Remove the hooks."""
        self._held.close()

    def layouts(self, *, is_rescued: bool) -> dict[str, Layout]:
        """The columns of each layout; `is_rescued` is whether the run has a rescue."""
        return {
            STEP: step_figures.layout_of(self.plan, is_rescued=is_rescued),
            SITES: (*self._sites.layout, *self._attention.layout),
        }

    # One step, in the order of its events.

    def begin(self, parts: list[Part]) -> None:
        """A step begins; `parts` gets the sums of its streams."""
        self.streams.begin(parts)
        self._clipped = np.zeros(0)

    def open(self, *, is_measured: bool) -> None:
        """A forward begins; `is_measured` is whether all figures are due."""
        self.streams.open(all_places=is_measured)
        if is_measured:
            self._attention.open()
            self._noise.open()

    def close(self, args: Any, kwargs: dict[str, Any], *, is_measured: bool) -> int:
        """A forward ends; the number of its tokens."""
        held = self.streams.close()
        self._attention.close()
        first = next(iter(tensors_in(named_arguments(self._model, args, kwargs))), None)
        if is_measured:
            shape = () if first is None else tuple(first.shape)
            self._sites.see(held, self.streams.last_rms(), shape)
            self._noise.close(shape)
        return 0 if first is None or first.is_floating_point() else first.numel()

    def before_update(self, taken: Taken, clipped: Floats) -> str:
        """An update begins at a step with all figures.

        Args:
            taken: the step.
            clipped: ‖g‖² of each parameter, as the optimizer gets it.

        Returns:
            why dropout's noise stays in the diversities, the first time that it does; else "".
        """
        self._clipped = clipped
        self._sites.before_step()
        if self.streams.is_wrong or not len(taken.forwards):  # the last forward is not the one kept
            return ""
        has_stayed = self._noise.remove(self.streams, self._sites, taken.forwards.last(self._optimizers))
        return self._noise.reason if has_stayed else ""

    def after_update(self, taken: Taken, *, is_measured: bool) -> None:
        """An update has ended: look at some of the weights and states, and measure it where it is due."""
        taken.names, taken.sizes = self._turns.look(taken.step - 1)
        if is_measured:
            figures = self._sites.after_step(self._clipped)
            taken.measured = np.concatenate([figures, self._attention.values()])

    @property
    def unseen(self) -> list[str]:
        """Sites of the branches of which the last forward with all figures showed no attention."""
        return self._attention.unseen


def facts_of(model: nn.Module, batch: Batch, cast: torch.dtype | None) -> dict[str, Any]:
    """Facts of a model that alarms need; `cast` is the precision that autocast or FSDP runs it in."""
    first = next(iter(tensors_in(batch)), None)
    weight = next(model.parameters())
    trained = next((each for each in model.parameters() if each.requires_grad), weight)
    return {
        "tokens": first is not None and not first.is_floating_point(),
        "dtype": str(cast or weight.dtype).removeprefix("torch."),
        "weights": str(trained.dtype).removeprefix("torch."),
    }
