"""Run a trial in a separate thread, with denormals flushed to zero.

`torch.set_flush_denormal` affects the calling thread and those that it starts later, so a new thread does not
change the caller's setting. Without it, a collapsed run, which has many denormals, is ten times slower.
"""

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import torch

from normscope.interrupts import postponed

T = TypeVar("T")

POLL_SECONDS = 0.2  # longest delay of a Ctrl-C
OMP_PAUSE_SOFT = 1  # `omp_pause_soft` of OpenMP 5.0


class Stopped(Exception):
    """The caller was interrupted; raised inside the thread, between two steps."""


def in_flushed_thread(work: Callable[[Callable[[], None]], T]) -> T:
    """Run `work(checkpoint)` in a new thread that flushes denormals, and return its result.

    `work` calls `checkpoint()` between two steps, which raises `Stopped` after the caller was interrupted. An
    exception of `work` is raised again here. Every Ctrl-C reaches the caller only after the thread has ended,
    so that the model does not change any more. (If Python ended while the thread is in a kernel, it would
    unwind the thread through C++ and abort.)
    """
    future: Future[T] = Future()
    stop = threading.Event()
    grad = torch.is_grad_enabled()
    workers = torch.get_num_threads()

    def checkpoint() -> None:
        if stop.is_set():
            raise Stopped

    def body() -> None:
        torch.set_flush_denormal(True)
        torch.set_num_threads(workers)  # OpenMP's default is per thread too
        try:
            with torch.set_grad_enabled(grad):  # thread-local: a new thread starts with True
                future.set_result(work(checkpoint))
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=body, name="normscope-trial")  # not a daemon: Python waits for it
    with postponed(stop.set):
        try:
            end_idle_workers()
            thread.start()
            while thread.is_alive():
                thread.join(POLL_SECONDS)
        except BaseException:  # from a signal other than SIGINT
            stop.set()
            thread.join()
            raise
    try:
        return future.result()
    except Stopped:  # after a Ctrl-C whose handler does not raise
        raise KeyboardInterrupt from None


def end_idle_workers() -> None:
    """Let GNU OpenMP end the calling thread's idle workers; the next parallel loop here starts them again.

    It counts them beside those of a new thread. Where the sum exceeds the cores, workers sleep after each
    loop instead of waiting for the next one, which slows every step. Does nothing with another OpenMP.
    """
    for library in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        pause = getattr(ctypes.CDLL(str(library)), "omp_pause_resource_all", None)
        if pause is not None:  # OpenMP before 5.0 has none
            pause(OMP_PAUSE_SOFT)
