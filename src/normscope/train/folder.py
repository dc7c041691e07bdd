"""The folder of a run: `config.toml`, `losses.jsonl`, `checkpoints/`, at the end `model/` and `run.html`."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from normscope.atomic import disk_refusals, remove_halves, write_text
from normscope.errors import UsageError
from normscope.train.checkpoints import Checkpoints
from normscope.train.run_config import RunConfig
from normscope.train.schedule import rate_factor
from normscope.train.state import State

CONFIG = "config.toml"
PAGE = "run.html"
SCHEMA = "normscope.losses/1"
"""Name of the JSON Schema of each line of `losses.jsonl`."""
_CADENCE = ("validate_every", "checkpoint_every")
_MAY_CHANGE = ("steps", "device", *_CADENCE, "text", "source", "target")
"""Keys that may change when a run is resumed; data are compared by fingerprint, not by path."""


Validations = list[tuple[int, float]]
"""(steps taken, validation loss)."""

Figures = Mapping[str, float]

GO_ON = "free space or choose another folder, then continue with --resume"


class RunFolder:
    """Folder of a run: its config, checkpoints, losses, model and tokens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints")
        self.history = History(path / "losses.jsonl")
        self.model = path / "model"
        self.tokens = path / "tokens"

    @contextlib.contextmanager
    def claimed(self, *, resume: bool) -> Iterator[None]:
        """Lock the folder for this process, and remove unfinished files of a killed run.

        Raises:
            UsageError: the folder holds a run and `resume` is false, another process is writing, or the
                folder cannot be written.
        """
        self.require_free(resume=resume)
        with disk_refusals(f'folder "{self.path}"', "choose another with --output"):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        with lock:
            try:
                fcntl.flock(
                    lock, fcntl.LOCK_EX | fcntl.LOCK_NB
                )  # the kernel releases it when the process ends
            except BlockingIOError as error:
                raise UsageError(
                    f'folder "{self.path}", which another process is training in',
                    "one process at a time",
                    "wait for it, or choose another folder with --output",
                ) from error
            with disk_refusals(f'folder "{self.path}"', GO_ON):
                for folder in (self.path, self.tokens, self.model, self.checkpoints.folder):
                    remove_halves(folder)
            try:
                yield
            finally:
                self.history.close()

    def begin(self, config: RunConfig, steps: Sequence[Figures], validations: Validations) -> None:
        """Write the config, and the figures of the steps so far."""
        with disk_refusals(f'folder "{self.path}"', GO_ON):
            write_text(self.path / CONFIG, config.to_toml())
        self.history.start(steps, validations)

    def require_free(self, *, resume: bool) -> None:
        """Raise UsageError if the folder holds a run and `resume` is false, or if the path is a file."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f'"{self.path}", a file', "a folder", "choose another with --output")
        has_run = (self.path / CONFIG).exists() or self.checkpoints.last_step() is not None
        if has_run and not resume:
            raise UsageError(
                f'folder "{self.path}", which holds a run',
                "a new folder",
                "continue it with --resume, or choose another folder with --output",
            )


class History:
    """The file of losses of a run.

    A line is either `{"step": n, "loss": x, "lr": r, "gradient_norm": g}`: the loss before step n (from 0),
    its learning rate and the norm of its gradients before clipping; or `{"step": n, "validation": x}`: the
    validation loss after n steps. A figure that is not finite is null.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None

    def start(self, steps: Sequence[Figures], validations: Validations) -> None:
        """Replace the content by these figures, also if a killed run has appended others."""
        lines = [(step, 1, _line(step, figures)) for step, figures in enumerate(steps)]
        lines += [(step, 0, _line(step, {"validation": loss})) for step, loss in validations]
        with disk_refusals(f'"{self.path}"', GO_ON):
            write_text(self.path, "".join(line for *_, line in sorted(lines)))
            self._file = FileIO(self.path, "a")

    def append(self, step: int, figures: Figures) -> None:
        """Append a line, unbuffered."""
        assert self._file is not None, "start first"
        with disk_refusals(f'"{self.path}"', GO_ON):
            self._file.write(_line(step, figures).encode())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _line(step: int, figures: Figures) -> str:
    finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    return json.dumps({"step": step, **finite, "schema": SCHEMA}) + "\n"


def require_same(config: RunConfig, state: State) -> None:
    """Raise UsageError if the steps of the checkpoint depend on a setting that `config` changes."""
    then, now = state.values["config"], config.to_dict()
    for key in now:
        if key not in _MAY_CHANGE and then.get(key) != now[key]:
            raise _changed(key, then.get(key), now[key])
    if config.trial.steps < state.values["step"]:
        raise _changed("steps", state.values["step"], config.trial.steps)
    before = dataclasses.replace(config.trial, steps=then["steps"])
    if any(rate_factor(before, n) != rate_factor(config.trial, n) for n in range(state.values["step"])):
        raise _changed("steps", then["steps"], config.trial.steps)


def _changed(key: str, then: Any, now: Any) -> UsageError:
    return UsageError(
        f"{key.replace('_', '-')} = {now!r} for a checkpoint of {then!r}",
        "the config of the run",
        "leave the option out, or choose another folder with --output",
    )


def default_folder(config: RunConfig, name: str | None = None) -> Path:
    """The folder `runs/NAME-HASH`; the hash depends on the config, but not on its number of steps."""
    values = {k: v for k, v in config.identity().items() if k not in ("steps", *_CADENCE)}
    digest = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:8]
    slug = re.sub(r"[^\w.=]+", "-", name or config.model).strip("-")[:60]
    return Path("runs") / f"{slug}-{digest}"
