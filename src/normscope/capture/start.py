"""The start of a script's run, kept before its first step, so that copies of the run can be tried later."""

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from normscope.errors import describe
from normscope.subjects import Run
from normscope.subjects.memory import available_bytes, gigabytes
from normscope.train import LiveOptimizers, Recipe

ROOM = 4
"""Multiple of the weights' size that has to be free: a copy in a trial has gradients and moments too."""


@dataclass(frozen=True)
class Start:
    """Copies of the model, the optimizers and the schedulers before the first step.

    Attributes:
        model: the copy of the model.
        live: optimizers and schedulers of that copy.
        reason: why nothing was copied; empty if it was, and then only are the others there.
    """

    model: nn.Module | None = None
    live: LiveOptimizers | None = None
    reason: str = ""

    @staticmethod
    def of(run: Run) -> "Start":
        """Copy the run as it is now."""
        size = sum(p.numel() * p.element_size() for p in run.model.parameters())
        room = available_bytes(next(run.model.parameters()).device)
        if room is not None and ROOM * size > room:
            return Start(reason=f"{gigabytes(ROOM * size)} are needed for a copy, {gigabytes(room)} are free")
        try:
            model = copy.deepcopy(run.model)
            for module in model.modules():
                if "_original_forward" in vars(module):  # accelerate's wrapper calls the original module
                    vars(module).pop("forward", None)
            model.zero_grad(set_to_none=True)
            live = LiveOptimizers(run.model, run.optimizers, run.schedulers).build(model)
        except Exception as error:  # the user's objects may raise anything when they are copied
            return Start(reason=f"the model or its optimizer cannot be copied ({describe(error)})")
        return Start(model, live)

    def recipe(self, run: Run, rates: Sequence[tuple[float, ...]], steps: int) -> Recipe:
        """The recipe of copies of the run.

        Args:
            run: its clipping, precision and accumulation.
            rates: learning rates of each group in the steps that were seen. Where the schedulers give the
                same, they also say how the rates go on (without any, the rates stay); else these are the
                record, see `LiveOptimizers`.
            steps: the recipe's steps.
        """
        assert self.model is not None
        assert self.live is not None
        live, seen = self.live, list(rates)
        if not _alike(list(itertools.islice(_scheduled(live), len(seen))), seen):
            live = LiveOptimizers(self.model, live.optimizers, (), tuple(seen))
        copied = Run(
            model=self.model,
            batches=(),
            optimizer=live.optimizers,
            scheduler=live.schedulers,
            clip=run.clip,
            precision=run.precision,
            accumulation=run.accumulation,
        )
        return Recipe.of(copied, optimizer=live, lr=live.lr, warmup=live.warmup, steps=steps)


def _scheduled(live: LiveOptimizers) -> Iterator[tuple[float, ...]]:
    """Yield the learning rates of each group by step, as the schedulers set them, until these end."""
    scratch = live.build(live.model)
    while True:
        yield tuple(float(group["lr"]) for group in scratch.groups)
        try:
            scratch.step_schedulers(0.0)
        except (
            Exception
        ):  # OneCycleLR raises ValueError: the script may step it less often than its optimizer
            return


def _alike(first: Sequence[tuple[float, ...]], second: Sequence[tuple[float, ...]]) -> bool:
    pairs = zip(itertools.chain(*first), itertools.chain(*second), strict=False)
    return len(first) == len(second) and all(
        math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-12) for a, b in pairs
    )
