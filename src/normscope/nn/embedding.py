"""Embedding of ids into the stream, with positions.

Shapes: B batch, T tokens, S tokens with those in the cache, D width.
"""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from normscope.errors import UsageError
from normscope.nn.config import ModelConfig
from normscope.nn.positions import rotation, sinusoids


class Positioned(nn.Module):
    """Adds learnt or sinusoidal positions, then dropout; gives the attention its rotary angles.

    Args:
        config: which kind of positions, and D.
        num_positions: rows of the table of learnt ones.

    Raises:
        UsageError: an odd width with sinusoidal positions.
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
        """The angles of rotary positions, once for all blocks."""
        if self.config.positions != "rotary":
            return None
        head_width = self.config.head_width or self.config.width // self.config.num_heads
        return rotation(position_BT, head_width, self.config.rope_base, dtype)

    def require_room(self, num_tokens: int) -> None:
        """UsageError for a sequence that learnt positions do not reach."""
        if self.positions is not None and num_tokens > self.positions.num_embeddings:
            raise UsageError(
                f"a sequence of {num_tokens} tokens",
                f"at most context={self.positions.num_embeddings}",
                "shorten it or set context",
            )


class Embedding(Positioned):
    """Token embedding with positions.

    Args:
        config: what to build.
        tokens: the token table of another embedding, to share it.
    """

    def __init__(self, config: ModelConfig, tokens: nn.Embedding | None = None) -> None:
        super().__init__(config, config.context)
        self.tokens = nn.Embedding(config.vocab, config.width) if tokens is None else tokens

    def forward(self, ids: Tensor, position_BT: Tensor) -> Tensor:
        """(B, T) ids at (B or 1, T) positions → (B, T, D)."""
        return self.place(self.tokens(ids), position_BT)


def require_ids(ids: Tensor) -> None:
    """UsageError for ids of another shape than (B, T)."""
    if ids.dim() != 2:
        raise UsageError(f"ids of shape {tuple(ids.shape)}", "(B, T)", "use ids[None] for one sequence")


def token_positions(ids: Tensor, attention_mask: Tensor | None, seen: int = 0) -> Tensor:
    """(B or 1, T): counted over the real tokens where a mask says which those are.

    Args:
        ids: (B, T).
        attention_mask: (B, S), the tokens in the cache first.
        seen: tokens in the cache, S − T.
    """
    if attention_mask is None:
        return torch.arange(seen, seen + ids.shape[1], device=ids.device)[None]
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, seen:]


def require_mask(attention_mask: Tensor, ids: Tensor, seen: int = 0) -> None:
    """UsageError for a mask of another shape than (B, S), or a row without a token where that can be seen."""
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
    """UsageError for a prompt that ends in padding: the next token would follow on that."""
    if _has_values(attention_mask) and not attention_mask[:, -1].all():
        raise UsageError(
            "prompts padded on the right", "attention_mask that ends in 1", "pad them on the left"
        )


def _has_values(tensor: Tensor) -> bool:
    return not (torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor))
