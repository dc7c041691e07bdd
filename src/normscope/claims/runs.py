"""`Runs`: trained runs that several claims look at, each trained once."""

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from normscope.maps import Cell, Result, train_group
from normscope.train import RunConfig
from normscope.train.atomic import write_text

STACK = 10
"""Runs trained together; larger stacks are no faster on two cores."""


class Runs:
    """Trained runs, in a folder or, without one, in memory.

    Args:
        folder: where results are kept, a file each; claims in other processes share it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._memory: dict[str, Result] = {}

    def of(self, configs: Sequence[RunConfig]) -> list[Result]:
        """The results of `configs`, in their order; those that are not there are trained, to the end."""
        cells = [Cell(config) for config in configs]
        for shape in dict.fromkeys(cell.shape for cell in cells):
            self._train([cell for cell in dict.fromkeys(cells) if cell.shape == shape])
        return [self._memory[cell.key] for cell in cells]

    def _train(self, cells: Sequence[Cell]) -> None:
        """Train those of one shape that are missing. A second process that wants the same ones waits."""
        with self._held(cells[0].shape):
            missing = [cell for cell in cells if not self._is_there(cell)]
            for first in range(0, len(missing), STACK):
                stack = missing[first : first + STACK]
                for cell, result in zip(stack, train_group(stack, early_stop=False), strict=True):
                    self._keep(cell, result)

    def _is_there(self, cell: Cell) -> bool:
        if cell.key in self._memory:
            return True
        path = self._path(cell)
        if path is None:
            return False
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            self._memory[cell.key] = Result(**values | {"losses": tuple(values["losses"])})
        except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole
            return False
        return True

    def _keep(self, cell: Cell, result: Result) -> None:
        self._memory[cell.key] = result
        path = self._path(cell)
        if path is not None:
            with contextlib.suppress(OSError):  # a full disk: then it is in memory only
                write_text(path, json.dumps(dataclasses.asdict(result)))

    def _path(self, cell: Cell) -> Path | None:
        return None if self.folder is None else self.folder / f"{cell.key}.json"

    @contextmanager
    def _held(self, shape: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.folder is not None:
                with contextlib.suppress(OSError):  # a full disk: then others train it too
                    self.folder.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context((self.folder / f"{shape}.lock").open("w"))
                    fcntl.flock(file, fcntl.LOCK_EX)  # let go with the file, also by a kill
            yield
