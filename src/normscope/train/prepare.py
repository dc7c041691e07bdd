"""Making a run ready to go: model, folder, checkpoint."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from normscope.errors import UsageError
from normscope.subjects import Subject
from normscope.subjects.rng import seeded
from normscope.train.folder import RunFolder
from normscope.train.processes import Processes
from normscope.train.run import VALIDATIONS, Every, Run
from normscope.train.run_config import RunConfig
from normscope.train.trial import Observer, Trial, endless


@contextlib.contextmanager
def prepared(
    config: RunConfig,
    *,
    folder: Path | None = None,
    resume: bool = False,
    every: Every | None = None,
    validate_every: int | None = None,
    observers: Sequence[Observer] = (),
    processes: Processes | None = None,
) -> Iterator[Run]:
    """A run that is ready to `go`; the global generators are its own inside, and the caller's again after.

    Args:
        folder: where it is kept, see `RunFolder`; None keeps nothing.
        resume: go on from the last checkpoint in `folder`, from the start where there is none.
        every: how often a checkpoint is written; 60 seconds by default.
        validate_every: steps; by default ten times in a run.
        observers: called with the trial after each step.
        processes: those that train together; one by default.

    Raises:
        UsageError: whatever cannot be used.
    """
    processes = processes or Processes()
    place = None if folder is None else RunFolder(folder)
    if place is not None and processes.is_first:
        place.require_free(resume=resume)  # before the model is built, which takes long
    subject = config.subject(processes.device(config.device))
    if subject.loss_fn is None:
        do = "return one from a factory"
        raise UsageError(f'model "{config.model}" without a loss', "a loss to train on", do)
    with seeded(config.trial.seed):
        run = Run(
            config,
            subject,
            _trial(config, subject, observers, processes),
            processes,
            place,
            every or Every(seconds=60.0),
            validate_every or max(1, config.trial.steps // VALIDATIONS),
        )
        with _claimed(place, processes, resume):  # a run that cannot be leaves no folder
            if place is not None:
                state = place.checkpoints.read() if resume else None
                if state is not None:
                    run.resume(state)
                if processes.is_first:
                    place.begin(config, run.trial.losses, run.validations)
            yield run


def _trial(config: RunConfig, subject: Subject, observers: Sequence[Observer], processes: Processes) -> Trial:
    if not subject.model.training:
        subject.model.train()
    model = processes.wrapped(subject)
    torch.manual_seed(config.trial.seed + processes.rank)  # dropout of its own in each process
    return Trial(
        model,
        endless(subject.batches),
        lambda model, batch: processes.loss(subject, model, batch),
        config.trial,
        config.trial.warmup,
        observers=observers,
        shared_loss=processes.mean if processes.size > 1 else None,
    )


def _claimed(
    place: RunFolder | None, processes: Processes, resume: bool
) -> contextlib.AbstractContextManager[None]:
    if place is None or not processes.is_first:
        return contextlib.nullcontext()
    return place.claimed(resume=resume)
