"""GPT-2 in the styles of minGPT and nanoGPT."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diff.families import State
from benchmarks.diff.third.base import Style, in_layer, transposed

V, T, W, L, H = 97, 40, 48, 3, 4


class NewGELU(nn.Module):
    """GELU by tanh, spelled out."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class CausalSelfAttention(nn.Module):
    """Attention of minGPT."""

    bias: Tensor

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.c_attn = nn.Linear(W, 3 * W, bias=slip != "bias dropped")
        self.c_proj = nn.Linear(W, W)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        ones = torch.tril(torch.ones(T, T), diagonal=1 if slip == "mask off by one" else 0)
        self.register_buffer("bias", ones.view(1, 1, T, T), persistent=False)
        self.slip = slip

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(W, dim=2)
        if self.slip == "k before q":
            q, k = k, q
        k = k.view(b, t, H, c // H).transpose(1, 2)
        q = q.view(b, t, H, c // H).transpose(1, 2)
        v = v.view(b, t, H, c // H).transpose(1, 2)
        scale = 1.0 / math.sqrt(c if self.slip == "scale of the width" else k.size(-1))
        att = (q @ k.transpose(-2, -1)) * scale
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(b, t, c)
        return self.resid_dropout(self.c_proj(y))


class MinBlock(nn.Module):
    """Block of minGPT."""

    def __init__(self, slip: str, closure: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(W)
        self.attn = CausalSelfAttention(slip)
        self.ln_2 = nn.LayerNorm(W)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(W, 4 * W), "c_proj": nn.Linear(4 * W, W), "act": NewGELU()}
        )
        if closure:
            m = self.mlp
            self.mlpf = lambda x: m["c_proj"](m["act"](m["c_fc"](x)))  # type: ignore[method-assign]
        self.slip = slip

    def mlpf(self, x: Tensor) -> Tensor:
        return self.mlp["c_proj"](self.mlp["act"](self.mlp["c_fc"](x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.slip == "residual of the normed":
            x = self.ln_1(x)
            x = x + self.attn(x)
        else:
            x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class MinGPT(nn.Module):
    """GPT-2 in the style of minGPT, with its closure over the feed-forward or with a method."""

    def __init__(self, slip: str = "", closure: bool = False) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(V, W),
                "wpe": nn.Embedding(T, W),
                "h": nn.ModuleList([MinBlock(slip, closure) for _ in range(L)]),
                "ln_f": nn.LayerNorm(W),
            }
        )
        self.lm_head = nn.Linear(W, V, bias=False)
        self.slip = slip
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight") and slip != "no depth in the start":
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * L))
        if slip != "untied":
            self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=1.0 if self.slip == "table of 1" else 0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device).unsqueeze(0)
        if self.slip == "positions from 1":
            pos = pos + 1
        x = self.transformer["wte"](idx) + self.transformer["wpe"](pos)
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = block(x)
        logits = self.lm_head(x if self.slip == "no final norm" else self.transformer["ln_f"](x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


CONV = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def to_min_but_square(state: State) -> State:
    """The same with the square matrices forgotten."""
    return transposed(state, "c_attn.weight", "mlp.c_proj.weight", "c_fc.weight")


def to_min(state: State) -> State:
    """Matrices of `Conv1D` transposed, as minGPT's from_pretrained does."""
    return transposed(state, *CONV)


@dataclass
class GPTConfig:
    """Configuration of nanoGPT."""

    block_size: int = T
    vocab_size: int = V
    n_layer: int = L
    n_head: int = H
    n_embd: int = W
    dropout: float = 0.0
    bias: bool = True
    eps: float = 1e-5
    slip: str = ""


class LayerNorm(nn.Module):
    """LayerNorm with an optional bias."""

    def __init__(self, ndim: int, bias: bool, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class NanoAttention(nn.Module):
    """Attention of nanoGPT."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        shape = (b, t, self.config.n_head, -1)
        q, k, v = (each.view(*shape).transpose(1, 2) for each in (q, k, v))
        causal = self.config.slip != "not causal"
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=causal)
        if self.config.slip == "heads not moved back":
            return self.c_proj(y.contiguous().view(b, t, c))
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class NanoMLP(nn.Module):
    """Feed-forward of nanoGPT."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU("none" if config.slip == "gelu by erf" else "tanh")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.p = 0.1 if config.slip == "dropout always on" else 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(self.gelu(self.c_fc(x))), self.p)


class NanoBlock(nn.Module):
    """Block of nanoGPT."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.bias, config.eps)
        self.attn = NanoAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, config.bias, config.eps)
        self.mlp = NanoMLP(config)
        self.slip = config.slip

    def forward(self, x: Tensor) -> Tensor:
        if self.slip == "post-norm":
            x = self.ln_1(x + self.attn(x))
            return self.ln_2(x + self.mlp(x))
        x = x + self.attn(self.ln_1(x))
        if self.slip == "wrong residual":
            y = self.ln_2(x)
            return y + self.mlp(y)
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """GPT-2 in the style of nanoGPT; the loss only with targets."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        config = GPTConfig(eps=1e-6 if slip == "eps" else 1e-5, slip=slip)
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(
                    [NanoBlock(replace(config, slip=in_layer(slip, i))) for i in range(config.n_layer)]
                ),
                "ln_f": LayerNorm(config.n_embd, bias=config.bias, eps=1e-5),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        for name, p in self.named_parameters():
            if p.dim() > 1:
                depth = math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 1.0
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / depth)
            elif "ln_" not in name and slip != "biases of torch":
                torch.nn.init.zeros_(p)

    def forward(self, idx: Tensor) -> Tensor:
        pos = torch.arange(0, idx.shape[1], dtype=torch.long, device=idx.device)
        scale = math.sqrt(W) if self.config.slip == "scaled embedding" else 1.0
        tok_emb = self.transformer["wte"](idx) * scale
        x = self.transformer["drop"](tok_emb + self.transformer["wpe"](pos))
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


_OURS = (
    ("transformer.h.{}",),
    ("transformer.h.{}.attn", "transformer.h.{}.ln_1"),
    ("transformer.h.{}.mlp", "transformer.h.{}.ln_2"),
    ("transformer.wte", "transformer.wpe", "transformer.drop", "transformer"),
    ("transformer.ln_f", "lm_head", "transformer"),
)
STYLES = {
    "minGPT": Style(MinGPT, to_min, *_OURS),
    "nanoGPT": Style(NanoGPT, to_min, *_OURS),
    "nanoGPT of square matrices untransposed": Style(NanoGPT, to_min_but_square, *_OURS),
}
