"""The position-wise feed-forward network."""

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """down(GELU(up(x))) on each token by itself."""

    def __init__(self, width: int, hidden: int, *, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        return self.down(F.gelu(self.up(x_BTD)))
