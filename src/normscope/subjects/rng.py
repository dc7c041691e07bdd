"""The global random generators: seed them for a while, keep their state, and give it back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


@contextmanager
def generators_kept() -> Iterator[None]:
    """Torch (CPU and CUDA), NumPy and `random` come back in the state they were in, also on an exception."""
    states = take_random_state()
    try:
        yield
    finally:
        put_random_state(states)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """All global generators start from `seed` inside and come back as they were."""
    with generators_kept():
        torch.manual_seed(seed)  # all devices
        np.random.seed(seed % 2**32)  # noqa: NPY002 -- the generator that users' code draws from
        random.seed(seed)
        yield


def take_random_state() -> dict[str, Tensor]:
    """The state of torch (CPU, and every CUDA device), `random` and NumPy, as tensors of fixed shapes."""
    _, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()  # noqa: NPY002 -- the generator that users' code draws from
    _, keys, position, has_gauss, cached = legacy
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "gauss": torch.tensor([gauss is not None, gauss or 0.0, cached], dtype=torch.float64),
    }
    # Asking for CUDA states would initialise CUDA, which a run on the CPU has no business to do.
    if torch.cuda.is_initialized():
        states["cuda"] = torch.stack(torch.cuda.get_rng_state_all())
    return states


def put_random_state(states: dict[str, Tensor]) -> None:
    """Put the generators where `take_random_state` saw them, on the devices that are here."""
    torch.set_rng_state(states["torch"])
    has_gauss, gauss, cached = states["gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss if has_gauss else None))
    *keys, position, has_cached = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_cached, cached))  # noqa: NPY002
    for device, state in enumerate(states.get("cuda", ())):
        if device < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)
