"""`Form`: the settings of one call, without its tensors."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Norm = Literal["layer", "rms"]
Arrays = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""x (…, D), branch (…, D), weight (D,), bias (D,)."""
Grads = tuple[Tensor | None, Tensor | None]
"""Gradients of normed and stream; None for zero."""
AllGrads = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Gradients of x, branch, weight and bias; None for zero, or where none is asked for."""


@dataclass(frozen=True)
class Form:
    """Settings that select a formula.

    Attributes:
        norm: "layer" or "rms".
        eps: ε.
        alpha: factor of x.
        drop: probability that a feature of the branch is dropped; 0 outside training.
        prenorm: whether the stream is the sum instead of the normed sum.
        x_dtype, branch_dtype, stream_dtype: dtypes; normed has branch's.
        dtype: dtype of the sum and the statistics: float64 if x or branch has it, else float32.
        kept_scale: 1/(1 − p), the factor of the branch's features that are kept; 0 if none is.
        stream_is_sum: whether the stream is the sum without any rounding: a backward can read it there.
        stream_is_normed: whether stream and normed are one tensor.
    """

    norm: Norm
    eps: float
    alpha: float
    drop: float
    prenorm: bool
    x_dtype: torch.dtype
    branch_dtype: torch.dtype
    stream_dtype: torch.dtype
    dtype: torch.dtype = field(init=False)
    kept_scale: float = field(init=False)
    stream_is_sum: bool = field(init=False)
    stream_is_normed: bool = field(init=False)

    def __post_init__(self) -> None:
        dtype = torch.promote_types(torch.promote_types(self.x_dtype, self.branch_dtype), torch.float32)
        derived = {
            "dtype": dtype,
            "kept_scale": 0.0 if self.drop == 1 else 1 / (1 - self.drop),
            "stream_is_sum": self.prenorm and self.stream_dtype == dtype,
            "stream_is_normed": not self.prenorm and self.stream_dtype == self.branch_dtype,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
