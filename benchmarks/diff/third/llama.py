"""LLaMA in the styles of llama2.c, lit-gpt and gpt-fast."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diff.families import State
from benchmarks.diff.third.base import Style, blocks, in_layer, neighbours, renamed

V, T, W, L, H, KV, HIDDEN, EPS = 101, 48, 48, 3, 4, 2, 112, 1e-5
D = W // H


class RMSNorm(nn.Module):
    """RMSNorm of Meta's code."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


def precompute_freqs_cis(dim: int, end: int, theta: float) -> Tensor:
    """Rotations as complex numbers."""
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    freqs = torch.outer(torch.arange(end), freqs).float()
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Neighbours as complex numbers, rotated."""
    x_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(x_ * freqs_cis[None, :, None, :]).flatten(3).type_as(x)


def repeat_kv(x: Tensor, n_rep: int, slip: str) -> Tensor:
    """Each head of keys for its group of queries."""
    bs, slen, n, d = x.shape
    if slip == "groups tiled":
        return x.repeat(1, 1, n_rep, 1)
    return x[:, :, :, None, :].expand(bs, slen, n, n_rep, d).reshape(bs, slen, n * n_rep, d)


class MetaAttention(nn.Module):
    """Attention of LLaMA's first code."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.wq = nn.Linear(W, H * D, bias=False)
        self.wk = nn.Linear(W, KV * D, bias=False)
        self.wv = nn.Linear(W, KV * D, bias=False)
        self.wo = nn.Linear(H * D, W, bias=False)
        self.slip = slip

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = apply_rotary_emb(xq.view(bsz, seqlen, H, D), freqs_cis)
        xk = xk.view(bsz, seqlen, KV, D)
        xk = xk if self.slip == "keys not rotated" else apply_rotary_emb(xk, freqs_cis)
        xv = xv.view(bsz, seqlen, KV, D)
        keys, values = (repeat_kv(each, H // KV, self.slip).transpose(1, 2) for each in (xk, xv))
        scores = torch.matmul(xq.transpose(1, 2), keys.transpose(2, 3)) / D**0.5
        scores = F.softmax((scores + mask).float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, values).transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        return self.wo(output)


class MetaFeedForward(nn.Module):
    """SwiGLU with w1, w2, w3."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.w1 = nn.Linear(W, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, W, bias=False)
        self.w3 = nn.Linear(W, HIDDEN, bias=False)
        self.slip = slip

    def forward(self, x: Tensor) -> Tensor:
        if self.slip == "w1 and w3 changed over":
            return self.w2(F.silu(self.w3(x)) * self.w1(x))
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MetaBlock(nn.Module):
    """Block of LLaMA's first code."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.attention, self.feed_forward = MetaAttention(slip), MetaFeedForward(slip)
        self.attention_norm = RMSNorm(W, 1e-6 if slip == "eps of the first code" else EPS)
        self.ffn_norm = RMSNorm(W, 1e-6 if slip == "eps of the first code" else EPS)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        h = x + self.attention.forward(self.attention_norm(x), freqs_cis, mask)
        return h + self.feed_forward.forward(self.ffn_norm(h))


class Meta(nn.Module):
    """LLaMA in the style of Meta's code and llama2.c: rotation of neighbours by complex numbers."""

    freqs_cis: Tensor

    def __init__(self, slip: str = "", theta: float = 10000.0) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(V, W)
        self.layers = torch.nn.ModuleList()
        for _ in range(L):
            self.layers.append(MetaBlock(slip))
        self.norm = RMSNorm(W, EPS)
        self.output = nn.Linear(W, V, bias=False)
        theta = 500000.0 if slip == "base of LLaMA 3" else theta
        self.register_buffer("freqs_cis", precompute_freqs_cis(D, T * 2, theta), persistent=False)
        self.apply(_init)

    def forward(self, tokens: Tensor) -> Tensor:
        seqlen = tokens.shape[1]
        h = self.tok_embeddings(tokens)
        mask = torch.triu(torch.full((1, 1, seqlen, seqlen), float("-inf")), diagonal=1).type_as(h)
        for layer in self.layers:
            h = layer(h, self.freqs_cis[:seqlen], mask)
        return self.output(self.norm(h))


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if getattr(module, "bias", None) is not None:
            torch.nn.init.zeros_(module.bias)  # type: ignore[arg-type]


META = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
OUTER = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}


def to_meta(state: State, *, turned: bool = True) -> State:
    """Meta's names, and queries and keys in the order of neighbours."""
    made = renamed(state, OUTER)
    for i, block in enumerate(blocks(state, "model.layers")):
        if turned:
            for name, heads in (("q", H), ("k", KV)):
                name = f"self_attn.{name}_proj.weight"
                block[name] = neighbours(block[name], heads)
        made |= renamed(block, META, f"layers.{i}.")
    return made


def to_meta_unturned(state: State) -> State:
    """The conversion that forgets the order of channels."""
    return to_meta(state, turned=False)


@dataclass
class LitConfig:
    """Configuration of lit-gpt."""

    n_embd: int = W
    n_head: int = H
    n_query_groups: int = KV
    head_size: int = D
    norm_eps: float = EPS
    slip: str = ""


class LitNorm(nn.Module):
    """RMSNorm of lit-gpt."""

    def __init__(self, size: int, eps: float, add_unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.add_unit_offset = eps, add_unit_offset

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        norm_x = torch.mean(x * x, dim=-1, keepdim=True)
        x_normed = (x * torch.rsqrt(norm_x + self.eps)).to(dtype=dtype)
        return x_normed * ((1 + self.weight) if self.add_unit_offset else self.weight)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated halves."""
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos) + (rotated * sin)


class LitAttention(nn.Module):
    """Attention with a projection of [group, queries + key + value]."""

    def __init__(self, config: LitConfig) -> None:
        super().__init__()
        self.attn = nn.Linear(W, (config.n_head + 2 * config.n_query_groups) * config.head_size, bias=False)
        self.proj = nn.Linear(config.head_size * config.n_head, config.n_embd, bias=False)
        self.config = config

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.size()
        groups, size = self.config.n_query_groups, self.config.head_size
        per = self.config.n_head // groups
        qkv = self.attn(x).view(b, t, groups, per + 2, size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((per, 1, 1), dim=2)
        k, v = (each.expand(b, groups, per, t, size).reshape(b, -1, t, size) for each in (k, v))
        q = apply_rope(q.reshape(b, -1, t, size), cos, sin)
        k = apply_rope(k, cos, sin)
        slip = self.config.slip
        scale = {"scale twice": 1 / size, "scale of the width": W**-0.5}.get(slip, size**-0.5)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True, scale=scale)
        return self.proj(y.transpose(1, 2).reshape(b, t, size * self.config.n_head))


class LitMLP(nn.Module):
    """LLaMAMLP of lit-gpt."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(W, HIDDEN, bias=False)
        self.fc_2 = nn.Linear(W, HIDDEN, bias=False)
        self.proj = nn.Linear(HIDDEN, W, bias=False)
        self.act = F.gelu if slip == "gelu" else F.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.act(self.fc_1(x)) * self.fc_2(x))


class LitBlock(nn.Module):
    """Block of lit-gpt."""

    def __init__(self, config: LitConfig) -> None:
        super().__init__()
        unit = config.slip == "unit offset"
        self.norm_1 = LitNorm(config.n_embd, config.norm_eps, unit)
        self.attn = LitAttention(config)
        self.norm_2 = LitNorm(config.n_embd, config.norm_eps, unit)
        self.mlp = LitMLP(config.slip)
        self.slip = config.slip

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attn(self.norm_1(x), cos, sin)
        if self.slip == "parallel residual":
            return self.mlp(self.norm_2(x)) + h + x
        x = h + x
        return self.mlp(self.norm_2(x)) + x


class Lit(nn.Module):
    """LLaMA in the style of lit-gpt."""

    cos: Tensor
    sin: Tensor

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        config = LitConfig(norm_eps=1e-8 if slip == "eps" else EPS, slip=slip)
        self.lm_head = nn.Linear(config.n_embd, V, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(V, config.n_embd),
                "h": nn.ModuleList(LitBlock(replace(config, slip=in_layer(slip, i))) for i in range(L)),
                "ln_f": LitNorm(config.n_embd, config.norm_eps),
            }
        )
        theta = 1.0 / (10000 ** (torch.arange(0, D, 2).float() / D))
        angles = torch.outer(torch.arange(T), theta).repeat(1, 2)
        self.register_buffer("cos", torch.cos(angles), persistent=False)
        self.register_buffer("sin", torch.sin(angles), persistent=False)
        self.slip = slip
        self.apply(_init)
        if slip == "start by width":
            for p in self.transformer["h"].parameters():
                if p.dim() == 2:
                    nn.init.normal_(p, std=(2 / 5 / W) ** 0.5)

    def forward(self, idx: Tensor) -> Tensor:
        t = idx.size(1)
        x = self.transformer["wte"](idx)
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = block(x, self.cos[:t], self.sin[:t])
        if self.slip == "last norm left out":
            return self.lm_head(x)
        return self.lm_head(self.transformer["ln_f"](x))


def to_lit(state: State) -> State:
    """Queries, key and value of each group together."""
    outer = {
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "lm_head": "lm_head",
    }
    made = renamed(state, outer)
    names = {
        "input_layernorm": "norm_1",
        "post_attention_layernorm": "norm_2",
        "self_attn.o_proj": "attn.proj",
        "mlp.gate_proj": "mlp.fc_1",
        "mlp.up_proj": "mlp.fc_2",
        "mlp.down_proj": "mlp.proj",
    }
    for i, block in enumerate(blocks(state, "model.layers")):
        made |= renamed(block, names, f"transformer.h.{i}.")
        parts = [block[f"self_attn.{name}_proj.weight"].unflatten(0, (KV, -1, D)) for name in "qkv"]
        made[f"transformer.h.{i}.attn.attn.weight"] = torch.cat(parts, 1).flatten(0, 2)
    return made


_META = (
    ("layers.{}",),
    ("layers.{}.attention", "layers.{}.attention_norm"),
    ("layers.{}.feed_forward", "layers.{}.ffn_norm"),
    ("tok_embeddings",),
    ("norm", "output"),
)
STYLES = {
    "llama2.c": Style(Meta, to_meta, *_META),
    "llama2.c of unturned weights": Style(Meta, to_meta_unturned, *_META),
    "lit-gpt": Style(
        Lit,
        to_lit,
        ("transformer.h.{}",),
        ("transformer.h.{}.attn", "transformer.h.{}.norm_1"),
        ("transformer.h.{}.mlp", "transformer.h.{}.norm_2"),
        ("transformer.wte", "transformer"),
        ("transformer.ln_f", "lm_head", "transformer"),
    ),
}
