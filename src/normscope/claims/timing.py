"""Times of one thread, taken so that a busy machine does not decide a verdict.

What is compared runs in turns, and a round gives one ratio: what slows the machine down slows all of the
round. Seconds are of the thread's processor time, not of the clock on the wall.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch

Run = Callable[[], object]
HOW = "Times are processor seconds of one thread, in turns, medians of ratios; machine: CPU."
"""For the notes of claims that take times."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on the calling thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds(run: Run) -> float:
    """Processor time of this thread in `run`."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def in_turns(runs: Mapping[str, Run], rounds: int, warm: int = 2) -> dict[str, list[float]]:
    """Seconds of each of `runs` in each round; none is always the first. `warm` rounds are not counted."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    with one_thread():
        for index in range(-warm, rounds):
            names = [*names[1:], names[0]]
            for name in names:
                time_taken = seconds(runs[name])
                if index >= 0:
                    taken[name].append(time_taken)
    return taken


def ratio(taken: Mapping[str, list[float]], of: str, to: str) -> float:
    """Median over rounds of the time of `of` in times of `to`."""
    return statistics.median(first / second for first, second in zip(taken[of], taken[to], strict=True))


def repeated(run: Run, times: int) -> Run:
    """`run` so many times over: what is short is timed in bundles."""

    def all_of_them() -> None:
        for _ in range(times):
            run()

    return all_of_them
