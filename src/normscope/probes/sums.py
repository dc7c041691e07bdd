"""Sums over large tensors, in float64 and in pieces.

A float32 sum of 40 million squares is wrong in the third digit and loses squares under 1e-45. A float64 copy
of the whole would be twice the tensor. Pieces of 2^18 stay in the cache, which is also fastest.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

PIECE = 1 << 18

FLOAT16_FLUSHED = 2.0**-25
"""Largest magnitude that float16 turns into 0: half its smallest subnormal 2^-24 (ties go to even)."""


COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
"""Layouts of sparse tensors that are stored by rows, columns or blocks."""


def exact(tensor: Tensor) -> Tensor:
    """`tensor` in float64, without its graph; on the CPU where the device has no float64 (MPS)."""
    tensor = tensor.detach()
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).to(torch.float64)


def energy(tensor: Tensor) -> float:
    """Σ x²."""
    return sum(float(piece.dot(piece)) for piece in map(exact, _pieces(tensor)))


def inner(left: Tensor, right: Tensor) -> float:
    """Σ x·y over two tensors of one shape."""
    pieces = zip(_pieces(left), _pieces(right), strict=True)
    return sum(float(exact(x).dot(exact(y))) for x, y in pieces)


def gram(tensors: Sequence[Tensor]) -> Tensor:
    """Inner products Σ x·y of k tensors of one shape with each other: (k, k) in float64, on the CPU."""
    found = torch.zeros(len(tensors), len(tensors), dtype=torch.float64)
    for pieces in zip(*map(_pieces, tensors), strict=True):
        rows = torch.stack([exact(piece) for piece in pieces])
        found += (rows @ rows.mT).cpu()
    return found


def norm(tensor: Tensor) -> float:
    """‖x‖₂ over all elements."""
    return energy(tensor) ** 0.5


def rms(tensor: Tensor) -> float:
    """√(mean of x²) over all elements."""
    return (energy(tensor) / tensor.numel()) ** 0.5


def extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value, of a sparse tensor those that are stored; nan where there is a nan."""
    low, high = torch.aminmax(widened(stored(tensor)))
    return low, high


def stored(tensor: Tensor) -> Tensor:
    """The stored entries of a sparse tensor, a view; another tensor as it is."""
    if tensor.is_sparse:
        return tensor._values()
    return tensor.values() if tensor.layout in COMPRESSED else tensor


def widened(tensor: Tensor) -> Tensor:
    """`tensor` without its graph; in bfloat16, which holds all of float8, where PyTorch compares none."""
    tensor = tensor.detach()
    return tensor.to(torch.bfloat16) if is_byte(tensor) else tensor


def is_byte(tensor: Tensor) -> bool:
    """Whether its elements are floating-point numbers of one byte, of which PyTorch computes little."""
    return tensor.is_floating_point() and tensor.element_size() == 1


def largest(tensor: Tensor) -> float:
    """max |x|; nan where there is a nan."""
    low, high = extremes(tensor)
    return float(torch.maximum(-low, high))


def is_zero(tensor: Tensor) -> bool:
    """Whether every element is exactly zero."""
    return not bool(widened(tensor).any())


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is finite."""
    low, high = extremes(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def flushed(tensor: Tensor) -> tuple[int, int]:
    """Number of non-zero values that a cast to float16 turns into zero, and number of non-zero values."""
    kept = nonzero = 0
    for piece in _pieces(tensor):
        nonzero += int(torch.count_nonzero(piece))
        kept += int(torch.count_nonzero(piece.abs() > FLOAT16_FLUSHED))
    return nonzero - kept, nonzero


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    yield from tensor.detach().reshape(-1).split(PIECE)
