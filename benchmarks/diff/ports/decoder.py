"""A decoder as a user writes it.

`Port` has the options of GPT-2, LLaMA, OLMo-2 and Gemma-2; `Config.layers` changes them in single layers.
Its modules have the names of no published model.
"""

import torch
from torch import Tensor, nn

from benchmarks.diff.ports.blocks import Attention, Config, Mlp, Norm, Scaled


class Layer(nn.Module):
    """Two branches, with norms before them, after them or on the stream."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.attn, self.mlp = Attention(config), Mlp(config)
        for place in ("in", "out", "stream"):
            if getattr(config, f"norm_{place}"):
                setattr(self, f"{place}_1", Norm(config))
                setattr(self, f"{place}_2", Norm(config))

    def forward(self, x: Tensor) -> Tensor:
        if self.config.parallel:
            return x + self.added(x, self.attn, 1)[0] + self.added(x, self.mlp, 2)[0]
        for number, branch in ((1, self.attn), (2, self.mlp)):
            added, normed = self.added(x, branch, number)
            x = (normed if self.config.residual == "normed" else x) + added
            if self.config.norm_stream:
                x = getattr(self, f"stream_{number}")(x)
        return x

    def added(self, x: Tensor, branch: nn.Module, number: int) -> tuple[Tensor, Tensor]:
        """The added term of a branch, and its input."""
        config = self.config
        normed = getattr(self, f"in_{number}")(x) if config.norm_in else x
        if config.detach == "branch input":
            normed = normed.detach()
        added = branch(normed)
        if config.norm_out:
            added = getattr(self, f"out_{number}")(added)
        if config.gradient != 1:
            added = Scaled.apply(added, config.gradient)
        return added * config.branch if config.branch != 1 else added, normed


class Port(nn.Module):
    """The decoder: ids (B, T) → logits (B, T, V)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.tok = nn.Embedding(config.vocabulary, config.width)
        if config.positions == "learnt":
            self.pos = nn.Embedding(config.length + 2, config.width)
        self.layers = nn.ModuleList(Layer(config.at(each)) for each in range(config.depth))
        self.last = Norm(config) if config.norm_final else nn.Identity()
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if config.tied:
            self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        config = self.config
        x = self.tok(ids)
        if config.embed != 1:
            x = x * config.embed
        if config.positions == "learnt":
            x = x + self.pos(torch.arange(ids.shape[1]) + config.shift)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.last(x))
        return (
            logits if config.cap_final is None else config.cap_final * torch.tanh(logits / config.cap_final)
        )
