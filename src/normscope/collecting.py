"""Python's garbage collection, paused while many objects are made that are no garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause automatic garbage collection.

    Each full collection visits every object of the process. Where thousands are made that stay, such as the
    hooks or the copied attributes of all modules of a deep model, collections take longer than the work and
    find nothing.
    """
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()
