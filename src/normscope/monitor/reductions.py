"""Reductions over many tensors at once, that keep NaN and infinity.

A 2-norm in float32 overflows above 1.8e19, so that one reduction finds NaN, infinity and finite garbage.
`torch._foreach_norm` takes one pass over the memory; with the norm of infinity it is much slower (torch
2.13, CPU). On a CPU it runs in one thread, and large tensors take the scalar product with themselves.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_FULL = {torch.float32, torch.float64}
_HALVES = {torch.float16, torch.bfloat16}
_AT_MOST_SINGLE = {torch.float32, *_HALVES}
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
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
    if tensor.is_sparse:
        return tensor.coalesce()._values()
    return tensor.values() if tensor.layout in _COMPRESSED else tensor


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
    found = [_dot(tensors[number]) for number in large]
    if not small:
        return torch.stack(found)
    rest = _norms([tensors[number] for number in small])
    both = torch.stack(
        [*found, *(rest if _is_uniform([found[0], *rest]) else [f.float().cpu() for f in rest])]
    )
    both[len(large) :].square_()
    order = np.empty(len(tensors), dtype=np.intp)
    order[large + small] = np.arange(len(tensors))
    return both[torch.from_numpy(order)]


def square(tensor: Tensor) -> Tensor:
    """‖x‖₂² of a detached tensor on a CPU, a scalar, by as few operations as possible.

    Between the ops of a model, each costs several times what it costs in a loop.
    """
    if _is_large(tensor):
        return _dot(tensor)
    is_half = tensor.dtype in _HALVES
    return torch.linalg.vector_norm(tensor, dtype=torch.float32 if is_half else None).square()


def _dot(tensor: Tensor) -> Tensor:
    flat = tensor.view(-1)
    return torch.dot(flat, flat)


def norms(tensors: list[Tensor]) -> Tensor:
    """‖x‖₂ of each tensor (n,), in float32, or in float64 if all are."""
    return squares(tensors).sqrt()


def _is_large(tensor: Tensor) -> bool:
    """Whether a scalar product takes less time than `_foreach_norm`, which runs in one thread on a CPU."""
    return (
        tensor.numel() >= LARGE and tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous()
    )


def _by_one_pass(tensors: list[Tensor]) -> Tensor:
    found = _norms(tensors)
    return torch.stack(list(found)) if _is_uniform(found) else torch.stack([f.float().cpu() for f in found])


def _norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """‖x‖₂ of each tensor, in float64 for float64 and complex128, else in float32."""
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes <= _FULL:
        return torch._foreach_norm(tensors)
    if dtypes <= _AT_MOST_SINGLE:
        return torch._foreach_norm(tensors, 2.0, dtype=torch.float32)
    real = [_real(tensor) for tensor in tensors]
    found = dict[int, Tensor]()
    for is_double in (False, True):  # a call takes one dtype, which must not be narrower than a tensor's
        part = [number for number, each in enumerate(real) if (each.dtype == torch.float64) is is_double]
        if part:
            found |= zip(part, _norms([real[number] for number in part]), strict=True)
    return [found[number] for number in range(len(real))]


def _real(tensor: Tensor) -> Tensor:
    """A tensor of the same norm and of a dtype that `_foreach_norm` takes."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.dtype in _FULL | _AT_MOST_SINGLE else tensor.float()


def _is_uniform(found: Any) -> bool:
    first = found[0]
    return all(f.dtype == first.dtype and f.device == first.device for f in found)


def sampled(tensor: Tensor) -> Tensor:
    """Up to `SAMPLE` entries, a copy, in `RUNS` evenly spaced runs."""
    flat = local(tensor).reshape(-1)
    if flat.numel() <= SAMPLE:
        return flat.clone()
    return flat[: flat.numel() // RUNS * RUNS].view(RUNS, -1)[:, : SAMPLE // RUNS].reshape(-1)
