"""Pythia, Qwen3, Gemma-2, OLMo-2 and Granite in lit-gpt's style: one model for all, by its configuration."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.diff.fourth.base import VOCABULARY, State, by_head, renamed


@dataclass
class Config:
    """Configuration; the last lines hold mistakes."""

    n_layer: int = 2
    n_head: int = 4
    n_query_groups: int = 2
    head_size: int = 12
    n_embd: int = 48
    intermediate_size: int = 80
    padded_vocab_size: int = VOCABULARY
    block_size: int = 64
    rotary_percentage: float = 1.0
    rope_base: float = 10000.0
    parallel_residual: bool = False
    bias: bool = False
    norm_class_name: str = "RMSNorm"
    norm_eps: float = 1e-6
    norm_unit_offset: bool = False
    norm_qk: str = ""
    norm_in: bool = True
    norm_out: bool = False
    mlp_class_name: str = "LLaMAMLP"
    gelu_approximate: str = "none"
    scale_embeddings: float = 1.0
    attention_scores_scalar: float | None = None
    attention_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window_size: int | None = None
    sliding_window_layer_stride: int = 2
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    lm_head_bias: bool = False
    tied: bool = False
    final_norm: bool = True
    qk_after_rope: bool = False
    mqa_order: str = "groups"
    rope_layers: tuple[int, ...] = (0, 1)


class RMSNorm(nn.Module):
    """RMSNorm with an optional unit offset."""

    def __init__(self, size: int, eps: float, add_unit_offset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if add_unit_offset else torch.ones(size))
        self.eps, self.add_unit_offset = eps, add_unit_offset

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        norm_x = torch.mean(x * x, dim=-1, keepdim=True)
        x_normed = x * torch.rsqrt(norm_x + self.eps)
        weight = (1 + self.weight) if self.add_unit_offset else self.weight
        return (x_normed * weight.float()).to(dtype=dtype)


def norm(config: Config, size: int | None = None) -> nn.Module:
    """A norm of the configuration's class."""
    if config.norm_class_name == "RMSNorm":
        return RMSNorm(size or config.n_embd, config.norm_eps, config.norm_unit_offset)
    return nn.LayerNorm(size or config.n_embd, eps=config.norm_eps)


def build_rope_cache(seq_len: int, n_elem: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each twice."""
    theta = 1.0 / (base ** (torch.arange(0, n_elem, 2).float() / n_elem))
    idx_theta = torch.outer(torch.arange(seq_len), theta).repeat(1, 2)
    return torch.cos(idx_theta), torch.sin(idx_theta)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves."""
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (rotated * sin)).to(dtype=x.dtype)


class CausalSelfAttention(nn.Module):
    """Attention with one projection that holds queries, key and value of each group together."""

    def __init__(self, config: Config, block_idx: int) -> None:
        super().__init__()
        rows = (config.n_head + 2 * config.n_query_groups) * config.head_size
        self.attn = nn.Linear(config.n_embd, rows, bias=config.bias)
        self.proj = nn.Linear(config.head_size * config.n_head, config.n_embd, bias=config.bias)
        if config.norm_qk:
            full = config.norm_qk == "full"
            self.norm_q = norm(config, config.head_size * (config.n_head if full else 1))
            self.norm_k = norm(config, config.head_size * (config.n_query_groups if full else 1))
        stride, size = config.sliding_window_layer_stride, config.sliding_window_size
        self.window = size if size and block_idx % stride == 0 else None
        self.has_rope = block_idx in config.rope_layers
        self.config = config

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.config
        B, T, _ = x.size()
        q_per_kv = c.n_head // c.n_query_groups
        qkv = self.attn(x)
        if c.mqa_order == "groups":
            qkv = qkv.view(B, T, c.n_query_groups, q_per_kv + 2, c.head_size)
            q, k, v = qkv.split((q_per_kv, 1, 1), dim=3)
        else:
            sizes = [n * c.head_size for n in (c.n_head, c.n_query_groups, c.n_query_groups)]
            q, k, v = qkv.split(sizes, dim=-1)
        q = q.reshape(B, T, c.n_head, c.head_size)
        k = k.reshape(B, T, c.n_query_groups, c.head_size)
        v = v.reshape(B, T, c.n_query_groups, c.head_size)
        if c.norm_qk and not c.qk_after_rope:
            q, k = self.normed(q, self.norm_q), self.normed(k, self.norm_k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.has_rope:
            n = cos.shape[-1]
            q = torch.cat((apply_rope(q[..., :n], cos, sin), q[..., n:]), dim=-1)
            k = torch.cat((apply_rope(k[..., :n], cos, sin), k[..., n:]), dim=-1)
        if c.norm_qk and c.qk_after_rope:
            q, k = self.norm_q(q), self.norm_k(k)
        if c.n_query_groups != c.n_head:
            k = k.repeat_interleave(q_per_kv, dim=1)
            v = v.repeat_interleave(q_per_kv, dim=1)
        y = self.scaled_dot_product_attention(q, k, v)
        return self.proj(y.reshape(B, T, c.head_size * c.n_head))

    def normed(self, x: Tensor, how: nn.Module) -> Tensor:
        """Norm of each head, or of all heads together."""
        return how(x.flatten(2)).view_as(x) if self.config.norm_qk == "full" else how(x)

    def scaled_dot_product_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention with the configuration's scale, cap and window."""
        c, T = self.config, q.shape[2]
        scale = 1.0 / math.sqrt(c.attention_scores_scalar or c.head_size)
        mask = torch.ones(T, T, dtype=q.dtype, device=q.device).triu(diagonal=1)
        if self.window is not None:
            mask = mask + torch.ones_like(mask).tril(diagonal=-self.window)
        mask = mask.masked_fill(mask.bool(), float("-inf"))
        if c.attention_logit_softcapping is not None:
            scores = q @ k.mT * scale
            cap = c.attention_logit_softcapping
            scores = torch.tanh(scores / cap) * cap + mask
            return (F.softmax(scores, dim=-1) @ v).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


class GptNeoxMLP(nn.Module):
    """Feed-forward without a gate."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=config.bias)
        self.approximate = config.gelu_approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate=self.approximate))


class LLaMAMLP(nn.Module):
    """Feed-forward with a gate."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.fc_2 = nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.silu(self.fc_1(x)) * self.fc_2(x))


class GemmaMLP(LLaMAMLP):
    """Feed-forward with a gate of GELU."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.approximate = config.gelu_approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc_1(x), approximate=self.approximate) * self.fc_2(x))


MLPS = {"GptNeoxMLP": GptNeoxMLP, "LLaMAMLP": LLaMAMLP, "GemmaMLP": GemmaMLP}


class Block(nn.Module):
    """Layer."""

    def __init__(self, config: Config, block_idx: int) -> None:
        super().__init__()
        self.norm_1 = norm(config) if config.norm_in else nn.Identity()
        self.attn = CausalSelfAttention(config, block_idx)
        self.post_attention_norm = norm(config) if config.norm_out else nn.Identity()
        self.norm_2 = norm(config) if config.norm_in else nn.Identity()
        self.mlp = MLPS[config.mlp_class_name](config)
        self.post_mlp_norm = norm(config) if config.norm_out else nn.Identity()
        self.config = config

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        scale = self.config.residual_scale
        attention_output = self.post_attention_norm(self.attn(self.norm_1(x), cos, sin))
        if self.config.parallel_residual:
            return attention_output + self.mlp(self.norm_2(x)) + x
        if scale != 1.0:
            x = x + attention_output * scale
            return x + self.post_mlp_norm(self.mlp(self.norm_2(x))) * scale
        x = attention_output + x
        return self.post_mlp_norm(self.mlp(self.norm_2(x))) + x


class GPT(nn.Module):
    """Model in lit-gpt's style."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=config.lm_head_bias)
        table = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.transformer = nn.ModuleDict(
            {
                "wte": table,
                "h": nn.ModuleList(Block(config, idx) for idx in range(config.n_layer)),
                "ln_f": norm(config) if config.final_norm else nn.Identity(),
            }
        )
        if config.tied:
            self.lm_head.weight = table.weight
        elem = int(config.rotary_percentage * config.head_size)
        cos, sin = build_rope_cache(config.block_size, elem, config.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, idx: Tensor) -> Tensor:
        T = idx.size(1)
        x = self.transformer["wte"](idx)
        if self.config.scale_embeddings != 1.0:
            x = x * self.config.scale_embeddings
        for block in self.transformer["h"].children():
            x = block(x, self.cos[:T], self.sin[:T])
        x = self.lm_head(self.transformer["ln_f"](x))
        if self.config.logit_scale != 1.0:
            x = x * self.config.logit_scale
        cap = self.config.final_logit_softcapping
        return x if cap is None else torch.tanh(x / cap) * cap


LIT_NAMES = (
    (r"^model\.embed_tokens", "transformer.wte"),
    (r"^model\.layers", "transformer.h"),
    (r"^model\.norm", "transformer.ln_f"),
    (r"self_attn\.o_proj", "attn.proj"),
    (r"self_attn\.([qk])_norm", r"attn.norm_\1"),
    (r"mlp\.gate_proj", "mlp.fc_1"),
    (r"mlp\.up_proj", "mlp.fc_2"),
    (r"mlp\.down_proj", "mlp.proj"),
)
PRE = (("input_layernorm", "norm_1"), ("post_attention_layernorm", "norm_2"))
POST = (
    ("post_attention_layernorm", "post_attention_norm"),
    ("post_feedforward_layernorm", "post_mlp_norm"),
    ("pre_feedforward_layernorm", "norm_2"),
    ("input_layernorm", "norm_1"),
)


def to_lit(state: State, names: tuple[tuple[str, str], ...] = PRE, groups: int = 2) -> State:
    """Lit-gpt's weights of a LLaMA-like model."""
    made = renamed(state, *names, *LIT_NAMES)
    for layer in range(2):
        for kind in ("weight", "bias"):
            parts = [f"transformer.h.{layer}.self_attn.{part}_proj.{kind}" for part in "qkv"]
            if parts[0] in made:
                made[f"transformer.h.{layer}.attn.attn.{kind}"] = by_head(
                    [made.pop(p) for p in parts], groups
                )
    return made


NEOX_NAMES = (
    (r"^gpt_neox\.embed_in", "transformer.wte"),
    (r"^gpt_neox\.layers", "transformer.h"),
    (r"^gpt_neox\.final_layer_norm", "transformer.ln_f"),
    (r"^embed_out", "lm_head"),
    (r"attention\.query_key_value", "attn.attn"),
    (r"attention\.dense", "attn.proj"),
    (r"mlp\.dense_h_to_4h", "mlp.fc"),
    (r"mlp\.dense_4h_to_h", "mlp.proj"),
    *PRE,
)


def neox_to_lit(state: State) -> State:
    """Lit-gpt's weights of Pythia."""
    return renamed(state, *NEOX_NAMES)


def lit(**options: Any) -> nn.Module:
    """A model in lit-gpt's style."""
    return GPT(Config(**options))
