"""GPT-2 in the styles of Megatron, Flax and CLIP."""

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diff.families import State
from benchmarks.diff.third.base import Style, blocks, renamed
from benchmarks.diff.third.gpt import H, L, T, V, W, to_min
from benchmarks.diff.third.gpt_functions import gelu


class ParallelLinear(nn.Linear):
    """Linear that returns its bias apart (`skip_bias_add`)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class MegatronLayer(nn.Module):
    """Layer of Megatron: [s, b, h], queries, keys and values interleaved by head, biases added late."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(W)
        self.query_key_value = nn.Linear(W, 3 * W)
        self.dense = ParallelLinear(W, W)
        self.post_attention_layernorm = nn.LayerNorm(W)
        self.dense_h_to_4h = ParallelLinear(W, 4 * W)
        self.dense_4h_to_h = ParallelLinear(4 * W, W)
        self.slip = slip

    def core_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        s, b, n, d = q.shape
        q, k = q.reshape(s, b * n, d), k.reshape(s, b * n, d)
        empty = torch.empty(b * n, s, s, dtype=q.dtype)
        scores = torch.baddbmm(
            empty, q.transpose(0, 1), k.permute(1, 2, 0), beta=0.0, alpha=1.0 / math.sqrt(d)
        )
        probs = scores.view(b, n, s, s).masked_fill(mask, -10000.0).softmax(dim=-1)
        context = torch.bmm(probs.view(b * n, s, s), v.reshape(s, b * n, d).transpose(0, 1))
        return context.view(b, n, s, d).permute(2, 0, 1, 3).reshape(s, b, n * d)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        mixed = self.query_key_value(self.input_layernorm(hidden))
        if self.slip == "interleaving forgotten":
            q, k, v = (each.reshape(*each.shape[:-1], H, -1) for each in mixed.chunk(3, -1))
        else:
            mixed = mixed.view(*mixed.shape[:-1], H, 3 * W // H)
            q, k, v = torch.split(mixed, W // H, dim=-1)
        out = self.dense(self.core_attention(q, k, v, mask))
        if self.slip != "bias of dense forgotten":
            out = out + self.dense.bias
        hidden = hidden + out
        x = self.post_attention_layernorm(hidden)
        x = gelu(self.dense_h_to_4h(x) + self.dense_h_to_4h.bias)
        return hidden + (self.dense_4h_to_h(x) + self.dense_4h_to_h.bias)


class Megatron(nn.Module):
    """GPT-2 in the style of Megatron-LM."""

    position_ids: Tensor

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.embedding = nn.ModuleDict(
            {"word_embeddings": nn.Embedding(V, W), "position_embeddings": nn.Embedding(T, W)}
        )
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(MegatronLayer(slip) for _ in range(L)), "final_norm": nn.LayerNorm(W)}
        )
        self.register_buffer("position_ids", torch.arange(T)[None], persistent=False)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 2:
                scaled = name.endswith(("dense.weight", "4h_to_h.weight")) and slip != "start without depth"
                nn.init.normal_(p, 0.0, 0.02 / math.sqrt(2.0 * L) if scaled else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        s = tokens.shape[1]
        words: Any = self.embedding["word_embeddings"]
        where = self.position_ids[:, :s]
        hidden = words(tokens) + self.embedding["position_embeddings"](where)
        hidden = hidden.transpose(0, 1).contiguous()
        mask = (torch.tril(torch.ones(1, 1, s, s)) < 0.5).bool()
        for layer in self.encoder["layers"]:  # type: ignore[attr-defined]
            hidden = layer(hidden, mask)
        hidden = self.encoder["final_norm"](hidden)
        return torch.matmul(hidden, words.weight.t()).transpose(0, 1).contiguous()


def to_megatron(state: State) -> State:
    """Queries, keys and values interleaved by head."""
    names = {
        "ln_1": "input_layernorm",
        "attn.c_attn": "query_key_value",
        "attn.c_proj": "dense",
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc": "dense_h_to_4h",
        "mlp.c_proj": "dense_4h_to_h",
    }
    made = renamed(
        state,
        {
            "transformer.wte": "embedding.word_embeddings",
            "transformer.wpe": "embedding.position_embeddings",
            "transformer.ln_f": "encoder.final_norm",
        },
    )
    for i, block in enumerate(blocks(to_min(state), "transformer.h")):
        for kind in ("weight", "bias"):
            known = block[f"attn.c_attn.{kind}"]
            block[f"attn.c_attn.{kind}"] = known.unflatten(0, (3, H, -1)).transpose(0, 1).flatten(0, 2)
        made |= renamed(block, names, f"encoder.layers.{i}.")
    return made


class DenseGeneral(nn.Module):
    """Flax's DenseGeneral: a kernel of any shape, contracted by einsum."""

    def __init__(self, rule: str, shape: tuple[int, ...], out: tuple[int, ...], std: float = 0.02) -> None:
        super().__init__()
        self.rule = rule
        self.kernel = nn.Parameter(std * torch.randn(shape))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.rule, x, self.kernel) + self.bias


class FlaxNorm(nn.Module):
    """Flax's LayerNorm: mean of squares minus square of the mean, gain folded into the factor."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.scale, self.bias, self.eps = nn.Parameter(torch.ones(W)), nn.Parameter(torch.zeros(W)), eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        var = torch.clamp_min(x.square().mean(-1, keepdim=True) - mean.square(), 0.0)
        return (x - mean) * (torch.rsqrt(var + self.eps) * self.scale) + self.bias


class FlaxBlock(nn.Module):
    """Block of a Flax port: three-dimensional kernels, attention by einsum."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        d, deep = W // H, 0.02 / math.sqrt(2 * L)
        eps = 1e-6 if slip == "eps of Flax" else 1e-5
        self.LayerNorm_0, self.LayerNorm_1 = FlaxNorm(eps), FlaxNorm(eps)
        self.query = DenseGeneral("btc,chd->bthd", (W, H, d), (H, d))
        self.key = DenseGeneral("btc,chd->bthd", (W, H, d), (H, d))
        self.value = DenseGeneral("btc,chd->bthd", (W, H, d), (H, d))
        self.out = DenseGeneral("bthd,hdc->btc", (H, d, W), (W,), deep)
        self.Dense_0 = DenseGeneral("...c,cf->...f", (W, 4 * W), (4 * W,))
        self.Dense_1 = DenseGeneral("...f,fc->...c", (4 * W, W), (W,), deep)
        self.slip = slip

    def forward(self, x: Tensor) -> Tensor:
        y = self.LayerNorm_0(x)
        q, k, v = self.query(y), self.key(y), self.value(y)
        q = q / q.shape[-1] ** 0.5
        scores = torch.einsum("...qhd,...khd->...hqk", q, k)
        seen = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))
        scores = torch.where(seen, scores, torch.finfo(scores.dtype).min)
        weights = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True))
        x = x + self.out(torch.einsum("...hqk,...khd->...qhd", weights, v))
        y = x if self.slip == "norm of the feed-forward missing" else self.LayerNorm_1(x)
        return x + self.Dense_1(F.gelu(self.Dense_0(y), approximate="tanh"))


class Flax(nn.Module):
    """GPT-2 as ported from Flax; the table is read with a one-hot product."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.embedding = nn.Parameter(0.02 * torch.randn(V, W))
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, T, W))
        for i in range(L):
            self.add_module(f"FlaxBlock_{i}", FlaxBlock(slip))
        self.LayerNorm_0 = FlaxNorm()

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.one_hot(tokens, V).to(self.embedding.dtype) @ self.embedding
        x = x + self.pos_embedding[:, : tokens.shape[1]]
        for i in range(L):
            x = getattr(self, f"FlaxBlock_{i}")(x)
        return torch.einsum("btc,vc->btv", self.LayerNorm_0(x), self.embedding)


def to_flax(state: State) -> State:
    """Kernels with heads as an axis."""
    made = {
        "embedding": state["transformer.wte.weight"],
        "pos_embedding": state["transformer.wpe.weight"][None],
        "LayerNorm_0.scale": state["transformer.ln_f.weight"],
        "LayerNorm_0.bias": state["transformer.ln_f.bias"],
    }
    for i, block in enumerate(blocks(state, "transformer.h")):
        to = f"FlaxBlock_{i}."
        kernels = block["attn.c_attn.weight"].chunk(3, 1), block["attn.c_attn.bias"].chunk(3)
        for name, kernel, bias in zip(("query", "key", "value"), *kernels, strict=True):
            made[f"{to}{name}.kernel"] = kernel.unflatten(1, (H, -1))
            made[f"{to}{name}.bias"] = bias.unflatten(0, (H, -1))
        made[to + "out.kernel"] = block["attn.c_proj.weight"].unflatten(0, (H, -1))
        made[to + "out.bias"] = block["attn.c_proj.bias"]
        for j, name in enumerate(("mlp.c_fc", "mlp.c_proj")):
            made[f"{to}Dense_{j}.kernel"] = block[name + ".weight"]
            made[f"{to}Dense_{j}.bias"] = block[name + ".bias"]
            made[f"{to}LayerNorm_{j}.scale"] = block[f"ln_{j + 1}.weight"]
            made[f"{to}LayerNorm_{j}.bias"] = block[f"ln_{j + 1}.bias"]
    return made


class ResidualAttentionBlock(nn.Module):
    """Block of CLIP's text tower: nn.MultiheadAttention, time first."""

    def __init__(self, mask: Tensor, slip: str) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(W, H)
        self.ln_1 = nn.LayerNorm(W)
        act = nn.SiLU() if slip == "silu" else nn.GELU(approximate="tanh")
        layers = [("c_fc", nn.Linear(W, W * 4)), ("gelu", act), ("c_proj", nn.Linear(W * 4, W))]
        self.mlp = nn.Sequential(OrderedDict(layers))
        self.ln_2 = nn.LayerNorm(W)
        self.attn_mask = mask

    def attention(self, x: Tensor) -> Tensor:
        mask = self.attn_mask[: x.shape[0], : x.shape[0]].to(dtype=x.dtype, device=x.device)
        return self.attn(x, x, x, need_weights=False, attn_mask=mask)[0]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Clip(nn.Module):
    """GPT-2 in the style of CLIP's text tower: a Sequential of blocks over [T, B, C]."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(V, W)
        self.positional_embedding = nn.Parameter(torch.empty(T, W))
        mask = torch.empty(T, T).fill_(float("-inf")).triu_(1)
        self.resblocks = nn.Sequential(*[ResidualAttentionBlock(mask, slip) for _ in range(L)])
        self.ln_final = nn.LayerNorm(W)
        self.slip = slip
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 2:
                deep = name.endswith(("out_proj.weight", "c_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * L) if deep else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.token_embedding(text) + self.positional_embedding[: text.shape[1]]
        x = self.resblocks(x.permute(1, 0, 2)).permute(1, 0, 2)
        scale = W**-0.5 if self.slip == "scale of the head" else 1.0
        return self.ln_final(x) @ self.token_embedding.weight.T * scale


def to_clip(state: State) -> State:
    """The fused projection under MultiheadAttention's names."""
    names = {
        "transformer.wte": "token_embedding",
        "transformer.wpe.weight": "positional_embedding",
        "transformer.ln_f": "ln_final",
    }
    made = renamed(state, names)
    inner = {
        "attn.c_attn.weight": "attn.in_proj_weight",
        "attn.c_attn.bias": "attn.in_proj_bias",
        "attn.c_proj": "attn.out_proj",
        "ln_1": "ln_1",
        "ln_2": "ln_2",
        "mlp": "mlp",
    }
    for i, block in enumerate(blocks(to_min(state), "transformer.h")):
        made |= renamed(block, inner, f"resblocks.{i}.")
    return made


STYLES = {
    "Megatron": Style(
        Megatron,
        to_megatron,
        ("encoder.layers.{}",),
        tuple(f"encoder.layers.{{}}.{x}" for x in ("input_layernorm", "query_key_value", "dense")),
        tuple(
            f"encoder.layers.{{}}.{x}" for x in ("post_attention_layernorm", "dense_h_to_4h", "dense_4h_to_h")
        ),
        ("embedding",),
        ("encoder.final_norm", "embedding.word_embeddings"),
    ),
    "Flax": Style(
        Flax,
        to_flax,
        ("FlaxBlock_{}",),
        tuple(f"FlaxBlock_{{}}.{x}" for x in ("LayerNorm_0", "query", "key", "value", "out")),
        tuple(f"FlaxBlock_{{}}.{x}" for x in ("LayerNorm_1", "Dense_0", "Dense_1")),
        ("embedding", "pos_embedding"),
        ("LayerNorm_0", "embedding"),
    ),
    "CLIP": Style(
        Clip,
        to_clip,
        ("resblocks.{}",),
        ("resblocks.{}.attn", "resblocks.{}.ln_1"),
        ("resblocks.{}.mlp", "resblocks.{}.ln_2"),
        ("token_embedding", "positional_embedding"),
        ("ln_final", "token_embedding"),
    ),
}
