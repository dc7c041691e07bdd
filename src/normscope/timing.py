"""Seconds of the stages of a check or a comparison."""

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager


@contextmanager
def timed(cost: MutableMapping[str, float], stage: str) -> Iterator[None]:
    """Add the seconds of the block to `cost[stage]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        cost[stage] = round(cost.get(stage, 0.0) + time.perf_counter() - start, 4)
