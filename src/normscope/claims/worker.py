"""`Worker`: a process that measures claims one after another; another takes its place where it dies."""

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import torch

from normscope.claims.claim import CLAIMS, Claim
from normscope.claims.evidence import Evidence
from normscope.claims.measure import measure_claim
from normscope.claims.result import ClaimResult
from normscope.claims.runs import Runs
from normscope.claims.setup import Setup
from normscope.errors import describe


class Worker:
    """One process of one thread, started with the first claim.

    Args:
        setup: what claims are measured with.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._pool: ProcessPoolExecutor | None = None
        self._pid: int | None = None
        self._ended = False
        self._lock = threading.Lock()  # no process may start while all are ended

    def measure(self, claim: Claim) -> ClaimResult:
        """The claim's result; a process that dies, or cannot be started, is reported in its `error`."""
        began = time.perf_counter()
        setup = self._setup
        try:
            pool = self._running()
            given = (tuple(setup.seeds), setup.long, setup.text, setup.runs.folder)
            task = pool.submit(_measured, claim.id, claim.measure.__module__, *given)
            result = ClaimResult.from_cache(claim, task.result())
            return ClaimResult(**vars(result) | {"cached": False})
        except BrokenProcessPool:
            words = "its process died without an answer (killed, or out of memory)"
            self.end(renew=True)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            words = describe(error)
        taken = time.perf_counter() - began
        nothing = Evidence(unmeasured=[words])
        return ClaimResult(claim=claim, evidence=nothing, seconds=taken, long=setup.long, error=words)

    def end(self, *, renew: bool = False) -> None:
        """End the process at once, whatever it does; `renew` lets the next claim start another."""
        with self._lock:
            self._ended = self._ended or not renew
            pool, pid, self._pool, self._pid = self._pool, self._pid, None, None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def _running(self) -> ProcessPoolExecutor:
        with self._lock:
            if self._ended:
                raise OSError("ended before it began")
            if self._pool is None:
                os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else torch's profiler prints on stderr
                self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin)
                self._pid = self._pool.submit(os.getpid).result()
            return self._pool


def _begin() -> None:
    """Set up the process: one thread; Ctrl-C is the parent's; what claims print goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _measured(
    id: str, module: str, seeds: tuple[int, ...], long: bool, text: Path | None, folder: Path | None
) -> Mapping[str, Any]:
    """Measure a claim in the process; the result is what the cache keeps."""
    import_module(module)  # fills CLAIMS
    setup = Setup(seeds=seeds, long=long, text=text, runs=_runs(folder))
    return measure_claim(CLAIMS[id], setup).to_cache()


@functools.cache
def _runs(folder: Path | None) -> Runs:
    """One `Runs` a folder, so that a process reads a trained run once."""
    return Runs(folder)
