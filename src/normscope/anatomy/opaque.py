"""Recognise an opaque op by its result: is its output a norm of its first input?"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves


def which_norm(args: Any, output: Any) -> str | None:
    """ "layernorm" or "rmsnorm" where the output is that norm of the first tensor, times an operand of its
    width.

    Compared in float64 on the real tensors to 1 %, because ε is unknown. None for other outputs and for fake
    tensors.
    """
    tensors = [a for a in tree_leaves(args) if isinstance(a, Tensor) and a.is_floating_point()]
    if not tensors or not isinstance(output, Tensor) or isinstance(output, FakeTensor):
        return None
    x = tensors[0].detach()
    if x.shape != output.shape or x.device.type == "meta" or x.dim() < 2 or x.shape[-1] < 2:
        return None
    x, y = x.double(), output.detach().double()
    vectors = [t.detach().double() for t in tensors[1:] if t.numel() == x.shape[-1]]
    gains: list[float | Tensor] = [
        1.0,
        *(gain.reshape(-1) + offset for gain in vectors for offset in (0.0, 1.0)),
    ]
    shifts: list[float | Tensor] = [0.0, *(shift.reshape(-1) for shift in vectors)]
    centred = x - x.mean(-1, keepdim=True)
    for gain, shift in itertools.product(gains, shifts):
        for kind, z in (("layernorm", centred), ("rmsnorm", x)):
            expected = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-12) * gain + shift
            if bool((expected - y).norm() <= 1e-2 * y.norm()) and bool(y.norm() > 0):
                return kind
    return None
