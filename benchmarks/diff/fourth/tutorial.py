"""Qwen3 and LLaMA in the style of a tutorial: dictionaries of settings, masks by hand, many names."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diff.fourth.base import VOCABULARY, State, renamed

CFG: dict[str, Any] = (
    {"vocab_size": VOCABULARY, "context_length": 64, "emb_dim": 48, "n_heads": 4, "n_layers": 2}
    | {"hidden_dim": 80, "n_kv_groups": 2, "rope_base": 10000.0, "eps": 1e-6, "qk_norm": False}
    | {"head_dim": 12, "above": 1, "last_eps": 1e-6, "qk_eps": 1e-6, "scale_by": None, "sorted": True}
    | {"gate": "silu", "halves": True, "qkv_bias": False, "plus": 0.0, "ones": False}
)


class RMSNorm(nn.Module):
    """RMSNorm with float32 inside, and an optional shift."""

    def __init__(self, emb_dim: int, eps: float = 1e-6, plus: float = 0.0) -> None:
        super().__init__()
        self.eps, self.plus = eps, plus
        self.scale = nn.Parameter(torch.ones(emb_dim) - plus)

    def forward(self, x: Tensor) -> Tensor:
        input_dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(dim=-1, keepdim=True)
        norm_x = x * torch.rsqrt(variance + self.eps)
        scale = self.scale + self.plus if self.plus else self.scale
        return (norm_x * scale).to(input_dtype)


def compute_rope_params(head_dim: int, theta_base: float, context_length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions."""
    inv_freq = 1.0 / (theta_base ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.arange(context_length)[:, None] * inv_freq[None, :]
    angles = torch.cat([angles, angles], dim=1)
    return torch.cos(angles), torch.sin(angles)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, halves: bool) -> Tensor:
    """Rotate halves; else neighbours."""
    _, _, seq_len, head_dim = x.shape
    cos, sin = cos[:seq_len].unsqueeze(0).unsqueeze(0), sin[:seq_len].unsqueeze(0).unsqueeze(0)
    if not halves:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        half = head_dim // 2
        cos, sin = (t[..., :half].repeat_interleave(2, -1) for t in (cos, sin))
        return x * cos + turned * sin
    x1, x2 = x[..., : head_dim // 2], x[..., head_dim // 2 :]
    return (x * cos) + (torch.cat((-x2, x1), dim=-1) * sin)


class GroupedQueryAttention(nn.Module):
    """Attention with groups."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.num_heads, self.num_kv_groups, self.head_dim = (
            cfg["n_heads"],
            cfg["n_kv_groups"],
            cfg["head_dim"],
        )
        self.group_size = self.num_heads // self.num_kv_groups
        self.d_out = self.num_heads * self.head_dim
        bias = cfg["qkv_bias"]
        self.W_query = nn.Linear(cfg["emb_dim"], self.d_out, bias=bias)
        self.W_key = nn.Linear(cfg["emb_dim"], self.num_kv_groups * self.head_dim, bias=bias)
        self.W_value = nn.Linear(cfg["emb_dim"], self.num_kv_groups * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(self.d_out, cfg["emb_dim"], bias=False)
        if cfg["qk_norm"]:
            self.q_norm = RMSNorm(self.head_dim, cfg["qk_eps"])
            self.k_norm = RMSNorm(self.head_dim, cfg["qk_eps"])
        self.cfg = cfg

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, num_tokens, _ = x.shape
        queries = self.W_query(x).view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        keys = self.W_key(x).view(b, num_tokens, self.num_kv_groups, self.head_dim).transpose(1, 2)
        values = self.W_value(x).view(b, num_tokens, self.num_kv_groups, self.head_dim).transpose(1, 2)
        if self.cfg["qk_norm"]:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries = apply_rope(queries, cos, sin, self.cfg["halves"])
        keys = apply_rope(keys, cos, sin, self.cfg["halves"])
        if self.cfg["sorted"]:
            keys = keys.repeat_interleave(self.group_size, dim=1)
            values = values.repeat_interleave(self.group_size, dim=1)
        else:
            keys, values = keys.tile(1, self.group_size, 1, 1), values.tile(1, self.group_size, 1, 1)
        attn_scores = queries @ keys.transpose(2, 3)
        attn_scores = attn_scores.masked_fill(mask, -torch.inf)
        attn_weights = torch.softmax(attn_scores / (self.cfg["scale_by"] or self.head_dim) ** 0.5, dim=-1)
        context = (attn_weights @ values).transpose(1, 2).reshape(b, num_tokens, self.d_out)
        return self.out_proj(context)


class FeedForward(nn.Module):
    """Feed-forward."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.fc1 = nn.Linear(cfg["emb_dim"], cfg["hidden_dim"], bias=False)
        self.fc2 = nn.Linear(cfg["emb_dim"], cfg["hidden_dim"], bias=False)
        self.fc3 = nn.Linear(cfg["hidden_dim"], cfg["emb_dim"], bias=False)
        self.gate = getattr(nn.functional, cfg["gate"])

    def forward(self, x: Tensor) -> Tensor:
        x_fc1 = self.fc1(x)
        x_fc2 = self.fc2(x)
        return self.fc3(self.gate(x_fc1) * x_fc2)


class TransformerBlock(nn.Module):
    """Layer that names its shortcuts."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.att = GroupedQueryAttention(cfg)
        self.ff = FeedForward(cfg)
        self.norm1 = RMSNorm(cfg["emb_dim"], cfg["eps"], cfg["plus"])
        self.norm2 = RMSNorm(cfg["emb_dim"], cfg["eps"], cfg["plus"])

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shortcut = x
        x = self.norm1(x)
        x = self.att(x, mask, cos, sin)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.ff(x)
        return x + shortcut


class TutorialModel(nn.Module):
    """Language model of a tutorial."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(cfg["vocab_size"], cfg["emb_dim"])
        self.trf_blocks = nn.ModuleList([TransformerBlock(cfg) for _ in range(cfg["n_layers"])])
        self.final_norm = RMSNorm(cfg["emb_dim"], cfg["last_eps"], cfg["plus"])
        self.out_head = nn.Linear(cfg["emb_dim"], cfg["vocab_size"], bias=False)
        cos, sin = compute_rope_params(cfg["head_dim"], cfg["rope_base"], cfg["context_length"])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.cfg = cfg
        for name, parameter in self.named_parameters():
            if cfg["ones"] and name.endswith(("norm1.scale", "norm2.scale", "final_norm.scale")):
                nn.init.ones_(parameter)

    def forward(self, in_idx: Tensor) -> Tensor:
        x = self.tok_emb(in_idx)
        n = x.shape[1]
        mask = torch.triu(torch.ones(n, n, device=x.device, dtype=torch.bool), diagonal=self.cfg["above"])
        for block in self.trf_blocks:
            x = block(x, mask, self.cos, self.sin)
        return self.out_head(self.final_norm(x))


def tutorial(**options: Any) -> nn.Module:
    """A model in the style of a tutorial."""
    return TutorialModel({**CFG, **options})


TUTORIAL_NAMES = (
    (r"^model\.embed_tokens", "tok_emb"),
    (r"^model\.layers", "trf_blocks"),
    (r"^model\.norm\.weight", "final_norm.scale"),
    (r"^lm_head", "out_head"),
    (r"self_attn\.q_proj", "att.W_query"),
    (r"self_attn\.k_proj", "att.W_key"),
    (r"self_attn\.v_proj", "att.W_value"),
    (r"self_attn\.o_proj", "att.out_proj"),
    (r"self_attn\.([qk])_norm\.weight", r"att.\1_norm.scale"),
    (r"mlp\.gate_proj", "ff.fc1"),
    (r"mlp\.up_proj", "ff.fc2"),
    (r"mlp\.down_proj", "ff.fc3"),
    (r"input_layernorm\.weight", "norm1.scale"),
    (r"post_attention_layernorm\.weight", "norm2.scale"),
)


def to_tutorial(state: State) -> State:
    """A tutorial's weights."""
    return renamed(state, *TUTORIAL_NAMES)


def to_tutorial_plus(state: State) -> State:
    """A tutorial's weights where the gain is held as 1 + γ."""
    made = to_tutorial(state)
    return {k: v - 1 if "norm" in k and "att." not in k else v for k, v in made.items()}
