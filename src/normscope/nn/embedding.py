"""Embedding of ids into the stream, with positions: learnt, rotary (RoPE) or sinusoidal.

Shapes: B batch, T tokens, S tokens including those in the cache, D width, H heads, K width of a head.
"""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from normscope.errors import UsageError
from normscope.nn.config import ModelConfig
from normscope.nn.context import Cache, Context


def rotation(position_BT: Tensor, head_width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (B, 1, T, K/2) of the angles t·base^(-2i/K) (Su et al. 2021, arXiv:2104.09864).

    Args:
        position_BT: (B, T) or (1, T) whole numbers.
    """
    # Angles in float32 at least: bfloat16 cannot count past 256.
    wide = torch.promote_types(dtype, torch.float32)
    half = head_width // 2
    frequency_k = base ** (-torch.arange(half, device=position_BT.device, dtype=wide) / half)
    angle_B1Tk = position_BT[:, None, :, None].to(wide) * frequency_k
    return angle_B1Tk.cos().to(dtype), angle_B1Tk.sin().to(dtype)


def rotate(x_BHTK: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pair (x_i, x_{i+K/2}) of each token by its angle."""
    cos, sin = cos_sin
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def sinusoids(position_BT: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(B, T, D): sin and cos of t·10000^(-2i/D), sines first (Vaswani et al. 2017, arXiv:1706.03762)."""
    cos, sin = rotation(position_BT, width, 10_000.0, torch.promote_types(dtype, torch.float32))
    return torch.cat([sin, cos], dim=-1).squeeze(1).to(dtype)


class Positioned(nn.Module):
    """Adds learnt or sinusoidal positions, then dropout; gives the attention its rotary angles.

    Args:
        config: kind of positions, and D.
        num_positions: rows of the table of learnt positions.

    Raises:
        UsageError: sinusoidal positions have an odd width.
    """

    def __init__(self, config: ModelConfig, num_positions: int) -> None:
        super().__init__()
        self.config = config
        if config.positions == "sinusoidal" and config.width % 2:
            raise UsageError(
                f"sinusoidal positions with width={config.width}", "an even width", "change width"
            )
        learnt = config.positions == "learnt"
        self.positions = nn.Embedding(num_positions, config.width) if learnt else None
        self.dropout = nn.Dropout(config.dropout)

    def place(self, x_BTD: Tensor, position_BT: Tensor) -> Tensor:
        """(B, T, D) at (B or 1, T) positions → (B, T, D)."""
        if self.positions is not None:
            self.require_room(x_BTD.shape[1])
            x_BTD = x_BTD + self.positions(position_BT)
        elif self.config.positions == "sinusoidal":
            x_BTD = x_BTD + sinusoids(position_BT, self.config.width, x_BTD.dtype)
        return self.dropout(x_BTD)

    def rotation(self, position_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """cos and sin of rotary positions, for all blocks; None with other positions."""
        if self.config.positions != "rotary":
            return None
        head_width = self.config.head_width or self.config.width // self.config.num_heads
        return rotation(position_BT, head_width, self.config.rope_base, dtype)

    def require_room(self, num_tokens: int) -> None:
        """Raise UsageError if a sequence is longer than the table of learnt positions."""
        if self.positions is not None and num_tokens > self.positions.num_embeddings:
            raise UsageError(
                f"a sequence of {num_tokens} tokens",
                f"at most context={self.positions.num_embeddings}",
                "shorten it or set context",
            )


class Embedding(Positioned):
    """Token embedding with positions.

    Args:
        config: configuration of the model.
        tokens: token table of another embedding, to share.
    """

    def __init__(self, config: ModelConfig, tokens: nn.Embedding | None = None) -> None:
        super().__init__(config, config.context)
        self.tokens = nn.Embedding(config.vocab, config.width) if tokens is None else tokens

    def forward(self, ids: Tensor, position_BT: Tensor) -> Tensor:
        """(B, T) ids at (B or 1, T) positions → (B, T, D)."""
        return self.place(self.tokens(ids), position_BT)

    def context(
        self, ids: Tensor, attention_mask: Tensor | None, cache: Cache | None = None
    ) -> tuple[Context, Tensor]:
        """Inputs of the blocks besides the stream, and the positions (B or 1, T) of `ids`.

        Args:
            ids: (B, T).
            attention_mask: (B, S), tokens in the cache first; positions count its real tokens.
        """
        require_ids(ids)
        seen = 0 if cache is None else cache.length
        self.require_room(seen + ids.shape[1])
        dtype = self.tokens.weight.dtype
        if attention_mask is None:
            position_BT = torch.arange(seen, seen + ids.shape[1], device=ids.device)[None]
            return Context(rotation=self.rotation(position_BT, dtype), cache=cache), position_BT
        require_mask(attention_mask, ids, seen)
        position_BT = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, seen:]
        real_BS = attention_mask.bool()
        rotation = self.rotation(position_BT, dtype)
        return Context(real_BS[:, None, None, :], rotation, real_BS[:, seen:], cache=cache), position_BT


def require_ids(ids: Tensor) -> None:
    """Raise UsageError if the shape of the ids is not (B, T)."""
    if ids.dim() != 2:
        raise UsageError(f"ids of shape {tuple(ids.shape)}", "(B, T)", "use ids[None] for one sequence")


def require_mask(attention_mask: Tensor, ids: Tensor, seen: int = 0) -> None:
    """Raise UsageError if a mask's shape is not (B, S), or, if it has values, a row is without a token."""
    expected = (ids.shape[0], seen + ids.shape[1])
    if tuple(attention_mask.shape) != expected:
        one_each = "one entry for each id" + (", those in the cache first" if seen else "")
        raise UsageError(
            f"attention_mask of shape {tuple(attention_mask.shape)}",
            f"{expected}, {one_each}",
            "give 1 for a token and 0 for padding",
        )
    if not _has_values(attention_mask):
        return
    empty = (~attention_mask.bool().any(dim=1)).nonzero()
    if len(empty):
        raise UsageError(
            f"attention_mask without a token in row {int(empty[0])}", "a token in each row", "drop the row"
        )


def require_left_padding(attention_mask: Tensor) -> None:
    """Raise UsageError if a prompt ends in padding, after which the next token would be generated."""
    if _has_values(attention_mask) and not attention_mask[:, -1].all():
        raise UsageError(
            "prompts padded on the right", "attention_mask that ends in 1", "pad them on the left"
        )


def _has_values(tensor: Tensor) -> bool:
    return not (torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor))
