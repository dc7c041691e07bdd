"""The gradient on its way down a stack of any depth, as a logarithm: it neither under- nor overflows.

Shapes: B batch, T tokens, D width.
"""

import math

import torch
from torch import Tensor, nn

from normscope.nn import Block, ModelConfig
from normscope.nn.placement import Where
from normscope.nn.schemes.gates import HighwayGate

TOKENS = (1, 8)
"""Sequences and tokens."""


def log_gradients(
    scheme: str, depth: int, width: int, seed: int, norm: str | None = None, gate_bias: float | None = None
) -> list[float]:
    """log10 of ‖gradient of a random read-out in x_l‖ over that in x_L, from l = L down to 0, at the start.

    Each block is differentiated alone, in float64, and the gradient scaled to length 1 before the next, which
    changes nothing: it goes through a block linearly. A stream that overflows leaves nan from there on.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = ModelConfig(scheme=scheme, depth=depth, width=width, heads=2, norm=norm)
        blocks = [Block(config, Where(place, depth), causal=True).double() for place in range(1, depth + 1)]
    for gate in [m for block in blocks for m in block.modules() if isinstance(m, HighwayGate)]:
        if gate_bias is not None:
            nn.init.constant_(gate.transform.bias, gate_bias)
    streams: list[Tensor] = [torch.randn(*TOKENS, width, dtype=torch.float64, generator=generator)]
    with torch.no_grad():
        for block in blocks:
            streams.append(_one(block(streams[-1])))
    cotangent = torch.randn(*TOKENS, width, dtype=torch.float64, generator=generator)
    logs, cotangent = [0.0], cotangent / cotangent.norm()
    for block, x_BTD in zip(reversed(blocks), reversed(streams[:-1]), strict=True):
        x_BTD.requires_grad_(True)
        (gradient,) = torch.autograd.grad(_one(block(x_BTD)), x_BTD, cotangent)
        length = float(gradient.norm())
        logs.append(logs[-1] + math.log10(length) if 0 < length < math.inf else math.nan)
        cotangent = gradient / length if length else gradient
    return logs


def _one(state: object) -> Tensor:
    assert isinstance(state, Tensor), "one stream"
    return state
