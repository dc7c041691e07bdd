"""Reductions over many tensors at once, that keep NaN and infinity.

A 2-norm in float32 overflows above 1.8e19, so that one reduction finds NaN, infinity and finite garbage.
`torch._foreach_norm` takes one pass over the memory; with the norm of infinity it is much slower (torch
2.13, CPU). On a CPU it runs in one thread, and large tensors take the scalar product with themselves.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_HALVES = (torch.float16, torch.bfloat16)
LARGE = 1 << 15
"""Entries from which a tensor on a CPU is summed by all threads."""
SAMPLE = 1024
"""Entries of each tensor that updates are measured on."""
RUNS = 32
"""Runs of neighbours that they lie in, so that few lines of the cache are read."""


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, the values of a sparse one; another tensor as it is."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.coalesce()._values() if tensor.is_sparse else tensor


@torch.no_grad()
def squares(tensors: list[Tensor]) -> Tensor:
    """‖x‖₂² of each tensor (n,), in float32, or in float64 if all are."""
    if not tensors:
        return torch.zeros(0)
    large, small = list[int](), list[int]()
    for number, tensor in enumerate(tensors):
        (large if _is_large(tensor) else small).append(number)
    if not large:
        return _by_one_pass(tensors).square()
    found = torch.stack([torch.dot(flat := tensors[number].view(-1), flat) for number in large])
    if not small:
        return found
    rest = _by_one_pass([tensors[number] for number in small]).square().float()
    order = np.empty(len(tensors), dtype=np.intp)
    order[large + small] = np.arange(len(tensors))
    return torch.cat([found, rest])[torch.from_numpy(order)]


def norms(tensors: list[Tensor]) -> Tensor:
    """‖x‖₂ of each tensor (n,), in float32, or in float64 if all are."""
    return squares(tensors).sqrt()


def _is_large(tensor: Tensor) -> bool:
    """Whether a scalar product takes less time than `_foreach_norm`, which runs in one thread on a CPU."""
    return (
        tensor.numel() >= LARGE
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
    )


def _by_one_pass(tensors: list[Tensor]) -> Tensor:
    halves = any(tensor.dtype in _HALVES for tensor in tensors)
    found = torch._foreach_norm(tensors, 2.0, dtype=torch.float32) if halves else torch._foreach_norm(tensors)
    return torch.stack(list(found)) if _is_uniform(found) else torch.stack([f.float().cpu() for f in found])


def _is_uniform(found: Any) -> bool:
    first = found[0]
    return all(f.dtype == first.dtype and f.device == first.device for f in found)


def sampled(tensor: Tensor) -> Tensor:
    """Up to `SAMPLE` entries, a copy, in `RUNS` evenly spaced runs."""
    flat = local(tensor).reshape(-1)
    if flat.numel() <= SAMPLE:
        return flat.clone()
    return flat[: flat.numel() // RUNS * RUNS].view(RUNS, -1)[:, : SAMPLE // RUNS].reshape(-1)
