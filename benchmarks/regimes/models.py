"""Models of the regimes: schemes of `normscope.nn`, types of transformers, and models in plain PyTorch.

The plain ones are written as a user would write them, without anything of normscope.
"""

from typing import Any

import torch
from torch import Tensor, nn

from normscope.nn import Block, ModelConfig, Where
from normscope.nn import build as build_ours


def ours(name: str, scheme: str, depth: int, width: int, **options: Any) -> nn.Module:
    """A model of `normscope.nn`, with a head for every 16 features."""
    heads = options.pop("heads", width // 16)
    return build_ours(name, scheme=scheme, depth=depth, width=width, heads=heads, **options)


def of_transformers(auto: str, model_type: str, **options: Any) -> nn.Module:
    """A model of transformers with random weights, by its auto class and its type."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **options)
    built: nn.Module = getattr(transformers, auto).from_config(config)
    return built.train()


class PlainDecoder(nn.Module):
    """Language model of `nn.TransformerEncoderLayer`, (B, T) ids → (B, T, V) logits."""

    def __init__(
        self, vocabulary: int, depth: int, width: int, *, norm_first: bool, dropout: float = 0.0, tie: bool
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 16, 4 * width, dropout, "gelu", batch_first=True, norm_first=norm_first
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.head = nn.Linear(width, vocabulary, bias=False)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        if tie:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


class PlainSeries(nn.Module):
    """Predictor of a series' next value by `nn.TransformerEncoderLayer`, (B, T, 1) → (B, T, 1)."""

    def __init__(self, depth: int, width: int, *, norm_first: bool, length: int = 256) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(1, width), nn.Linear(width, 1)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 4 * width, 0.0, "gelu", batch_first=True, norm_first=norm_first
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()

    def forward(self, values: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(values.shape[1])
        x = self.enter(values) + self.places[: values.shape[1]]
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        predicted: Tensor = self.leave(self.norm(x))
        return predicted


class BlockSeries(nn.Module):
    """The same with the blocks of a scheme of one stream; a last norm where `last` is set."""

    def __init__(self, scheme: str, depth: int, width: int, *, last: bool, length: int = 256) -> None:
        super().__init__()
        config = ModelConfig(scheme=scheme, depth=depth, width=width, heads=2)
        self.enter, self.leave = nn.Linear(1, width), nn.Linear(width, 1)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(config, Where(i + 1, depth), causal=True) for i in range(depth))
        self.norm = nn.LayerNorm(width) if last else nn.Identity()

    def forward(self, values: Tensor) -> Tensor:
        x = self.enter(values) + self.places[: values.shape[1]]
        for block in self.blocks:
            x = block(x)
        predicted: Tensor = self.leave(self.norm(x))
        return predicted
