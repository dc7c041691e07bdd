"""`train_group`: train cells of one shape as one stack."""

import copy
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

import normscope
from normscope.errors import UsageError
from normscope.maps.cell import Cell, Result
from normscope.maps.certain import ALIKE, EVERY, all_alike, anatomy_of, diversity
from normscope.subjects import Subject
from normscope.subjects.rng import seeded
from normscope.train import Trials, in_flushed_thread, many_trials, trains


def train_group(
    cells: Sequence[Cell],
    *,
    early_stop: bool = True,
    on_step: Callable[[int], None] = lambda step: None,
    prepare: Callable[[Cell, nn.Module], None] = lambda cell, model: None,
    alike: float = ALIKE,
) -> list[Result]:
    """Train `cells` together and return their results, in order.

    A cell's weights, batches, learning rate and warm-up depend only on its config, so the other cells of the
    stack change its losses only by rounding. The same cells in the same order give the same bits.

    Args:
        cells: cells of one `shape`.
        early_stop: whether to stop a cell once it is certain to fail, see `maps.certain`.
        on_step: called with the number of steps taken, after each step; an exception in it ends the training.
        prepare: called with each cell and its model before the first step.
        alike: token diversity at which a run counts as certain to fail.

    Raises:
        UsageError: the models have no loss, or no unigram entropy to compare it with.
    """
    assert len({cell.shape for cell in cells}) == 1, "a stack has one shape"

    def train(checkpoint: Callable[[], None]) -> list[Result]:
        def after_step(step: int) -> None:
            checkpoint()
            on_step(step)

        return _train(cells, early_stop, after_step, prepare, alike)

    with seeded(cells[0].seed):  # dropout; its draws depend on the stack
        return in_flushed_thread(train)


@dataclass
class _Fate:
    """Findings about a cell during its training."""

    seconds: float = 0.0
    certain: str | None = None
    certain_at: int | None = None

    def seal(self, reason: str | None, step: int) -> None:
        """Record the first reason why the cell is certain to fail, if there is one."""
        if self.certain is None and reason is not None:
            self.certain, self.certain_at = reason, step


def _train(
    cells: Sequence[Cell],
    early_stop: bool,
    after_step: Callable[[int], None],
    prepare: Callable[[Cell, nn.Module], None],
    alike: float,
) -> list[Result]:
    subjects = {seed: loaded(cell) for seed, cell in {cell.seed: cell for cell in cells}.items()}
    trials = stack_of(cells, subjects, prepare)
    anatomy = anatomy_of(subjects[cells[0].seed])
    fates = [_Fate() for _ in cells]
    for step in range(1, cells[0].config.trial.steps + 1):
        if not trials.live:
            break
        began = time.perf_counter()
        live = list(trials.live)
        trials.advance()
        for k in live:
            fate = fates[k]
            if k not in trials.live:
                fate.seal("the loss is not finite", step)
            elif step % EVERY == 0 and fate.certain is None:
                seen = diversity(subjects[cells[k].seed], anatomy, trials.models[k])
                fate.seal(all_alike(seen, alike), step)
            if early_stop and fate.certain is not None:
                trials.drop(k)
        for k in live:
            fates[k].seconds += (time.perf_counter() - began) / len(live)
        after_step(step)
    return [
        _result(losses, fate, entropy_of(subjects[cell.seed]), early_stop, len(cells))
        for cell, losses, fate in zip(cells, trials.losses, fates, strict=True)
    ]


def _result(losses: list[float], fate: _Fate, entropy: float, early_stop: bool, stack: int) -> Result:
    stopped = early_stop and fate.certain is not None
    trained = not stopped and trains(losses, entropy)
    return Result(
        losses=tuple(losses),
        unigram_entropy=entropy,
        verdict="trains" if trained else "fails",
        certain_at=fate.certain_at,
        certain=fate.certain,
        stopped=stopped,
        seconds=fate.seconds,
        stack=stack,
        versions={
            "normscope": normscope.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )


def loaded(cell: Cell) -> Subject:
    """The cell's model and batches.

    Raises:
        UsageError: the model has no loss, or no unigram entropy to compare it with.
    """
    subject = cell.config.subject()
    if subject.loss_fn is None:
        raise UsageError(f"model {cell.config.model!r}", "a model with a loss", "give its factory a loss_fn")
    entropy_of(subject)
    return subject


def entropy_of(subject: Subject) -> float:
    """Unigram entropy of the subject's targets, in nats; UsageError if there is none."""
    if subject.unigram_entropy is None:
        raise UsageError(
            f"model {subject.spec!r}, whose targets are not tokens",
            "token targets, whose unigram entropy the criterion for a trained run needs",
            "map a model of text",
        )
    return subject.unigram_entropy


def stack_of(
    cells: Sequence[Cell],
    subjects: dict[int, Subject],
    prepare: Callable[[Cell, nn.Module], None] = lambda cell, model: None,
) -> Trials:
    """The cells' trials, before their first step."""
    first = subjects[cells[0].seed]
    models = [copy.deepcopy(subjects[cell.seed].model) for cell in cells]
    for cell, model in zip(cells, models, strict=True):
        prepare(cell, model)
    batches = [subjects[cell.seed].batches() for cell in cells]
    configs = [cell.config.trial for cell in cells]
    return many_trials(models, batches, lambda model, batch: first.loss(batch, model), configs)
