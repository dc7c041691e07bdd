"""Run a trial in a thread of its own, with denormals flushed to zero.

`torch.set_flush_denormal` reaches the thread that calls it and those it starts later, so a fresh thread sets
it for itself and leaves the caller's setting alone. A collapsed run fills with denormals and is ten times
slower without it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from normscope.interrupts import postponed

T = TypeVar("T")

POLL_SECONDS = 0.2  # how long a Ctrl-C may wait before the thread is told


class Stopped(Exception):
    """Raised inside the thread, between two steps, after the caller was interrupted."""


def in_flushed_thread(work: Callable[[Callable[[], None]], T]) -> T:
    """Run `work(checkpoint)` in a new thread that flushes denormals, and return its result.

    `work` calls `checkpoint()` between two steps: it raises `Stopped` there once the caller has been
    interrupted. An exception of `work` is raised again here. Ctrl-C, once or often, reaches the caller only
    after the thread has ended, so that nothing changes the model any more. A Python that ends while the
    thread is in a kernel would unwind it through C++ and abort.
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
        torch.set_num_threads(workers)  # OpenMP's own default is per thread too
        try:
            with torch.set_grad_enabled(grad):  # thread-local: a fresh thread would start with True
                future.set_result(work(checkpoint))
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=body, name="normscope-trial")  # no daemon: Python waits for it
    with postponed(stop.set):
        try:
            thread.start()
            while thread.is_alive():
                thread.join(POLL_SECONDS)
        except BaseException:  # of a signal that is not SIGINT
            stop.set()
            thread.join()
            raise
    try:
        return future.result()
    except Stopped:  # by a Ctrl-C whose own handler lets the program go on
        raise KeyboardInterrupt from None
