"""The state of the global random generators as tensors of fixed shapes, for a checkpoint."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def take_random_state() -> dict[str, Tensor]:
    """Where torch (CPU, and this process's CUDA device), `random` and NumPy stand."""
    _, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()  # noqa: NPY002 -- the generator that users' code draws from
    _, keys, position, has_gauss, cached = legacy
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "gauss": torch.tensor([gauss is not None, gauss or 0.0, cached], dtype=torch.float64),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def put_random_state(states: dict[str, Tensor]) -> None:
    """Put the generators where `take_random_state` saw them."""
    torch.set_rng_state(states["torch"])
    has_gauss, gauss, cached = states["gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss if has_gauss else None))
    *keys, position, has_cached = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_cached, cached))  # noqa: NPY002
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
