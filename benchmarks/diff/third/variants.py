"""Qwen3, OLMo2 and NanoChat in the styles of their own and of teaching code."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diff.families import State
from benchmarks.diff.third.base import Style, blocks, renamed

V, T, W, L, H, KV, D, HIDDEN = 89, 48, 48, 2, 4, 2, 16, 96

CFG: dict[str, Any] = {
    "vocab_size": V,
    "context_length": T,
    "emb_dim": W,
    "n_heads": H,
    "n_layers": L,
    "hidden_dim": HIDDEN,
    "head_dim": D,
    "n_kv_groups": KV,
    "rope_base": 1000000.0,
}


class ScratchNorm(nn.Module):
    """RMSNorm with `scale`."""

    def __init__(self, emb_dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(emb_dim))

    def forward(self, x: Tensor) -> Tensor:
        input_dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(dim=-1, keepdim=True)
        return (x * torch.rsqrt(variance + self.eps) * self.scale).to(input_dtype)


def compute_rope_params(head_dim: int, theta_base: float, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of halves."""
    inv_freq = 1.0 / (theta_base ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.arange(length).float().unsqueeze(1) * inv_freq.unsqueeze(0)
    angles = torch.cat([angles, angles], dim=1)
    return torch.cos(angles), torch.sin(angles)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves rotated by tables."""
    seq_len, head_dim = x.shape[-2:]
    x1, x2 = x[..., : head_dim // 2], x[..., head_dim // 2 :]
    cos, sin = cos[:seq_len, :][None, None], sin[:seq_len, :][None, None]
    return (x * cos) + (torch.cat((-x2, x1), dim=-1) * sin)


class GroupedQueryAttention(nn.Module):
    """Attention of a notebook on Qwen3."""

    def __init__(self, cfg: dict[str, Any], slip: str) -> None:
        super().__init__()
        self.num_heads, self.num_kv_groups = cfg["n_heads"], cfg["n_kv_groups"]
        self.group_size, self.head_dim = self.num_heads // self.num_kv_groups, cfg["head_dim"]
        inner = self.num_heads * self.head_dim
        self.W_query = nn.Linear(cfg["emb_dim"], inner, bias=False)
        self.W_key = nn.Linear(cfg["emb_dim"], self.num_kv_groups * self.head_dim, bias=False)
        self.W_value = nn.Linear(cfg["emb_dim"], self.num_kv_groups * self.head_dim, bias=False)
        self.out_proj = nn.Linear(inner, cfg["emb_dim"], bias=False)
        self.q_norm = self.k_norm = None
        if slip != "no QK-norm":
            eps = 1e-3 if slip == "eps of the QK-norm" else 1e-6
            self.q_norm, self.k_norm = ScratchNorm(self.head_dim, eps), ScratchNorm(self.head_dim, eps)
        self.slip = slip

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, n, _ = x.shape
        queries = self.W_query(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        keys = self.W_key(x).view(b, n, self.num_kv_groups, self.head_dim).transpose(1, 2)
        values = self.W_value(x).view(b, n, self.num_kv_groups, self.head_dim).transpose(1, 2)
        if self.slip == "rotated, then normed":
            queries, keys = apply_rope(queries, cos, sin), apply_rope(keys, cos, sin)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        if self.slip != "rotated, then normed":
            queries, keys = apply_rope(queries, cos, sin), apply_rope(keys, cos, sin)
        keys = keys.repeat_interleave(self.group_size, dim=1)
        values = values.repeat_interleave(self.group_size, dim=1)
        attn_scores = (queries @ keys.transpose(2, 3)).masked_fill(mask, -torch.inf)
        attn_weights = torch.softmax(attn_scores / self.head_dim**0.5, dim=-1)
        context = (attn_weights @ values).transpose(1, 2).reshape(b, n, -1)
        return self.out_proj(context)


class ScratchBlock(nn.Module):
    """Block of a notebook on Qwen3, with `shortcut`."""

    def __init__(self, cfg: dict[str, Any], slip: str) -> None:
        super().__init__()
        self.att = GroupedQueryAttention(cfg, slip)
        self.ff = nn.ModuleDict(
            {
                "fc1": nn.Linear(cfg["emb_dim"], cfg["hidden_dim"], bias=False),
                "fc2": nn.Linear(cfg["emb_dim"], cfg["hidden_dim"], bias=False),
                "fc3": nn.Linear(cfg["hidden_dim"], cfg["emb_dim"], bias=False),
            }
        )
        self.norm1, self.norm2 = ScratchNorm(cfg["emb_dim"]), ScratchNorm(cfg["emb_dim"])
        self.slip = slip

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shortcut = x
        x = self.norm1(x)
        x = self.att(x, mask, cos, sin)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.ff["fc3"](F.silu(self.ff["fc1"](x)) * self.ff["fc2"](x))
        return x * (2 * L) ** -0.5 + shortcut if self.slip == "scaled branch" else x + shortcut


class Qwen3Model(nn.Module):
    """Qwen3 in the style of a notebook that builds it from scratch, with a dict of settings."""

    cos: Tensor
    sin: Tensor

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        cfg = {**CFG, "rope_base": 10000.0} if slip == "base of others" else CFG
        self.tok_emb = nn.Embedding(cfg["vocab_size"], cfg["emb_dim"])
        self.trf_blocks = nn.ModuleList([ScratchBlock(cfg, slip) for _ in range(cfg["n_layers"])])
        self.final_norm = ScratchNorm(cfg["emb_dim"])
        self.out_head = nn.Linear(cfg["emb_dim"], cfg["vocab_size"], bias=False)
        cos, sin = compute_rope_params(cfg["head_dim"], cfg["rope_base"], cfg["context_length"])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, in_idx: Tensor) -> Tensor:
        x = self.tok_emb(in_idx)
        n = x.shape[1]
        mask = torch.triu(torch.ones(n, n, device=x.device, dtype=torch.bool), diagonal=1)
        for block in self.trf_blocks:
            x = block(x, mask, self.cos, self.sin)
        return self.out_head(self.final_norm(x))


def to_scratch(state: State) -> State:
    """The names of the notebook."""
    names = {
        "input_layernorm.weight": "norm1.scale",
        "post_attention_layernorm.weight": "norm2.scale",
        "self_attn.q_proj": "att.W_query",
        "self_attn.k_proj": "att.W_key",
        "self_attn.v_proj": "att.W_value",
        "self_attn.o_proj": "att.out_proj",
        "self_attn.q_norm.weight": "att.q_norm.scale",
        "self_attn.k_norm.weight": "att.k_norm.scale",
        "mlp.gate_proj": "ff.fc1",
        "mlp.up_proj": "ff.fc2",
        "mlp.down_proj": "ff.fc3",
    }
    outer = {
        "model.embed_tokens": "tok_emb",
        "model.norm.weight": "final_norm.scale",
        "lm_head": "out_head",
    }
    made = renamed(state, outer)
    for i, block in enumerate(blocks(state, "model.layers")):
        made |= renamed(block, names, f"trf_blocks.{i}.")
    return made


class OLMoBlock(nn.Module):
    """Block of OLMo 2 in the names of its own code: norms on the outputs, one norm over all queries."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.fused_dims = (W, W // 2, W // 2)
        self.att_proj = nn.Linear(W, sum(self.fused_dims), bias=False)
        per_head = slip == "QK-norm by head"
        self.q_norm = nn.RMSNorm(W // H if per_head else W, 1e-6)
        self.k_norm = nn.RMSNorm(W // H if per_head else W // 2, 1e-6)
        self.attn_out = nn.Linear(W, W, bias=False)
        self.attn_norm, self.ff_norm = nn.RMSNorm(W, 1e-6), nn.RMSNorm(W, 1e-6)
        self.ff_proj, self.ff_out = nn.Linear(W, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, W, bias=False)
        self.slip, self.per_head = slip, per_head

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.att_proj(x).split(self.fused_dims, dim=-1)
        if not self.per_head:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.unflatten(-1, (-1, W // H)).transpose(1, 2) for each in (q, k, v))
        if self.per_head:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        k, v = (torch.repeat_interleave(each, H // KV, dim=1) for each in (k, v))
        bias = torch.zeros(n, n, dtype=x.dtype).masked_fill_(
            torch.ones(n, n, dtype=torch.bool).triu(1), torch.finfo(x.dtype).min
        )
        att = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None, None])
        return self.attn_out(att.transpose(1, 2).contiguous().view(b, n, W))

    def feed(self, x: Tensor) -> Tensor:
        up, gate = self.ff_proj(x).chunk(2, dim=-1)
        return self.ff_out(F.silu(gate) * up)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.slip == "norms before the branches":
            x = x + self.attention(self.attn_norm(x), cos, sin)
            return x + self.feed(self.ff_norm(x))
        x = x + self.attn_norm(self.attention(x, cos, sin))
        return x + self.ff_norm(self.feed(x))


class OLMo(nn.Module):
    """OLMo 2 in the style of its own code: modules in a `transformer` dict."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(V, W)})
        self.transformer.update({"blocks": nn.ModuleList([OLMoBlock(slip) for _ in range(L)])})
        self.transformer.update({"ln_f": nn.RMSNorm(W, 1e-6), "ff_out": nn.Linear(W, V, bias=False)})
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.transformer["wte"](input_ids)
        cos, sin = compute_rope_params(W // H, 500000.0, input_ids.shape[1])
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for block in self.transformer["blocks"]:  # type: ignore[attr-defined]
            x = block(x, cos, sin)
        return self.transformer["ff_out"](self.transformer["ln_f"](x))


def to_olmo(state: State) -> State:
    """Fused projections of OLMo's own code, up before gate."""
    outer = {
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "lm_head": "transformer.ff_out",
    }
    names = {
        "self_attn.q_norm": "q_norm",
        "self_attn.k_norm": "k_norm",
        "self_attn.o_proj": "attn_out",
        "post_attention_layernorm": "attn_norm",
        "post_feedforward_layernorm": "ff_norm",
        "mlp.down_proj": "ff_out",
    }
    made = renamed(state, outer)
    for i, block in enumerate(blocks(state, "model.layers")):
        to = f"transformer.blocks.{i}."
        made |= renamed(block, names, to)
        made[to + "att_proj.weight"] = torch.cat([block[f"self_attn.{x}_proj.weight"] for x in "qkv"])
        made[to + "ff_proj.weight"] = torch.cat([block[f"mlp.{x}_proj.weight"] for x in ("up", "gate")])
    return made


def norm(x: Tensor) -> Tensor:
    """RMSNorm without a gain."""
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves turned backwards, as in modded-nanogpt."""
    half = x.shape[3] // 2
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat([x1 * cos + x2 * sin, x1 * (-sin) + x2 * cos], 3)


class ChatBlock(nn.Module):
    """Block of nanochat: norms as a function, squared ReLU."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.c_q = nn.Linear(W, W, bias=False)
        self.c_k, self.c_v = nn.Linear(W, W // 2, bias=False), nn.Linear(W, W // 2, bias=False)
        self.c_proj = nn.Linear(W, W, bias=False)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(W, HIDDEN, bias=False)})
        self.mlp["c_proj"] = nn.Linear(HIDDEN, W, bias=False)
        self.slip = slip

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, n, _ = x.size()
        q = self.c_q(x).view(b, n, H, -1)
        k, v = self.c_k(x).view(b, n, KV, -1), self.c_v(x).view(b, n, KV, -1)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if self.slip != "no QK-norm":
            q, k = norm(q), norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, n, -1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(norm(x), cos, sin)
        h = F.relu(self.mlp["c_fc"](norm(x)))
        return x + self.mlp["c_proj"](h if self.slip == "relu not squared" else h.square())


class Chat(nn.Module):
    """NanoChat in the style of its own code."""

    cos: Tensor
    sin: Tensor

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(V, W), "h": nn.ModuleList([ChatBlock(slip) for _ in range(L)])}
        )
        self.lm_head = nn.Linear(W, V, bias=False)
        d = W // H
        inv_freq = 1.0 / (10000 ** (torch.arange(0, d, 2, dtype=torch.float32) / d))
        freqs = torch.outer(torch.arange(T, dtype=torch.float32), inv_freq)
        self.register_buffer("cos", freqs.cos()[None, :, None, :], persistent=False)
        self.register_buffer("sin", freqs.sin()[None, :, None, :], persistent=False)
        for name, p in self.named_parameters():
            deep = name.endswith("c_proj.weight") and "mlp" not in name
            nn.init.normal_(p, std=0.02 / math.sqrt(2 * L) if deep else 0.02)
        self.slip = slip

    def forward(self, idx: Tensor) -> Tensor:
        n = idx.shape[1]
        x = self.transformer["wte"](idx)
        if self.slip != "no norm of the embedding":
            x = norm(x)
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = block(x, self.cos[:, :n], self.sin[:, :n])
        logits = self.lm_head(norm(x))
        return logits if self.slip == "no cap" else 2 * torch.tanh(logits / 2)


def to_chat(state: State) -> State:
    """The names of nanochat."""
    made = renamed(state, {"model.embed_tokens": "transformer.wte", "lm_head": "lm_head"})
    names = {f"self_attn.{x}_proj": f"c_{x}" for x in "qkv"}
    names |= {"self_attn.o_proj": "c_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    for i, block in enumerate(blocks(state, "model.layers")):
        made |= renamed(block, names, f"transformer.h.{i}.")
    return made


_BLOCKS = "transformer.blocks.{}"
_H = "transformer.h.{}"
SCRATCH = Style(
    Qwen3Model,
    to_scratch,
    ("trf_blocks.{}",),
    ("trf_blocks.{}.att", "trf_blocks.{}.norm1"),
    ("trf_blocks.{}.ff", "trf_blocks.{}.norm2"),
    ("tok_emb",),
    ("final_norm", "out_head"),
)
OLMO = Style(
    OLMo,
    to_olmo,
    (_BLOCKS,),
    tuple(f"{_BLOCKS}.{x}" for x in ("att_proj", "q_norm", "k_norm", "attn_out", "attn_norm")),
    tuple(f"{_BLOCKS}.{x}" for x in ("ff_proj", "ff_out", "ff_norm")),
    ("transformer.wte", "transformer"),
    ("transformer.ln_f", "transformer.ff_out"),
)
CHAT = Style(
    Chat,
    to_chat,
    (_H,),
    tuple(f"{_H}.{x}" for x in ("c_q", "c_k", "c_v", "c_proj")),
    (f"{_H}.mlp",),
    ("transformer.wte", "transformer"),
    ("lm_head",),
)
