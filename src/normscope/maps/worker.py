"""A worker process of the local engine: claims crews and trains them until none waits.

Started by `maps.local`, which reads its exit status: 0 all is well, 3 the store or the cells cannot be used
(one line on stderr says why), anything else is a crash.
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
    """Raised between two steps: the keeper asked for it, or is gone."""


@dataclass
class Worker:
    """Worker process: its settings, and whether it was asked to stop.

    Attributes:
        path: path of the store.
        name: name under which it holds cells.
        keeper: the process that started it and watches it; None where there is none.
        early_stop: whether cells that are certain to fail are stopped.
    """

    path: Path
    name: str
    keeper: int | None
    early_stop: bool
    is_stopping: bool = False
    beaten: float = field(default=0.0)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Come to an end after this step."""
        self.is_stopping = True

    @property
    def must_leave(self) -> bool:
        """True if nobody waits for the results any more."""
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
                except Exception as error:  # whatever a model can throw: the map goes on without the cell
                    store.crash(owner, describe(error))
                else:
                    store.finish(owner, crew, results)


def main(arguments: list[str]) -> int:
    """Work for the keeper; the exit status."""
    path, name, keeper, early_stop = arguments
    worker = Worker(Path(path), name, int(keeper), early_stop == "early-stop")
    signal.signal(signal.SIGTERM, worker.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the keeper's, which asks us to stop
    import torch

    from normscope.errors import UsageError

    torch.set_num_threads(1)
    try:
        worker.work()
    except UsageError as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0
