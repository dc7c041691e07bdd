"""The global random generators: seed them for a block, save their state and restore it."""

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators of torch (CPU and CUDA), NumPy and `random` after the block."""
    states = _states()
    try:
        yield
    finally:
        _restore(*states)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Start all global generators from `seed` in the block and restore them after it."""
    with generators_kept():
        torch.manual_seed(seed)  # all devices
        np.random.seed(seed % 2**32)  # noqa: NPY002 -- the generator that users' code draws from
        random.seed(seed)
        yield


def take_random_state() -> dict[str, Tensor]:
    """The state of torch (CPU, and every CUDA device), `random` and NumPy, as tensors of fixed shapes."""
    cpu, cuda, (_, keys, position, has_gauss, cached), (_, words, gauss) = _states()
    states = {
        "torch": cpu,
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "gauss": torch.tensor([gauss is not None, gauss or 0.0, cached], dtype=torch.float64),
    }
    return states | ({"cuda": torch.stack(cuda)} if cuda else {})


def keep_random_state() -> Callable[[], None]:
    """Function that restores the generators to their present states; cheaper than `take_random_state`."""
    return functools.partial(_restore, *_states())


def draws_since() -> Callable[[], bool]:
    """Function that tells whether a generator has been drawn from since this call."""
    cpu, cuda, (_, *numpy), python = _states()

    def has_drawn() -> bool:
        now_cpu, now_cuda, (_, *now_numpy), now_python = _states()
        if not torch.equal(cpu, now_cpu) or python != now_python:
            return True
        if not all(map(np.array_equal, numpy, now_numpy)):
            return True
        # The devices of a CUDA that has been initialised since have no earlier states.
        return len(cuda) == len(now_cuda) and not all(map(torch.equal, cuda, now_cuda))

    return has_drawn


def put_random_state(states: dict[str, Tensor]) -> None:
    """Restore the states of `take_random_state`, on the devices of this machine."""
    has_gauss, gauss, cached = states["gauss"].tolist()
    *keys, position, has_cached = states["numpy"].tolist()
    legacy = ("MT19937", np.array(keys, dtype=np.uint32), position, has_cached, cached)
    python = (3, tuple(states["python"].tolist()), gauss if has_gauss else None)
    cuda = list(states.get("cuda", ()))[: torch.cuda.device_count()]
    _restore(states["torch"], cuda, legacy, python)


def _states() -> tuple[Tensor, list[Tensor], Any, Any]:
    # Reading CUDA states would initialise CUDA, which a run on the CPU must not do.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()  # noqa: NPY002


def _restore(cpu: Tensor, cuda: list[Tensor], legacy: Any, python: Any) -> None:
    torch.set_rng_state(cpu)
    for device, state in enumerate(cuda):
        torch.cuda.set_rng_state(state, device)
    np.random.set_state(legacy)  # noqa: NPY002 -- the generator that users' code draws from
    random.setstate(python)
