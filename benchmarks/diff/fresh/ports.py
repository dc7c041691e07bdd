"""Ports of published encoders, image classifiers and translators, as a user writes them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.diff.fresh.attention import ACTS
from benchmarks.diff.fresh.decoders import fresh

State = dict[str, Tensor]


@dataclass(frozen=True)
class Form:
    """Options of all ports of this file.

    Attributes:
        first: number of the first position; `pad` is the token that has none, as in fairseq.
        before: whether norms come before the branches.
        sines: whether positions are a table of sines.
        spans: window of each layer to both sides, None for all.
        bases: rotary base of each layer.
        kinds: whether the embedding of the one token type is added.
        soft: whether branches are multiplied by a learnt vector.
        dist: whether there is a second token before the patches.
        pool: "first" token, or "both" that and the mean of the patches.
    """

    width: int = 48
    depth: int = 3
    heads: int = 4
    hidden: int = 80
    vocab: int = 120
    eps: float = 1e-5
    act: str = "gelu"
    head_act: str = "gelu"
    first: int = 0
    pad: int | None = None
    before: bool = False
    sines: bool = False
    emb: float = 1.0
    emb_norm: bool = True
    kinds: bool = False
    biased: bool = True
    scale: float | None = None
    spans: tuple[int | None, ...] = ()
    bases: tuple[float, ...] = ()
    swapped: bool = False
    soft: bool = False
    dist: bool = False
    pool: str = "first"
    logit_bias: bool = True
    causal: bool = True
    final: bool = True


class Reader(nn.Module):
    """Masked language model with `nn.MultiheadAttention`: ids (B, T) → logits (B, T, V)."""

    def __init__(self, form: Form):
        super().__init__()
        self.form = form
        self.words = nn.Embedding(form.vocab, form.width)
        self.places = nn.Embedding(84, form.width)
        self.types = nn.Embedding(1, form.width) if form.kinds else None
        self.start_norm = nn.LayerNorm(form.width, eps=form.eps)
        self.tower = nn.ModuleList(ReaderLayer(form) for _ in range(form.depth))
        self.dense = nn.Linear(form.width, form.width)
        self.dense_norm = nn.LayerNorm(form.width, eps=form.eps)
        self.decoder = nn.Linear(form.width, form.vocab)
        fresh(self)
        self.decoder.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        form = self.form
        places = torch.arange(ids.shape[1]).expand_as(ids) + form.first
        if form.pad is not None:
            real = (ids != form.pad).long()
            places = real.cumsum(1) * real + form.pad
        x = self.words(ids) + self.places(places)
        x = self.start_norm(x if self.types is None else x + self.types.weight[0])
        for layer in self.tower:
            x = layer(x)
        return self.decoder(self.dense_norm(ACTS[form.head_act](self.dense(x))))


class ReaderLayer(nn.Module):
    def __init__(self, form: Form):
        super().__init__()
        self.form = form
        self.mha = nn.MultiheadAttention(form.width, form.heads, bias=form.biased, batch_first=True)
        self.mha_norm, self.wide_norm = (nn.LayerNorm(form.width, eps=form.eps) for _ in range(2))
        self.wide = nn.ModuleDict(
            {"up": nn.Linear(form.width, form.hidden), "down": nn.Linear(form.hidden, form.width)}
        )

    def ffn(self, x: Tensor) -> Tensor:
        return self.wide["down"](ACTS[self.form.act](self.wide["up"](x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.form.before:
            y = self.mha_norm(x)
            x = x + self.mha(y, y, y, need_weights=False)[0]
            return x + self.ffn(self.wide_norm(x))
        x = self.mha_norm(x + self.mha(x, x, x, need_weights=False)[0])
        return self.wide_norm(x + self.ffn(x))


class Modern(nn.Module):
    """ModernBERT as a user writes it."""

    def __init__(self, form: Form):
        super().__init__()
        self.form = form
        self.emb, self.emb_norm = nn.Embedding(form.vocab, form.width), self._norm()
        self.layers = nn.ModuleList(ModernLayer(form, i) for i in range(form.depth))
        self.out_norm, self.cls_norm = self._norm(), self._norm()
        self.cls_dense = nn.Linear(form.width, form.width, bias=False)
        self.cls_out = nn.Linear(form.width, form.vocab)
        fresh(self)
        self.cls_out.weight = self.emb.weight

    def _norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.form.width, eps=self.form.eps, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb_norm(self.emb(ids))
        for layer in self.layers:
            x = layer(x)
        x = self.out_norm(x) if self.form.final else x
        return self.cls_out(self.cls_norm(ACTS[self.form.head_act](self.cls_dense(x))))


class ModernLayer(nn.Module):
    def __init__(self, form: Form, layer: int):
        super().__init__()
        self.form, self.size, self.span = form, form.width // form.heads, form.spans[layer]
        norm = partial(nn.LayerNorm, form.width, eps=form.eps, bias=False)
        self.pre_attn = nn.Identity() if layer == 0 else norm()
        self.pre_ffn = norm()
        self.attention = nn.ModuleDict(
            {r: nn.Linear(form.width, form.width, bias=False) for r in ("q", "k", "v", "out")}
        )
        self.ffn = nn.ModuleDict(
            {
                "gate": nn.Linear(form.width, form.hidden, bias=False),
                "up": nn.Linear(form.width, form.hidden, bias=False),
                "down": nn.Linear(form.hidden, form.width, bias=False),
            }
        )
        rates = 1.0 / (form.bases[layer] ** (torch.arange(0, self.size, 2).float() / self.size))
        self.register_buffer("rates", rates, persistent=False)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (self.attention[r](x).unflatten(-1, (self.form.heads, -1)).transpose(1, 2) for r in "qkv")
        gap = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        rates = self.get_buffer("rates")
        angles = torch.arange(x.shape[1], dtype=rates.dtype)[:, None] * rates
        cos, sin = (torch.cat((each, each), -1) for each in (angles.cos(), angles.sin()))

        def turned(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return y * cos + torch.cat((-b, a), -1) * sin

        seen = torch.ones_like(gap, dtype=torch.bool) if self.span is None else gap.abs() <= self.span
        logits = (turned(q) @ turned(k).mT) / math.sqrt(self.size)
        y = logits.masked_fill(~seen, -1e30).softmax(-1) @ v
        return self.attention["out"](y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.pre_attn(x))
        y = self.pre_ffn(x)
        gate, up = self.ffn["gate"](y), self.ffn["up"](y)
        act = ACTS[self.form.act]
        return x + self.ffn["down"](gate * act(up) if self.form.swapped else act(gate) * up)


class Vision(nn.Module):
    """Image classifier with timm's names; patches (4 × 4 of 16 × 16) go through a linear layer."""

    def __init__(self, form: Form):
        super().__init__()
        self.form = form
        self.patch_embed = nn.Linear(48, form.width)
        extra = 1 + form.dist
        self.cls_token = nn.Parameter(torch.zeros(1, 1, form.width))
        self.dist_token = nn.Parameter(torch.zeros(1, 1, form.width)) if form.dist else None
        self.pos_embed = nn.Parameter(torch.zeros(1, 16 + extra, form.width))
        self.blocks = nn.ModuleList(VisionBlock(form) for _ in range(form.depth))
        self.norm = nn.LayerNorm(form.width, eps=form.eps) if form.final else nn.Identity()
        self.head = nn.Linear((1 + (form.pool == "both")) * form.width, 2)
        fresh(self)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = F.unfold(pixel_values, 4, stride=4).transpose(1, 2)
        tokens = [t for t in (self.cls_token, self.dist_token) if t is not None]
        x = torch.cat([*(t.expand(len(patches), -1, -1) for t in tokens), self.patch_embed(patches)], 1)
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.form.pool == "both":
            return self.head(torch.cat((x[:, 0], x[:, 1:].mean(1)), -1))
        return self.head(x[:, 0] if self.form.pool == "first" else x.mean(1))


class Gain(nn.Module):
    """LayerScale."""

    def __init__(self, width: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class VisionBlock(nn.Module):
    def __init__(self, form: Form):
        super().__init__()
        self.form = form
        self.norm1, self.norm2 = (nn.LayerNorm(form.width, eps=form.eps) for _ in range(2))
        self.attn = nn.ModuleDict(
            {
                "qkv": nn.Linear(form.width, 3 * form.width, form.biased),
                "proj": nn.Linear(form.width, form.width),
            }
        )
        self.mlp = nn.ModuleDict(
            {"fc1": nn.Linear(form.width, form.hidden), "fc2": nn.Linear(form.hidden, form.width)}
        )
        self.ls1, self.ls2 = (Gain(form.width) if form.soft else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self.form.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = y
        y = F.scaled_dot_product_attention(q, k, v, scale=self.form.scale)
        x = x + self.ls1(self.attn["proj"](y.transpose(1, 2).flatten(2)))
        return x + self.ls2(self.mlp["fc2"](ACTS[self.form.act](self.mlp["fc1"](self.norm2(x)))))


class Cross(nn.Module):
    """Attention with keys and values in one matrix."""

    def __init__(self, form: Form):
        super().__init__()
        self.form = form
        self.q = nn.Linear(form.width, form.width)
        self.kv = nn.Linear(form.width, 2 * form.width)
        self.o = nn.Linear(form.width, form.width)

    def forward(self, x: Tensor, memory: Tensor, *, causal: bool = False) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.form.heads, -1)).transpose(1, 2)
            for t in (self.q(x), *self.kv(memory).chunk(2, -1))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=self.form.scale)
        return self.o(y.transpose(1, 2).flatten(2))


class Wide(nn.Module):
    """Feed-forward layer."""

    def __init__(self, form: Form):
        super().__init__()
        self.up, self.down = nn.Linear(form.width, form.hidden), nn.Linear(form.hidden, form.width)
        self.act = ACTS[form.act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Side(nn.Module):
    """A layer of the encoder or the decoder."""

    def __init__(self, form: Form, *, decodes: bool):
        super().__init__()
        self.form, self.decodes = form, decodes
        norm = partial(nn.LayerNorm, form.width, eps=form.eps)
        self.att, self.att_norm = Cross(form), norm()
        if decodes:
            self.cross, self.cross_norm = Cross(form), norm()
        self.ff = Wide(form)
        self.ff_norm = norm()

    def branch(self, x: Tensor, norm: nn.Module, run: Callable[[Tensor], Tensor]) -> Tensor:
        return x + run(norm(x)) if self.form.before else norm(x + run(x))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        causal = self.decodes and self.form.causal
        x = self.branch(x, self.att_norm, lambda y: self.att(y, y, causal=causal))
        if memory is not None:
            x = self.branch(x, self.cross_norm, lambda y: self.cross(y, memory))
        return self.branch(x, self.ff_norm, self.ff)


class Translator(nn.Module):
    """BART and its relatives: ids of both sides → logits (B, T, V)."""

    def __init__(self, form: Form):
        super().__init__()
        self.form = form
        self.shared = nn.Embedding(form.vocab, form.width)
        if not form.sines:
            self.enc_pos, self.dec_pos = (nn.Embedding(66, form.width) for _ in range(2))
        norm = partial(nn.LayerNorm, form.width, eps=form.eps)
        if form.emb_norm:
            self.enc_start, self.dec_start = norm(), norm()
        self.encoder = nn.ModuleList(Side(form, decodes=False) for _ in range(form.depth))
        self.decoder = nn.ModuleList(Side(form, decodes=True) for _ in range(form.depth))
        if form.before and form.final:
            self.enc_end, self.dec_end = norm(), norm()
        if form.logit_bias:
            self.register_buffer("logit_bias", torch.zeros(form.vocab))
        fresh(self)

    def start(self, ids: Tensor, side: str) -> Tensor:
        form, rows = self.form, torch.arange(ids.shape[1]) + self.form.first
        x = self.shared(ids)
        x = x if form.emb == 1 else x * form.emb
        x = x + (sines(form.width)[rows].to(x.dtype) if form.sines else getattr(self, f"{side}_pos")(rows))
        return getattr(self, f"{side}_start")(x) if form.emb_norm else x

    def run(self, x: Tensor, side: str, *memory: Tensor) -> Tensor:
        for layer in self.encoder if side == "enc" else self.decoder:
            x = layer(x, *memory)
        return getattr(self, f"{side}_end")(x) if hasattr(self, f"{side}_end") else x

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        memory = self.run(self.start(input_ids, "enc"), "enc")
        x = self.run(self.start(decoder_input_ids, "dec"), "dec", memory)
        logits = F.linear(x, self.shared.weight)
        return logits + self.get_buffer("logit_bias") if self.form.logit_bias else logits


def sines(width: int) -> Tensor:
    """Table of sines and cosines, one half each, in float32 as Marian has it."""
    angles = torch.arange(64, dtype=torch.float64)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.from_numpy(torch.cat((angles.sin(), angles.cos()), -1).numpy().astype("float32"))
