"""The global random generators: seed them for a while, then give them back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def generators_kept() -> Iterator[None]:
    """Torch (CPU and CUDA), NumPy and `random` come back in the state they were in, also on an exception."""
    states = _states()
    try:
        yield
    finally:
        _restore(states)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """All global generators start from `seed` inside and come back as they were."""
    with generators_kept():
        torch.manual_seed(seed)  # all devices
        np.random.seed(seed % 2**32)  # noqa: NPY002 -- the generator that users' code draws from
        random.seed(seed)
        yield


def _states() -> tuple[Any, ...]:
    # Asking for CUDA states would initialise CUDA, which a CPU check has no business to do.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()  # noqa: NPY002


def _restore(states: tuple[Any, ...]) -> None:
    cpu, cuda, numpy_state, python_state = states
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    np.random.set_state(numpy_state)  # noqa: NPY002
    random.setstate(python_state)
