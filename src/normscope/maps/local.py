"""The local engine: worker processes of one thread each, watched by this process, which does not train."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO

from normscope.errors import NormscopeError, UsageError
from normscope.maps.owner import Owner, Process
from normscope.maps.record import Counts
from normscope.maps.store import Store
from normscope.maps.worker import REFUSED

POLL_SECONDS = 0.25
SEARCH_SECONDS = 2.0  # between two searches for cells whose holder is gone
GRACE_SECONDS = 60.0  # time for a worker to finish its current step
_START = "import sys; from normscope.maps.worker import main; sys.exit(main(sys.argv[1:]))"
MOST_FALSE_STARTS = 3  # successive workers that died without a cell; more mean another problem


@dataclass
class WorkerProcess:
    """A worker process, with the name by which it holds cells."""

    process: subprocess.Popen
    owner: Owner
    stderr: IO[bytes] = field(repr=False)

    @property
    def last_line(self) -> str:
        """The last line on its stderr."""
        self.stderr.seek(0)
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def run_local(
    store: Store,
    *,
    workers: int,
    early_stop: bool = True,
    progress: Callable[[Counts], None] = lambda counts: None,
) -> None:
    """Train the waiting cells of `store` with `workers` processes, until every cell is done or crashed.

    Cells that another live process holds are waited for. On Ctrl-C or an error, the workers finish their
    current step and release their cells.

    Raises:
        UsageError: the store or a cell cannot be used.
    """
    with _pool(store, early_stop) as (pool, start):
        false_starts, searched = 0, -SEARCH_SECONDS
        while not (counts := store.counts()).is_finished:
            progress(counts)
            for worker in [worker for worker in pool if worker.process.poll() is not None]:
                pool.remove(worker)
                with worker.stderr:
                    false_starts = 0 if _reap(store, worker) else false_starts + 1
                    if false_starts >= MOST_FALSE_STARTS:
                        raise NormscopeError(f"workers do not start: {worker.last_line}")
            if time.monotonic() - searched > SEARCH_SECONDS:
                searched = time.monotonic()
                store.recover()
            if counts.waiting and len(pool) < workers:
                start()
            time.sleep(POLL_SECONDS)
        progress(counts)


def _reap(store: Store, worker: WorkerProcess) -> bool:
    """Record the end of a worker; return whether it had held a cell."""
    status = worker.process.returncode
    if status == REFUSED:
        raise RefusedError(worker.last_line)
    if status == 0:
        return True
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    words = worker.last_line
    return store.crash(worker.owner, f"its process was {how}" + (f": {words}" if words else "")) > 0


class RefusedError(UsageError):
    """Error of a worker, with its one-line message unchanged."""

    def __init__(self, line: str) -> None:
        NormscopeError.__init__(self, line)


@contextlib.contextmanager
def _pool(store: Store, early_stop: bool) -> Iterator[tuple[list[WorkerProcess], Callable[[], None]]]:
    """Give the workers, and a function that starts one more; at the end, stop all and release their cells."""
    pool: list[WorkerProcess] = []
    me = Process.of(os.getpid())

    def start() -> None:
        stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed with its worker
        name = Owner.here().id
        words = [str(store.path.resolve()), name, str(me.pid), "early-stop" if early_stop else "to-the-end"]
        process = subprocess.Popen(
            [sys.executable, "-c", _START, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            process_group=0,  # only the keeper gets the terminal's Ctrl-C
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        pool.append(WorkerProcess(process, Owner(Process.of(process.pid), me, id=name), stderr))

    try:
        yield pool, start
    finally:
        for worker in pool:
            worker.process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in pool:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            with contextlib.suppress(UsageError):  # the store may have failed; its claims expire anyway
                store.release(worker.owner)
            worker.stderr.close()
