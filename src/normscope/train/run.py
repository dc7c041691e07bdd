"""One run from its config to its end: trained, watched, kept on disk, and gone on with after a kill."""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from normscope.errors import UsageError
from normscope.nn.generate import resting
from normscope.subjects import Subject
from normscope.subjects.feed import fingerprint
from normscope.subjects.rng import generators_kept, put_random_state, take_random_state
from normscope.train.batches import num_ids
from normscope.train.config import Every
from normscope.train.criterion import LAST, outcome
from normscope.train.folder import Figures, RunFolder, Validations, require_same
from normscope.train.processes import Processes
from normscope.train.run_config import RunConfig
from normscope.train.schedule import rate_factor
from normscope.train.state import State, put_state, take_state
from normscope.train.thread import Stopped, in_flushed_thread
from normscope.train.trial import Trial

VALIDATIONS = 10
"""Number of validation losses of a run by default."""

BATCHES = 8
"""Validation batches whose mean loss is taken, always the same ones."""


@dataclass
class Run:
    """A run under way; observers may look at all of it between two steps.

    Attributes:
        config: its settings.
        subject: its model, batches and loss.
        trial: takes the steps.
        processes: processes that train together.
        folder: folder of the run; None keeps nothing.
        validations: validation losses so far.
        notes: remarks for the reader of the result.
        began_at: the step of the checkpoint that was gone on from; 0 for a new run.
        seconds: spent in steps by this process.
        interrupted: whether Ctrl-C ended it.
    """

    config: RunConfig
    subject: Subject
    trial: Trial
    processes: Processes
    folder: RunFolder | None
    every: Every
    validations: Validations = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    began_at: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    _failure: UsageError | None = None
    _wishes: Callable[[], tuple[bool, bool]] = lambda: (False, False)
    _agreed: tuple[bool, bool] = (False, False)
    _saved: float = field(default_factory=time.monotonic)

    @property
    def outcome(self) -> str | None:
        """See `criterion.outcome`; None where no unigram entropy is known."""
        entropy = self.subject.unigram_entropy
        return None if entropy is None else outcome(self.trial.losses, entropy)

    @property
    def trained(self) -> bool | None:
        """True if the run trained; None where no unigram entropy is known."""
        return None if self.outcome is None else self.outcome == "trained"

    @property
    def validate_every(self) -> int:
        """Steps from one validation loss to the next."""
        return self.config.validate_every or max(1, self.config.trial.steps // VALIDATIONS)

    @property
    def hopeless(self) -> bool:
        """True if the last losses are all not finite: no later one will be finite."""
        last = self.trial.losses[-LAST:]
        return len(last) == LAST and not any(map(math.isfinite, last))

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of the steps alone, over all processes; None without a step or without ids."""
        steps = self.trial.step - self.began_at
        tokens = num_ids(self.subject.batch)
        if tokens is None or steps == 0:
            return None
        return tokens * self.config.trial.accumulation * steps / self.seconds

    def go(self) -> None:
        """Train to the end.

        Raises:
            KeyboardInterrupt: after a checkpoint was written.
            UsageError: the disk is full.
        """
        try:
            in_flushed_thread(self._loop)
        except KeyboardInterrupt:
            self.interrupted = True
            if self._failure is not None:
                raise self._failure from None
            raise

    def _loop(self, checkpoint: Callable[[], None]) -> None:
        self.processes.take_device()

        def is_stopped() -> bool:
            try:
                checkpoint()
            except Stopped:
                return True
            return False

        self._wishes = lambda: (is_stopped(), self._is_late())
        try:
            if not self.validations:  # the first of them is before the first step
                self._validate()
            while self.trial.step < self.config.trial.steps and not self.hopeless:
                stop, is_late = self._wishes() if self.processes.size == 1 else self._agreed
                if stop or is_late or self._is_due():
                    self.save()
                if stop:
                    self.interrupted = True
                    return
                self._step()
            self.save()
        except UsageError as failure:
            self._failure = failure
            raise

    def _step(self) -> None:
        start = time.perf_counter()
        self.trial.advance()
        self.seconds += time.perf_counter() - start
        step = self.trial.step
        if self.folder is not None and self.processes.is_first:
            self.folder.history.append(step - 1, self.figures(step - 1))
        if step % self.validate_every == 0 or step == self.config.trial.steps:
            self._validate()

    def _validate(self) -> None:
        loss = validation_loss(self.subject, self.trial, self.processes)
        if loss is None:
            return
        self.validations.append((self.trial.step, loss))
        if self.folder is not None and self.processes.is_first:
            self.folder.history.append(self.trial.step, {"validation": loss})

    def figures(self, step: int) -> Figures:
        """Figures of a step that `losses.jsonl` records."""
        config = self.config.trial
        figures = {"loss": self.trial.losses[step], "lr": config.lr * rate_factor(config, step)}
        return figures | {"gradient_norm": self.trial.gradient_norms[step]}

    def share_loss(self, loss: float) -> float:
        """The mean loss of all processes; what each of them wants to do next goes with it."""
        mean, *wishes = self.processes.means([loss, *map(float, self._wishes())])
        stop, is_late = (share > 0 for share in wishes)
        self._agreed = (stop, is_late)
        return mean

    def _is_due(self) -> bool:
        """True if a checkpoint is due by its step, which all processes know alike."""
        new = self.trial.step != self.began_at
        return self.every.steps is not None and new and self.trial.step % self.every.steps == 0

    def _is_late(self) -> bool:
        """True if a checkpoint is due by this process's clock."""
        return self.every.seconds is not None and time.monotonic() - self._saved >= self.every.seconds

    def save(self) -> None:
        """Write a checkpoint. Every process calls this at the same step."""
        if self.folder is None:
            return
        state = self._state()
        if self.processes.is_first:
            self.folder.checkpoints.save(state)
        self._saved, self._agreed = time.monotonic(), (False, False)

    def _state(self) -> State:
        state = take_state(self.trial, self.trial.bare_model, is_kept=self.processes.is_first)
        for name, tensor in take_random_state().items():
            for rank, each in enumerate(self.processes.gathered(tensor)):
                state.tensors[f"random.{rank}.{name}"] = each
        finite = [(step, loss if math.isfinite(loss) else None) for step, loss in self.validations]
        values = {"config": self.config.to_dict(), "data": self._data(), "validations": finite}
        return State(state.tensors, state.values | values)

    def _data(self) -> str:
        """The first batch, and by its entropy the whole text."""
        entropy = self.subject.unigram_entropy
        return f"{fingerprint([self.subject.batch])} {'' if entropy is None else f'{entropy:.10f}'}"

    def resume(self, state: State) -> None:
        """Go on from a checkpoint, to the bit where the number of processes and threads is the same.

        Raises:
            UsageError: it is of another config, model or text.
        """
        require_same(self.config, state)
        if state.values["data"] != self._data():
            raise UsageError(
                "other data than that of the checkpoint",
                f"the same text ({self.subject.input})",
                "bring the text back as it was, or start a new run",
            )
        put_state(self.trial, self.trial.bare_model, state)
        self.began_at = self.trial.step
        self.validations[:] = [(s, math.nan if v is None else v) for s, v in state.values["validations"]]
        taken = self.trial.step * self.config.trial.accumulation
        self.trial.batches = self.subject.batches(taken)
        prefix = f"random.{self.processes.rank}."
        own = {k.removeprefix(prefix): v for k, v in state.tensors.items() if k.startswith(prefix)}
        if own:  # a process more than the checkpoint had keeps its fresh generators
            put_random_state(own)


def validation_loss(subject: Subject, trial: Trial, processes: Processes) -> float | None:
    """Mean loss on the validation data, in eval mode and the trial's precision; None without such data.

    The state of the trial is left as it was.
    """
    if subject.validation is None:
        return None
    with torch.no_grad(), generators_kept(), resting(trial.model):
        losses = [float(trial.evaluated(batch)) for batch in itertools.islice(subject.validation(), BATCHES)]
    return processes.means([sum(losses) / len(losses)])[0]
