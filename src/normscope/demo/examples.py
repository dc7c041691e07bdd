"""A language model of PyTorch's encoder layers as commonly built, with Post-LN, and a fixed version."""

import torch
from torch import Tensor, nn


class CausalEncoder(nn.Module):
    """Byte-level language model around `nn.TransformerEncoder` with a causal mask.

    Every matrix gets Xavier-uniform weights, as in `nn.Transformer`.
    """

    def __init__(
        self, depth: int = 12, width: int = 256, *, norm_first: bool = False, final_norm: bool = False
    ):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, nhead=8, dim_feedforward=4 * width, batch_first=True, norm_first=norm_first
        )
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(1024, width)
        self.encoder = nn.TransformerEncoder(
            layer, depth, norm=nn.LayerNorm(width) if final_norm else None, enable_nested_tensor=False
        )
        self.head = nn.Linear(width, 256)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Next-token logits (B, T, 256)."""
        length = ids_BT.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids_BT.device)
        x_BTC = self.embedding(ids_BT) + self.position(torch.arange(length, device=ids_BT.device))
        return self.head(self.encoder(x_BTC, mask=mask, is_causal=True))


def post_ln() -> nn.Module:
    """12 layers of `nn.TransformerEncoderLayer` with its default, Post-LN (pytorch/pytorch#55270)."""
    return CausalEncoder()


def pre_ln() -> nn.Module:
    """The same with `norm_first=True` and a final norm."""
    return CausalEncoder(norm_first=True, final_norm=True)
