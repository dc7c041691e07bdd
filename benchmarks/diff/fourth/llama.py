"""LLaMA, Mistral and Qwen2 in the styles of Meta's code and of gpt-fast."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.diff.fourth.base import VOCABULARY, State, fused, renamed, to_pairs

WIDTH, HEADS, GROUPS, HIDDEN, LAYERS = 48, 4, 2, 80, 2
SIZE = WIDTH // HEADS


def published(kind: str, **changes: Any) -> nn.Module:
    """A published type with this family's sizes."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "max_position_embeddings": 64}
    rest = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **sizes, **heads, **{**rest, **changes})
    how = "eager" if kind == "gemma2" else "sdpa"
    return AutoModelForCausalLM.from_config(config, attn_implementation=how)


OPTIONS: dict[str, Any] = (
    {"eps": 1e-6, "theta": 10000.0, "layout": "pairs", "bias": False, "window": 0, "tied": False}
    | {"tile": False, "swap": False, "scale": 1.0, "norm": "rms", "final": True, "cut": False, "early": 0}
    | {"act": "silu", "rotated": "all", "grad": 1.0, "place": "pre", "residual": "stream"}
    | {"start": "as usual"}
)


class RMSNorm(nn.Module):
    """RMSNorm of Meta's code."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


def precompute_freqs_cis(dim: int, end: int, theta: float) -> Tensor:
    """Complex rotations."""
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    freqs = torch.outer(torch.arange(end, device=freqs.device), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(x: Tensor, freqs_cis: Tensor, layout: str) -> Tensor:
    """Rotate neighbours as complex numbers; "halves" is another layout."""
    if layout == "halves":
        a, b = x.chunk(2, dim=-1)
        turned = torch.complex(a, b) * freqs_cis[None, :, None]
        return torch.cat([turned.real, turned.imag], dim=-1)
    complex_x = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(complex_x * freqs_cis[None, :, None]).flatten(3).type_as(x)


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    """Keys or values of each group for all of its queries."""
    bs, slen, n_kv_heads, head_dim = x.shape
    x = x[:, :, :, None, :].expand(bs, slen, n_kv_heads, n_rep, head_dim)
    return x.reshape(bs, slen, n_kv_heads * n_rep, head_dim)


class Attention(nn.Module):
    """Attention of Meta's code."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * SIZE, bias=o["bias"])
        self.wk = nn.Linear(WIDTH, GROUPS * SIZE, bias=o["bias"])
        self.wv = nn.Linear(WIDTH, GROUPS * SIZE, bias=o["bias"])
        self.wo = nn.Linear(HEADS * SIZE, WIDTH, bias=False)
        self.o = o

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bsz, seqlen, HEADS, SIZE)
        xk = xk.view(bsz, seqlen, GROUPS, SIZE)
        xv = xv.view(bsz, seqlen, GROUPS, SIZE)
        if self.o["rotated"] == "all":
            xq = apply_rotary_emb(xq, freqs_cis, self.o["layout"])
            xk = apply_rotary_emb(xk, freqs_cis, self.o["layout"])
        n_rep = HEADS // GROUPS
        if self.o["tile"]:
            keys, values = xk.repeat(1, 1, n_rep, 1), xv.repeat(1, 1, n_rep, 1)
        else:
            keys, values = repeat_kv(xk, n_rep), repeat_kv(xv, n_rep)
        xq, keys, values = (t.transpose(1, 2) for t in (xq, keys, values))
        scores = torch.matmul(xq, keys.transpose(2, 3)) * (self.o["scale"] / math.sqrt(SIZE))
        scores = F.softmax((scores + mask).float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, values)
        return self.wo(output.transpose(1, 2).contiguous().view(bsz, seqlen, -1))


class FeedForward(nn.Module):
    """Feed-forward of Meta's code."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.o = o

    def forward(self, x: Tensor) -> Tensor:
        if self.o["swap"]:
            return self.w2(F.silu(self.w3(x)) * self.w1(x))
        act = F.silu if self.o["act"] == "silu" else F.gelu
        return self.w2(act(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Layer of Meta's code."""

    def __init__(self, layer_id: int, o: dict[str, Any]) -> None:
        super().__init__()
        self.attention = Attention(o)
        self.feed_forward = FeedForward(o)
        self.layer_id = layer_id
        kind = RMSNorm if o["norm"] == "rms" else partial(nn.LayerNorm, bias=False)
        self.attention_norm = kind(WIDTH, eps=o["eps"])
        self.ffn_norm = kind(WIDTH, eps=o["eps"])
        self.o = o

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        if self.o["place"] == "out":
            h = x + self.attention_norm(self.attention(x, freqs_cis, mask))
            return h + self.ffn_norm(self.feed_forward(h))
        h = x + self.attention(self.attention_norm(x), freqs_cis, mask)
        normed = self.ffn_norm(h)
        if self.o["cut"]:
            normed = normed.detach()
        return (normed if self.o["residual"] == "normed" else h) + self.feed_forward(normed)


class MetaLlama(nn.Module):
    """LLaMA in the style of Meta's code."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList()
        for layer_id in range(LAYERS):
            self.layers.append(TransformerBlock(layer_id, o))
        self.norm = RMSNorm(WIDTH, eps=o["eps"]) if o["final"] else nn.Identity()
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if o["tied"]:
            self.tok_embeddings.weight = self.output.weight
        self.freqs_cis = precompute_freqs_cis(SIZE, 64, o["theta"])
        self.o = o

    def forward(self, tokens: Tensor) -> Tensor:
        seqlen = tokens.shape[1]
        h = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis[:seqlen].to(
            torch.complex128 if h.dtype == torch.float64 else torch.complex64
        )
        mask = torch.full((seqlen, seqlen), float("-inf"), device=tokens.device, dtype=h.dtype)
        mask = torch.triu(mask, diagonal=1 + self.o["early"])
        if self.o["window"]:
            mask = mask + torch.tril(torch.full_like(mask, float("-inf")), diagonal=-self.o["window"])
        for layer in self.layers:
            h = layer(h, freqs_cis, mask)
        return self.output(self.norm(h)).float()


def meta(**options: Any) -> nn.Module:
    """A model in the style of Meta's code."""
    return MetaLlama({**OPTIONS, **options})


NAMES = (
    (r"^model\.embed_tokens", "tok_embeddings"),
    (r"^model\.layers", "layers"),
    (r"^model\.norm", "norm"),
    (r"^lm_head", "output"),
    (r"self_attn\.(.)_proj", r"attention.w\1"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    (r"mlp\.gate_proj", "feed_forward.w1"),
    (r"mlp\.down_proj", "feed_forward.w2"),
    (r"mlp\.up_proj", "feed_forward.w3"),
)


def to_meta(state: State, *, is_turned: bool = True) -> State:
    """Meta's weights: rows of queries and keys for a rotation of neighbours."""
    made = renamed(state, *NAMES)
    for key in made if is_turned else ():
        if ".attention.wq." in key:
            made[key] = to_pairs(made[key], HEADS)
        elif ".attention.wk." in key:
            made[key] = to_pairs(made[key], GROUPS)
    return made


class FastAttention(nn.Module):
    """Attention of gpt-fast: one projection, a mask of booleans, PyTorch's kernel."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.wqkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * SIZE, bias=o["bias"])
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o = o

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        kv = GROUPS * SIZE
        q, k, v = self.wqkv(x).split([WIDTH, kv, kv], dim=-1)
        q, k, v = (t.view(b, s, -1, SIZE) for t in (q, k, v))
        q, k = (self.rotate(t, freqs_cis) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(HEADS // GROUPS, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.o["scale"] / math.sqrt(SIZE))
        return self.wo(y.transpose(1, 2).contiguous().view(b, s, WIDTH))

    def rotate(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        """Rotate neighbours by real numbers."""
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        turns = freqs_cis.view(1, x.size(1), 1, pairs.size(3), 2)
        a, b = pairs[..., 0], pairs[..., 1]
        c, s = turns[..., 0], turns[..., 1]
        return torch.stack([a * c - b * s, b * c + a * s], dim=-1).flatten(3).type_as(x)


class FastBlock(nn.Module):
    """Layer of gpt-fast."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.attention = FastAttention(o)
        self.feed_forward = FeedForward(o)
        self.ffn_norm = RMSNorm(WIDTH, o["eps"])
        self.attention_norm = RMSNorm(WIDTH, o["eps"])

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class FastLlama(nn.Module):
    """LLaMA in the style of gpt-fast."""

    freqs_cis: Tensor
    causal_mask: Tensor

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(FastBlock(o) for _ in range(LAYERS))
        self.norm = RMSNorm(WIDTH, eps=o["eps"])
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        freqs = 1.0 / (o["theta"] ** (torch.arange(0, SIZE, 2).float() / SIZE))
        angles = torch.outer(torch.arange(64), freqs)
        self.register_buffer("freqs_cis", torch.stack([angles.cos(), angles.sin()], -1), persistent=False)
        mask = torch.tril(torch.ones(64, 64, dtype=torch.bool), diagonal=o["early"])
        if o["window"]:
            mask &= ~torch.tril(torch.ones(64, 64, dtype=torch.bool), diagonal=-o["window"])
        self.register_buffer("causal_mask", mask, persistent=False)

    def forward(self, idx: Tensor) -> Tensor:
        pos = torch.arange(idx.shape[1], device=idx.device)
        mask = self.causal_mask[None, None, pos][..., : idx.shape[1]]
        x = self.tok_embeddings(idx)
        for layer in self.layers:
            x = layer(x, self.freqs_cis[pos], mask)
        return self.output(self.norm(x))


def fast(**options: Any) -> nn.Module:
    """A model in the style of gpt-fast."""
    return FastLlama({**OPTIONS, **options})


def to_fast(state: State) -> State:
    """The weights of gpt-fast: fused rows of neighbours."""
    made = to_meta(state)
    name = "layers.{}.attention"
    fused(made, name + ".wqkv.{}", *(name + f".w{part}.{{}}" for part in "qkv"))
    return made
