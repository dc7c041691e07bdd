"""Checkpoints on disk: `step-N/` with `state.safetensors` and `state.json`, the last two."""

import json
import shutil
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from normscope.atomic import disk_refusals, write_folder
from normscope.errors import UsageError, describe
from normscope.train.state import State

FORMAT = 2
_TENSORS, _VALUES = "state.safetensors", "state.json"


@dataclass
class Checkpoints:
    """The last two checkpoints in a folder. The oldest is removed after a new one is written.

    Attributes:
        folder: folder of the checkpoints.
        known: step of the last checkpoint that was written or read here without damage.
        warning: warning of the last read.
    """

    folder: Path
    known: int | None = None
    warning: str | None = None

    def save(self, state: State) -> None:
        """Write `state`; an interrupted call leaves the last checkpoint intact.

        Raises:
            UsageError: the disk is full, or the folder cannot be written.
        """
        step = state.values["step"]
        last = self.last_step()
        kept = "no checkpoint exists yet" if last is None else f"the checkpoint of step {last} is intact"
        do = f"free space or choose another folder, then continue with --resume ({kept})"
        if self.known == step:
            return
        with disk_refusals(f'checkpoint of step {step} in "{self.folder}"', do):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_folder(self._of(step), lambda folder: _fill(folder, state))
            self.known = step
            before = [other for other in self._steps() if other < step]
            for other in self._steps():
                if other not in (step, *before[:1]):  # later ones belong to an abandoned run
                    shutil.rmtree(self._of(other))

    def last_step(self) -> int | None:
        """Step of the last checkpoint."""
        return next(iter(self._steps()), None)

    def read(self) -> State | None:
        """Read the last undamaged checkpoint and warn about damaged ones; None if there are no checkpoints.

        Raises:
            UsageError: all checkpoints are damaged, or have another format.
        """
        damage: UsageError | None = None
        for step in self._steps():
            try:
                state = _read(self._of(step))
            except UsageError as error:
                damage = damage or error
                continue
            if damage is not None:
                self.warning = f"{damage.given}: continuing from the checkpoint of step {step}"
                warnings.warn(self.warning, stacklevel=2)
            self.known = step
            return state
        if damage is not None:
            raise damage
        return None

    def _of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _steps(self) -> list[int]:
        """Steps of the checkpoints in the folder, in descending order."""
        names = [path.name.removeprefix("step-") for path in self.folder.glob("step-*")]
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def _fill(folder: Path, state: State) -> None:
    save_file(state.tensors, folder / _TENSORS)
    values = {"format": FORMAT, **state.values}
    text = json.dumps(values | {"crc32": _checksum(folder, values)}, indent=1)
    (folder / _VALUES).write_text(text + "\n", encoding="utf-8")


def _checksum(folder: Path, values: Mapping[str, Any]) -> int:
    """Checksum of values and tensors; without it, a flipped bit would silently change the run."""
    found = zlib.crc32(json.dumps({k: v for k, v in values.items() if k != "crc32"}).encode())
    with (folder / _TENSORS).open("rb") as file:
        while chunk := file.read(1 << 20):
            found = zlib.crc32(chunk, found)
    return found


def _read(folder: Path) -> State:
    do = "start a new run in another folder"
    try:
        values: Any = json.loads((folder / _VALUES).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f'"{folder / _VALUES}" ({describe(error)})', "JSON", do) from error
    found = values.get("format") if isinstance(values, Mapping) else None
    if found != FORMAT:
        given = f'checkpoint "{folder}" of format {found!r}'
        raise UsageError(given, f"format {FORMAT}", f"use the normscope that wrote it, or {do}")
    try:
        tensors: dict[str, Tensor] = load_file(folder / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise UsageError(f'"{folder / _TENSORS}" ({describe(error)})', "a safetensors file", do) from error
    if values.get("crc32") != _checksum(folder, values):
        raise UsageError(f'checkpoint "{folder}", which is damaged', "the bytes that were written", do)
    # Copies: the run must not depend on the file's mapping.
    return State({name: torch.clone(tensor) for name, tensor in tensors.items()}, dict(values))
