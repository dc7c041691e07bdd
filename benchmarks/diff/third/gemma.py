"""Gemma 2 in the style of gemma_pytorch, and GPT-NeoX with projections apart."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diff.families import State
from benchmarks.diff.third.base import Style, blocks, renamed

V, T, W, L, H, KV, D, HIDDEN, WINDOW = 95, 48, 48, 2, 4, 2, 16, 104, 6
CAP, OUTPUT_CAP = 3.0, 2.0


class GemmaNorm(nn.Module):
    """RMSNorm of gemma_pytorch: times 1 + weight, or times a weight that a port has raised by 1."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.eps, self.plain = 1e-6, plain
        self.weight = nn.Parameter(torch.ones(W) if plain else torch.zeros(W))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        output = y * (self.weight.float() if self.plain else 1 + self.weight.float())
        return output.type_as(x)


def rotary(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Halves as the real and imaginary parts of complex numbers."""
    x_ = torch.view_as_complex(torch.stack(torch.chunk(x.transpose(1, 2).float(), 2, dim=-1), dim=-1))
    x_out = torch.view_as_real(x_ * freqs_cis[None, None]).type_as(x)
    x_out = torch.cat(torch.chunk(x_out, 2, dim=-1), dim=-2)
    return x_out.reshape(x_out.shape[0], x_out.shape[1], x_out.shape[2], -1).transpose(1, 2)


class GemmaAttention(nn.Module):
    """Attention of gemma_pytorch, global or local."""

    def __init__(self, local: bool, slip: str) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(W, (H + 2 * KV) * D, bias=False)
        self.o_proj = nn.Linear(H * D, W, bias=False)
        self.local, self.slip = local, slip
        self.window = WINDOW + 1 if slip == "window too long" else WINDOW

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        b, n, _ = x.shape
        xq, xk, xv = self.qkv_proj(x).split([H * D, KV * D, KV * D], dim=-1)
        xq, xk = rotary(xq.view(b, n, H, D), freqs_cis), rotary(xk.view(b, n, KV, D), freqs_cis)
        key = torch.repeat_interleave(xk, H // KV, dim=2)
        value = torch.repeat_interleave(xv.view(b, n, KV, D), H // KV, dim=2)
        q = xq.transpose(1, 2) * D**-0.5
        scores = torch.matmul(q, key.transpose(1, 2).transpose(2, 3))
        if self.slip != "no cap on the scores":
            scores = torch.tanh(scores / CAP) * CAP
        if self.local and self.slip != "no window":
            sliding = torch.triu(torch.ones_like(mask), -1 * self.window + 1)
            mask = torch.where(sliding == 1, mask, -2.3819763e38)
        scores = F.softmax((scores + mask).float(), dim=-1).type_as(q)
        output = torch.matmul(scores, value.transpose(1, 2)).transpose(1, 2).contiguous().view(b, n, -1)
        return self.o_proj(output)


class GemmaMLP(nn.Module):
    """GeGLU with one projection for gate and up."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.gate_up = nn.Linear(W, 2 * HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, W, bias=False)
        self.approximate = "none" if slip == "gelu by erf" else "tanh"

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.tensor_split(self.gate_up(x), 2, dim=-1)
        return self.down_proj(F.gelu(gate, approximate=self.approximate) * up)


class GemmaBlock(nn.Module):
    """Block with norms before and behind each branch."""

    def __init__(self, local: bool, plain: bool, slip: str) -> None:
        super().__init__()
        self.self_attn, self.mlp = GemmaAttention(local, slip), GemmaMLP(slip)
        self.input_layernorm, self.post_attention_layernorm = GemmaNorm(plain), GemmaNorm(plain)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = GemmaNorm(plain), GemmaNorm(plain)
        self.slip = slip

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        residual = x
        x = self.self_attn(self.input_layernorm(x), freqs_cis, mask)
        if self.slip != "norm behind attention missing":
            x = self.post_attention_layernorm(x)
        x = residual + x
        residual = x
        return residual + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma(nn.Module):
    """Gemma 2 in the style of gemma_pytorch; the table is a bare parameter."""

    freqs_cis: Tensor

    def __init__(self, slip: str = "", plain: bool = False) -> None:
        super().__init__()
        self.embedder = nn.ParameterDict({"weight": torch.randn(V, W) * 0.02})
        self.model = nn.ModuleDict(
            {
                "layers": nn.ModuleList(GemmaBlock(i % 2 == 0, plain, slip) for i in range(L)),
                "norm": GemmaNorm(plain),
            }
        )
        freqs = 1.0 / (10000.0 ** (torch.arange(0, D, 2)[: (D // 2)].float() / D))
        angles = torch.outer(torch.arange(T), freqs).float()
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.slip = slip
        for p in self.model.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, input_token_ids: Tensor) -> Tensor:
        n = input_token_ids.shape[1]
        x = F.embedding(input_token_ids, self.embedder["weight"])
        if self.slip != "embedding not scaled":
            x = x * W**0.5
        mask = torch.full((1, 1, n, n), -2.3819763e38).triu(diagonal=1).to(x.dtype)
        for layer in self.model["layers"]:  # type: ignore[attr-defined]
            x = layer(x, self.freqs_cis[:n], mask)
        logits = torch.matmul(self.model["norm"](x), self.embedder["weight"].t())
        return logits if self.slip == "no cap at the end" else torch.tanh(logits / OUTPUT_CAP) * OUTPUT_CAP


def to_gemma(state: State) -> State:
    """Fused projections."""
    made = renamed(state, {"model.embed_tokens.weight": "embedder.weight", "model.norm": "model.norm"})
    same = {name: name for name in ("self_attn.o_proj", "mlp.down_proj", "input_layernorm")}
    for place in ("post_attention", "pre_feedforward", "post_feedforward"):
        same[f"{place}_layernorm"] = f"{place}_layernorm"
    for i, block in enumerate(blocks(state, "model.layers")):
        to = f"model.layers.{i}."
        made |= renamed(block, same, to)
        made[to + "self_attn.qkv_proj.weight"] = torch.cat(
            [block[f"self_attn.{x}_proj.weight"] for x in "qkv"]
        )
        made[to + "mlp.gate_up.weight"] = torch.cat([block[f"mlp.{x}_proj.weight"] for x in ("gate", "up")])
    return made


def to_plain(state: State) -> State:
    """Gains raised by 1."""
    return {name: v + 1 if "norm" in name else v for name, v in to_gemma(state).items()}


class NeoBlock(nn.Module):
    """Parallel block: both branches read the same stream through norms of their own."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.ln_attn, self.ln_ff = nn.LayerNorm(W), nn.LayerNorm(W)
        self.q, self.k, self.v, self.o = (nn.Linear(W, W) for _ in range(4))
        self.ff = nn.Sequential(nn.Linear(W, 4 * W), nn.GELU(), nn.Linear(4 * W, W))
        self.slip = slip

    def rotated(self, x: Tensor) -> Tensor:
        n, d = x.shape[1], x.shape[-1] if self.slip == "all channels rotated" else x.shape[-1] // 2
        turn, keep = x[..., :d], x[..., d:]
        angle = torch.arange(n)[:, None, None] / 10000 ** (torch.arange(0, d, 2) / d)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        if self.slip == "neighbours rotated":
            one, two = turn[..., ::2], turn[..., 1::2]
            turn = torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2)
        else:
            one, two = turn.tensor_split(2, -1)
            turn = torch.cat((one * cos - two * sin, two * cos + one * sin), -1)
        return torch.cat((turn, keep), -1)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (H, -1)) for each in (self.q, self.k, self.v))
        scores = torch.einsum("bihd,bjhd->bhij", self.rotated(q) / math.sqrt(W // H), self.rotated(k))
        causal = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        p = scores.where(causal, torch.tensor(-torch.inf, dtype=x.dtype)).softmax(-1)
        return self.o(torch.einsum("bhij,bjhd->bihd", p, v).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.slip == "one branch after the other":
            x = x + self.attend(self.ln_attn(x))
            return x + self.ff(self.ln_ff(x))
        return x + self.attend(self.ln_attn(x)) + self.ff(self.ln_ff(x))


class Neo(nn.Sequential):
    """GPT-NeoX as one Sequential from the table to the head."""

    def __init__(self, slip: str = "") -> None:
        layers = [NeoBlock(slip) for _ in range(L)]
        super().__init__(nn.Embedding(V, W), *layers, nn.LayerNorm(W), nn.Linear(W, V, bias=False))
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02)


def to_neo(state: State) -> State:
    """The interleaved projection in three."""
    outer = {
        "gpt_neox.embed_in": "0",
        "gpt_neox.final_layer_norm": f"{L + 1}",
        "lm_head": f"{L + 2}",
    }
    names = {
        "input_layernorm": "ln_attn",
        "post_attention_layernorm": "ln_ff",
        "attention.dense": "o",
        "mlp.dense_h_to_4h": "ff.0",
        "mlp.dense_4h_to_h": "ff.2",
    }
    made = renamed(state, outer)
    for i, block in enumerate(blocks(state, "gpt_neox.layers")):
        made |= renamed(block, names, f"{i + 1}.")
        for kind in ("weight", "bias"):
            fused = block[f"attention.query_key_value.{kind}"].unflatten(0, (H, 3, -1))
            for name, part in zip("qkv", fused.unbind(1), strict=True):
                made[f"{i + 1}.{name}.{kind}"] = part.flatten(0, 1)
    return made


_LAYER = "model.layers.{}"
_GEMMA = (
    (_LAYER,),
    tuple(f"{_LAYER}.{x}" for x in ("self_attn", "input_layernorm", "post_attention_layernorm")),
    tuple(f"{_LAYER}.{x}" for x in ("mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm")),
    ("embedder",),
    ("model.norm", "embedder"),
)


class NeoStyle(Style):
    """Style whose layers are numbered from 1."""

    def places(self, where: str) -> tuple[str, ...]:
        branch, _, layer = where.partition(" ")
        return super().places(f"{branch} {int(layer) + 1}" if layer else where)


GEMMA = {
    "gemma_pytorch": Style(Gemma, to_gemma, *_GEMMA),
    "plain gains": Style(lambda slip="": Gemma(slip, plain=True), to_plain, *_GEMMA),
    "plain gains that were not raised": Style(lambda slip="": Gemma(slip, plain=True), to_gemma, *_GEMMA),
}
NEOX = NeoStyle(
    Neo,
    to_neo,
    ("{}",),
    ("{}.ln_attn", "{}.q", "{}.k", "{}.v", "{}.o"),
    ("{}.ln_ff", "{}.ff"),
    ("0",),
    (f"{L + 1}", f"{L + 2}"),
)
