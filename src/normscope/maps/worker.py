"""A worker process of the local engine, which claims and trains crews until none waits.

`maps.local` starts it and reads its exit status: 0 is success; 3 means that the store or the cells cannot be
used (one line on stderr has the reason); anything else is a crash.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

REFUSED = 3
BEAT_SECONDS = 1.0


class _Leave(Exception):
    """The keeper asked to stop, or is gone; raised between two steps."""


@dataclass
class Worker:
    """Worker process: its settings, and whether it was asked to stop.

    Attributes:
        path: path of the store.
        name: name under which it holds cells.
        keeper: the process that started it and watches it; None if there is none.
        early_stop: whether to stop cells that are certain to fail.
    """

    path: Path
    name: str
    keeper: int | None
    early_stop: bool
    is_stopping: bool = False
    beaten: float = field(default=0.0)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Stop after the current step."""
        self.is_stopping = True

    @property
    def must_leave(self) -> bool:
        """True if it was asked to stop, or its keeper is gone."""
        return self.is_stopping or self.keeper not in (None, os.getppid())

    def work(self) -> None:
        """Train crews until none waits.

        Raises:
            UsageError: the store cannot be used, or a cell cannot be trained at all.
        """
        from normscope.errors import UsageError, describe
        from normscope.maps.owner import Owner, Process
        from normscope.maps.store import Store
        from normscope.maps.training import train_group

        me = Process.of(os.getpid())
        owner = Owner(me, me if self.keeper is None else Process.of(self.keeper), id=self.name)
        with Store(self.path) as store:

            def on_step(step: int) -> None:
                if self.must_leave:
                    raise _Leave
                if time.monotonic() - self.beaten > BEAT_SECONDS:
                    self.beaten = time.monotonic()
                    store.beat(owner, step)

            while not self.must_leave and (crew := store.claim(owner)):
                try:
                    results = train_group(crew.cells, early_stop=self.early_stop, on_step=on_step)
                except _Leave:
                    store.release(owner)
                except UsageError:
                    store.release(owner)
                    raise
                except Exception as error:  # a model may raise anything; the map continues without the cell
                    store.crash(owner, describe(error))
                else:
                    store.finish(owner, crew, results)


def main(arguments: list[str]) -> int:
    """Run the worker; return the exit status."""
    path, name, keeper, early_stop = arguments
    worker = Worker(Path(path), name, int(keeper), early_stop == "early-stop")
    signal.signal(signal.SIGTERM, worker.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the keeper handles Ctrl-C and asks workers to stop
    import torch

    from normscope.errors import UsageError

    torch.set_num_threads(1)
    try:
        worker.work()
    except UsageError as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0
