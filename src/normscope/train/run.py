"""One training run: steps, validation, checkpoints, and continuation after a kill."""

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
from normscope.train.criterion import LAST, outcome
from normscope.train.folder import Figures, RunFolder, Validations, require_same
from normscope.train.processes import Processes
from normscope.train.recipe import Every
from normscope.train.run_config import RunConfig
from normscope.train.schedule import rate_factor
from normscope.train.state import State, put_state, take_state
from normscope.train.thread import Stopped, in_flushed_thread
from normscope.train.trial import Trial

VALIDATIONS = 10
"""Default number of validation losses in a run."""

BATCHES = 8
"""Number of validation batches, always the same ones, whose mean loss is taken."""


@dataclass
class Run:
    """A run in progress; observers may read all of it between two steps.

    Attributes:
        config: settings of the run.
        subject: model, batches and loss.
        trial: the trial that takes the steps.
        processes: processes that train together.
        folder: folder of the run; None writes nothing.
        validations: validation losses so far.
        notes: remarks for the reader of the result.
        began_at: step of the checkpoint that the run continued from; 0 for a new run.
        seconds: time that this process spent in steps, in seconds.
        interrupted: whether Ctrl-C ended the run.
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
        """See `criterion.outcome`; None if no unigram entropy is known."""
        entropy = self.subject.unigram_entropy
        return None if entropy is None else outcome(self.trial.losses, entropy)

    @property
    def trained(self) -> bool | None:
        """True if the run trained; None if no unigram entropy is known."""
        return None if self.outcome is None else self.outcome == "trained"

    @property
    def validate_every(self) -> int:
        """Steps between two validation losses."""
        return self.config.validate_every or max(1, self.config.trial.steps // VALIDATIONS)

    @property
    def hopeless(self) -> bool:
        """True if none of the last losses is finite, so that no later one will be."""
        last = self.trial.losses[-LAST:]
        return len(last) == LAST and not any(map(math.isfinite, last))

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of the steps alone, over all processes; None without steps or without ids."""
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
            if not self.validations:  # the first validation is before the first step
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
        """The mean loss of all processes; the same exchange shares what each process will do next."""
        mean, *wishes = self.processes.means([loss, *map(float, self._wishes())])
        stop, is_late = (share > 0 for share in wishes)
        self._agreed = (stop, is_late)
        return mean

    def _is_due(self) -> bool:
        """True if a checkpoint is due by the step, which is the same in all processes."""
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
        """Fingerprint of the data: a hash of the first batch, and the unigram entropy of the whole text."""
        entropy = self.subject.unigram_entropy
        return f"{fingerprint([self.subject.batch])} {'' if entropy is None else f'{entropy:.10f}'}"

    def resume(self, state: State) -> None:
        """Continue from a checkpoint, bit by bit the same if the numbers of processes and threads are.

        Raises:
            UsageError: the checkpoint has another config, model or text.
        """
        require_same(self.config, state)
        if state.values["data"] != self._data():
            raise UsageError(
                f"data that differ from the checkpoint's ({self.subject.input})",
                "the data that the run began with",
                "restore the data, or start a new run",
            )
        put_state(self.trial, self.trial.bare_model, state)
        self.began_at = self.trial.step
        self.validations[:] = [(s, math.nan if v is None else v) for s, v in state.values["validations"]]
        taken = self.trial.step * self.config.trial.accumulation
        self.trial.batches = self.subject.batches(taken)
        prefix = f"random.{self.processes.rank}."
        own = {k.removeprefix(prefix): v for k, v in state.tensors.items() if k.startswith(prefix)}
        if own:  # a process that the checkpoint did not have keeps its fresh generators
            put_random_state(own)


def validation_loss(subject: Subject, trial: Trial, processes: Processes) -> float | None:
    """Mean loss on the validation data, in eval mode and the trial's precision; None without such data.

    The state of the trial is not changed.
    """
    if subject.validation is None:
        return None
    with torch.no_grad(), generators_kept(), resting(trial.model):
        losses = [float(trial.evaluated(batch)) for batch in itertools.islice(subject.validation(), BATCHES)]
    return processes.means([sum(losses) / len(losses)])[0]
