"""Preparation of a run: model, folder, checkpoint."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from normscope.errors import UsageError
from normscope.subjects import Subject
from normscope.subjects.rng import seeded
from normscope.train.folder import RunFolder
from normscope.train.processes import Processes
from normscope.train.recipe import Every
from normscope.train.run import Run
from normscope.train.run_config import RunConfig
from normscope.train.trial import Observer, Trial, endless


@contextlib.contextmanager
def prepared(
    config: RunConfig,
    *,
    folder: Path | None = None,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    processes: Processes | None = None,
) -> Iterator[Run]:
    """Give a run that is ready to `go`; the caller's global generators are restored after the block.

    Args:
        folder: folder of the run, see `RunFolder`; None writes nothing.
        resume: continue from the last checkpoint in `folder`; start if there is none.
        observers: called with the trial after each step.
        processes: processes that train together; one by default.

    Raises:
        UsageError: the model, the data, the folder or the checkpoint cannot be used.
    """
    processes = processes or Processes()
    place = None if folder is None else RunFolder(folder)
    if place is not None and processes.is_first:
        place.require_free(resume=resume)  # before the slow build of the model
    with contextlib.ExitStack() as stack:
        tokens = place.tokens if place is not None else Path(stack.enter_context(TemporaryDirectory()))
        subject = config.subject(processes.device(config.device), tokens)
        if subject.loss_fn is None:
            do = "return one from the factory"
            raise UsageError(f'model "{config.model}" without a loss', "a loss to train on", do)
        stack.enter_context(seeded(config.trial.seed))
        trial = _trial(config, subject, observers, processes)
        run = Run(config, subject, trial, processes, place, Every.parse(config.checkpoint_every))
        if processes.size > 1:
            trial.shared_loss = run.share_loss
        if place is not None:
            processes.means([0.0])  # wait: `claimed` removes token files that others may still be writing
            if processes.is_first:
                stack.enter_context(
                    place.claimed(resume=resume)
                )  # a run that fails before this leaves no folder
            if resume and (state := place.checkpoints.read()) is not None:
                run.resume(state)
            if place.checkpoints.warning is not None:
                run.notes.append(place.checkpoints.warning)
            if processes.is_first:
                place.begin(config, [run.figures(n) for n in range(trial.step)], run.validations)
        yield run


def _trial(config: RunConfig, subject: Subject, observers: Sequence[Observer], processes: Processes) -> Trial:
    if not subject.model.training:
        subject.model.train()
    model = processes.wrapped(subject)
    torch.manual_seed(config.trial.seed + processes.rank)  # each process draws its own dropout
    return Trial(
        model,
        endless(subject.batches),
        lambda model, batch: processes.loss(subject, model, batch),
        config.trial,
        observers=observers,
        keeps_norms=True,
    )
