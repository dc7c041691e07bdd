"""`Context`: what a block needs beside the stream."""

from typing import NamedTuple

from torch import Tensor, nn


class Cache(dict[nn.Module, tuple[Tensor, Tensor]]):
    """Keys and values (B, H, S, K) that each attention has seen, for generation token by token."""

    length: int = 0
    """Tokens seen by now."""


class Context(NamedTuple):
    """Inputs of every block of a stack beside the stream; all of them optional.

    Attributes:
        mask: who may be seen: (T, S), (B, T, S) or (B, H, T, S), bool (True: visible) or float (added to the
            logits). A causal attention stays causal under any mask.
        rotation: cos and sin (B or 1, 1, T, K/2) of rotary positions.
        real: (B, T) bool, which tokens are not padding; for norms whose statistics run over tokens.
        memory: (B, S, D), what cross-attention reads.
        memory_mask: as `mask`, for cross-attention.
        cache: keys and values of earlier tokens.
    """

    mask: Tensor | None = None
    rotation: tuple[Tensor, Tensor] | None = None
    real: Tensor | None = None
    memory: Tensor | None = None
    memory_mask: Tensor | None = None
    cache: Cache | None = None


NOTHING = Context()
