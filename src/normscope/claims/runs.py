"""`Runs`: trained runs that several claims share, each trained once."""

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

from normscope.atomic import write_text
from normscope.forecast.thresholds import SUNK
from normscope.maps import Cell, Result, train_group
from normscope.train import RunConfig

STACK = 20
"""Runs trained together, at most; larger stacks are hardly faster."""
NOISE = 1e-7
"""Relative size of a replica's perturbation: about one rounding of float32."""


def perturb(cell: Cell, model: nn.Module, *, replica: int) -> None:
    """Multiply each weight by 1 + 1e-7 × a normal draw; replica 0 is left as it is."""
    if replica:
        generator = torch.Generator().manual_seed(1_000_003 * replica + cell.seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + NOISE * torch.randn(weight.shape, generator=generator))


def _key(cell: Cell, replica: int) -> str:
    return f"{cell.key}-{replica}" if replica else cell.key


class Runs:
    """Trained runs, in a folder or, without one, in memory.

    Args:
        folder: where results are kept, a file each; claims in other processes share it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._memory: dict[str, Result] = {}

    def of(self, configs: Sequence[RunConfig], replica: int = 0) -> list[Result]:
        """The results of `configs`, in their order; those that are not there are trained, to the end.

        Args:
            replica: see `Setup.train`.
        """
        cells = [Cell(config) for config in configs]
        by_shape: dict[str, list[Cell]] = {}
        for cell in dict.fromkeys(cells):
            by_shape.setdefault(cell.shape, []).append(cell)
        stacks = list(by_shape.values())
        for wait in (False, True):  # what another process trains now comes last
            stacks = [each for each in stacks if not self._train(each, replica, wait=wait)]
        return [self._memory[_key(cell, replica)] for cell in cells]

    def _train(self, cells: Sequence[Cell], replica: int, *, wait: bool) -> bool:
        """Train those of one shape that are missing; False where another process is at it, unless we wait."""
        if all(self._is_there(_key(cell, replica)) for cell in cells):
            return True
        with self._held(cells[0].shape, wait=wait) as is_ours:
            if not is_ours:
                return False
            missing = [cell for cell in cells if not self._is_there(_key(cell, replica))]
            for first in range(0, len(missing), STACK):
                stack = missing[first : first + STACK]
                change = partial(perturb, replica=replica)
                results = train_group(stack, early_stop=False, prepare=change, alike=SUNK)
                for cell, result in zip(stack, results, strict=True):
                    self._keep(_key(cell, replica), result)
        return True

    def _is_there(self, key: str) -> bool:
        if key not in self._memory and self.folder is not None:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not there, or not whole
                values = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
                self._memory[key] = Result(**values | {"losses": tuple(values["losses"])})
        return key in self._memory

    def _keep(self, key: str, result: Result) -> None:
        self._memory[key] = result
        if self.folder is not None:
            with contextlib.suppress(OSError):  # a full disk: then it is in memory only
                write_text(self.folder / f"{key}.json", json.dumps(dataclasses.asdict(result)))

    @contextmanager
    def _held(self, shape: str, *, wait: bool) -> Iterator[bool]:
        """Alone with a shape; whether we are."""
        is_ours = True
        with contextlib.ExitStack() as stack:
            try:
                if self.folder is not None:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context((self.folder / f"{shape}.lock").open("w"))
                    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))  # let go with the file
            except BlockingIOError:
                is_ours = False
            except OSError:  # a full disk: then others train it too
                pass
            yield is_ours
