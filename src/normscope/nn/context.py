"""`Context`: inputs of a block besides the stream."""

from typing import NamedTuple

from torch import Tensor, nn


class Cache(dict[nn.Module, tuple[Tensor, Tensor]]):
    """Keys and values (B, H, S, K) of each attention so far, for generation token by token."""

    length: int = 0
    """Number of tokens so far."""


class First:
    """Holder of the values (B, G, T, K) of a stack's first attention, which later ones mix into theirs.

    A class of its own, which wrappers that rebuild the tuples and dicts of a call's arguments leave alone.
    """

    values: Tensor | None = None


class Context(NamedTuple):
    """Optional inputs of every block of a stack besides the stream.

    Attributes:
        mask: attention mask (T, S), (B, T, S) or (B, H, T, S), bool (True: visible) or float (added to the
            logits). A causal attention stays causal under any mask.
        rotation: cos and sin (B or 1, 1, T, K/2) of rotary positions.
        real: (B, T) bool, False at padding; for norms whose statistics run over tokens.
        memory: (B, S, D), input of cross-attention.
        memory_mask: like `mask`, for cross-attention.
        cache: keys and values of earlier tokens.
        first: holder for a value residual; None for none.
    """

    mask: Tensor | None = None
    rotation: tuple[Tensor, Tensor] | None = None
    real: Tensor | None = None
    memory: Tensor | None = None
    memory_mask: Tensor | None = None
    cache: Cache | None = None
    first: First | None = None


NOTHING = Context()
