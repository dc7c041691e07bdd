"""Residual sums that are computed together with the norm that reads them.

Shapes: B batch, T tokens, D width.
"""

import torch
from torch import Tensor, nn

from normscope.kernels import residual_norm
from normscope.kernels.ahead import ReadsAhead
from normscope.nn.norms import LayerNorm, RMSNorm


class _ReadsAhead(ReadsAhead):
    """Our norms ignore which tokens are padding."""

    def forward(self, x: Tensor, real_BT: Tensor | None = None) -> Tensor:
        return super().forward(x)


class FusedLayerNorm(_ReadsAhead, LayerNorm):
    """LayerNorm whose result the sum before it computes."""


class FusedRMSNorm(_ReadsAhead, RMSNorm):
    """RMSNorm whose result the sum before it computes."""


FUSED: dict[type[nn.Module], type[nn.Module]] = {LayerNorm: FusedLayerNorm, RMSNorm: FusedRMSNorm}
"""Norm → the same that reads ahead."""


def can_read_ahead(norm: nn.Module) -> bool:
    """Whether the sum before this norm can compute it."""
    return type(norm) in (*FUSED, *FUSED.values())


def make_read_ahead(norm: nn.Module) -> None:
    """Change the class of a norm to the one that reads ahead."""
    norm.__class__ = FUSED.get(type(norm), type(norm))


def summed_for(norm: nn.Module, x_BTD: Tensor, f_BTD: Tensor, stream_scale: float) -> Tensor:
    """stream_scale·x + f, whose norm is computed with it and kept for the norm's next call."""
    assert isinstance(norm, FusedLayerNorm | FusedRMSNorm)
    dtype = torch.promote_types(x_BTD.dtype, f_BTD.dtype)
    normed, stream = residual_norm(
        x_BTD,
        f_BTD.to(dtype),  # under autocast the norm of a float32 stream stays in float32
        weight=norm.weight,
        bias=norm.bias if isinstance(norm, nn.LayerNorm) else None,
        eps=torch.finfo(torch.promote_types(dtype, torch.float32)).eps if norm.eps is None else norm.eps,
        norm="layer" if isinstance(norm, nn.LayerNorm) else "rms",
        alpha=stream_scale,
        stream_dtype=dtype,
    )
    norm.expect(stream, normed)
    return stream
