"""Checkpoints on disk: `step-N/` with `state.safetensors` and `state.json`, the last one only."""

import json
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from normscope.errors import UsageError, describe
from normscope.train.atomic import disk_refusals, remove_halves, write_folder
from normscope.train.state import State

FORMAT = 2
_TENSORS, _VALUES = "state.safetensors", "state.json"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in a folder. A new one is written beside the old one, which goes when it is there."""

    folder: Path

    def save(self, state: State) -> None:
        """Write `state`; a call that is cut short leaves the last one as it was.

        Raises:
            UsageError: the disk is full, or the folder cannot be written.
        """
        step = state.values["step"]
        last = self.last_step()
        kept = "there is none yet" if last is None else f"that of step {last} is whole"
        do = f"make room, or choose another folder, and go on with --resume: {kept}"
        if last == step:
            return
        with disk_refusals(f'checkpoint of step {step} in "{self.folder}"', do):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_folder(self._of(step), lambda folder: _fill(folder, state))
            for path in self._all():
                if path != self._of(step):
                    shutil.rmtree(path)

    def last_step(self) -> int | None:
        """Steps taken at the last checkpoint."""
        return max((int(path.name.removeprefix("step-")) for path in self._all()), default=None)

    def clean(self) -> None:
        """Take away what a killed writer has left."""
        if self.folder.is_dir():
            remove_halves(self.folder)

    def read(self) -> State | None:
        """The last one; None where there is none.

        Raises:
            UsageError: it is of another version, or damaged.
        """
        step = self.last_step()
        return None if step is None else _read(self._of(step))

    def _of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _all(self) -> list[Path]:
        return [path for path in self.folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]


def _fill(folder: Path, state: State) -> None:
    save_file(state.tensors, folder / _TENSORS)
    values = {"format": FORMAT, **state.values}
    text = json.dumps(values | {"crc32": _checksum(folder, values)}, indent=1)
    (folder / _VALUES).write_text(text + "\n", encoding="utf-8")


def _checksum(folder: Path, values: Mapping[str, Any]) -> int:
    """Of the values and the file of tensors: a flipped bit would go on as another run, without a word."""
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
    if not isinstance(values, Mapping) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, Mapping) else None
        raise UsageError(
            f'checkpoint "{folder}" of format {found!r}',
            f"format {FORMAT}",
            f"take its own normscope, or {do}",
        )
    try:
        tensors: dict[str, Tensor] = load_file(folder / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise UsageError(f'"{folder / _TENSORS}" ({describe(error)})', "a safetensors file", do) from error
    if values.get("crc32") != _checksum(folder, values):
        raise UsageError(f'checkpoint "{folder}", which is damaged', "the bytes that were written", do)
    # Copied: nothing of the run may hang on the file's mapping.
    return State({name: torch.clone(tensor) for name, tensor in tensors.items()}, dict(values))
