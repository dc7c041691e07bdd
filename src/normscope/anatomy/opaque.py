"""What an opaque op is, by what it does: is its output a norm of its first input?"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves


def which_norm(args: Any, output: Any) -> str | None:
    """ "layernorm" or "rmsnorm" where the output is that norm of the first tensor, times an operand of its
    width.

    Compared in float64 on the real tensors to 1 %, since ε is not known; None for fake tensors and for
    anything else.
    """
    tensors = [a for a in tree_leaves(args) if isinstance(a, Tensor) and a.is_floating_point()]
    if not tensors or not isinstance(output, Tensor) or isinstance(output, FakeTensor):
        return None
    x = tensors[0].detach()
    if x.shape != output.shape or x.device.type == "meta" or x.dim() < 2 or x.shape[-1] < 2:
        return None
    x, y = x.double(), output.detach().double()
    vectors = [t.detach().double() for t in tensors[1:] if t.numel() == x.shape[-1]]
    for gain in (None, *vectors):
        for offset in (0.0, 1.0) if gain is not None else (0.0,):
            for shift in (None, *vectors):
                for kind in ("layernorm", "rmsnorm"):
                    if _matches(kind, x, y, gain, offset, shift):
                        return kind
    return None


def _matches(
    kind: str, x: Tensor, y: Tensor, gain: Tensor | None, offset: float, shift: Tensor | None
) -> bool:
    centred = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    expected = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-12)
    if gain is not None:
        expected = expected * (gain.reshape(-1) + offset)
    if shift is not None:
        expected = expected + shift.reshape(-1)
    return bool((expected - y).norm() <= 1e-2 * y.norm()) and bool(y.norm() > 0)
