"""T5 with a port, and a translator of `nn.Transformer` with one in the Annotated Transformer's style."""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.diff.fourth.base import VOCABULARY, State, ids, renamed

WIDTH, HEADS, HIDDEN, LAYERS = 32, 4, 64, 2
SIZE = WIDTH // HEADS


def texts() -> dict[str, Tensor]:
    """Two texts by name."""
    return {"input_ids": ids(20), "decoder_input_ids": ids(20).flip(1)[:, :14].contiguous()}


def pair_of_texts() -> tuple[Tensor, Tensor]:
    """Two texts in order."""
    return ids(20), ids(20).flip(1)[:, :14].contiguous()


def t5(**changes: Any) -> nn.Module:
    """The published T5."""
    sizes: dict[str, Any] = {
        "d_model": WIDTH,
        "d_kv": SIZE,
        "d_ff": HIDDEN,
        "num_layers": LAYERS,
        "num_decoder_layers": LAYERS,
    }
    rest: dict[str, Any] = {"num_heads": HEADS, "vocab_size": VOCABULARY, "dropout_rate": 0.0, **changes}
    return T5ForConditionalGeneration(T5Config(**sizes, **rest))


OPTIONS: dict[str, Any] = (
    {"eps": 1e-6, "scale": 1.0, "head_scale": True, "both_ways": False, "act": "relu", "shared": True}
    | {"emb_scale": True, "final": True, "above": 1, "start": 0, "positions": True, "biased": True}
    | {"first": "cross", "pre": True}
)


def bucket(distance: Tensor, *, is_both_ways: bool, buckets: int = 32, far: int = 128) -> Tensor:
    """T5's bucket of key − query."""
    first = torch.zeros_like(distance)
    if is_both_ways:
        buckets //= 2
        first = (distance > 0).long() * buckets
        n = distance.abs()
    else:
        n = (-distance).clamp(min=0)
    exact = buckets // 2
    steps = torch.log(n.clamp(min=1).float() / exact) / math.log(far / exact) * (buckets - exact)
    return first + torch.where(n < exact, n, (exact + steps.long()).clamp(max=buckets - 1))


class Norm(nn.Module):
    """T5's norm by PyTorch's function."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(WIDTH))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), self.g, self.eps)


class Attend(nn.Module):
    """Attention with fused keys and values; `memory` is the other text."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.norm = Norm(o["eps"])
        self.to_q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.to_kv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.to_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = o["scale"]

    def forward(self, x: Tensor, bias: Tensor | None, memory: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        k, v = self.to_kv(y if memory is None else memory).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, SIZE)) for t in (self.to_q(y), k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * self.scale
        if bias is not None:
            scores = scores + bias
        return x + self.to_out(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2))


class Feed(nn.Module):
    """Feed-forward."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.norm, self.act = Norm(o["eps"]), o["act"]
        self.w1, self.w2 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.w1(self.norm(x))
        return x + self.w2(torch.relu(inner) if self.act == "relu" else F.gelu(inner))


class Stack(nn.Module):
    """Encoder or decoder, with one table of relative positions."""

    def __init__(self, o: dict[str, Any], is_decoder: bool) -> None:
        super().__init__()
        self.rel_pos = nn.Embedding(32, HEADS)
        kinds = ("attn", "cross", "ff") if is_decoder else ("attn", "ff")
        parts = {"attn": Attend, "cross": Attend, "ff": Feed}
        self.layers = nn.ModuleList(
            nn.ModuleDict({kind: parts[kind](o) for kind in kinds}) for _ in range(LAYERS)
        )
        self.norm = Norm(o["eps"]) if o["final"] else nn.Identity()
        self.is_decoder, self.both_ways = is_decoder, o["both_ways"] or not is_decoder

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        distance = places[None, :] - places[:, None]
        bias = self.rel_pos(bucket(distance, is_both_ways=self.both_ways)).permute(2, 0, 1)
        if self.is_decoder:
            bias = bias.masked_fill(distance > 0, float("-inf"))
        for layer in self.layers:
            x = layer["attn"](x, bias)  # type: ignore[index]
            if self.is_decoder:
                x = layer["cross"](x, None, memory)  # type: ignore[index]
            x = layer["ff"](x)  # type: ignore[index]
        return self.norm(x)


class T5Port(nn.Module):
    """T5 in a style of its own."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = Stack(o, False), Stack(o, True)
        self.scale = WIDTH**-0.5 if o["head_scale"] else 1.0

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        y = self.decoder(self.emb(decoder_input_ids), self.encoder(self.emb(input_ids)))
        return F.linear(y * self.scale, self.emb.weight)


def t5_port(**options: Any) -> nn.Module:
    """A port of T5."""
    return T5Port({**OPTIONS, **options})


def to_t5_port(state: State) -> State:
    """The port's weights of T5."""
    made = renamed(
        state,
        (r"^shared", "emb"),
        (r"^(..coder)\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias", r"\1.rel_pos"),
        (r"final_layer_norm\.weight", "norm.g"),
        (r"\.block\.", ".layers."),
        (r"layer_norm\.weight", "norm.g"),
        (r"layer\.0\.", "attn."),
        (r"^(encoder.*)layer\.1\.", r"\1ff."),
        (r"^(decoder.*)layer\.1\.", r"\1cross."),
        (r"layer\.2\.", "ff."),
        (r"(SelfAttention|EncDecAttention)\.", ""),
        (r"DenseReluDense\.wi", "w1"),
        (r"DenseReluDense\.wo", "w2"),
        (r"\.q\.", ".to_q."),
        (r"\.o\.", ".to_out."),
        drop=r"lm_head|embed_tokens",
    )
    for key in [key for key in made if key.endswith(".k.weight")]:
        kv = [made.pop(key), made.pop(key.replace(".k.", ".v."))]
        made[key.replace(".k.", ".to_kv.")] = torch.cat(kv)
    return made


def sinusoids(n: int, d: int) -> Tensor:
    """Sines and cosines of positions."""
    position = torch.arange(0, n).unsqueeze(1)
    div_term = torch.exp(torch.arange(0, d, 2) * -(math.log(10000.0) / d))
    pe = torch.zeros(n, d)
    pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
    return pe.unsqueeze(0)


class TorchTranslator(nn.Module):
    """A translator of `nn.Transformer`."""

    pe: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.src_tok_emb, self.tgt_tok_emb = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(
            WIDTH, HEADS, LAYERS, LAYERS, HIDDEN, dropout=0.0, batch_first=True, norm_first=True
        )
        self.generator = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("pe", sinusoids(40, WIDTH), persistent=False)

    def forward(self, src: Tensor, trg: Tensor) -> Tensor:
        x = self.src_tok_emb(src) * math.sqrt(WIDTH) + self.pe[:, : src.shape[1]]
        y = self.tgt_tok_emb(trg) * math.sqrt(WIDTH) + self.pe[:, : trg.shape[1]]
        mask = self.transformer.generate_square_subsequent_mask(trg.shape[1], dtype=y.dtype)
        return self.generator(self.transformer(x, y, tgt_mask=mask))


def of_torch(**changes: Any) -> nn.Module:
    """A translator of `nn.Transformer`."""
    return TorchTranslator(**changes)


def clones(module: nn.Module, n: int) -> nn.ModuleList:
    """Copies of a module."""
    return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])


class LayerNorm(nn.Module):
    """Layer norm by hand."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            self.a_2 * centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + self.eps) + self.b_2
        )


class MultiHeadedAttention(nn.Module):
    """Attention of four linear layers."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.linears = clones(nn.Linear(WIDTH, WIDTH), 4)
        self.o = o

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        b = query.size(0)
        q, k, v = (
            lin(x).view(b, -1, HEADS, SIZE).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        )
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(SIZE) * self.o["scale"]
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        x = torch.matmul(scores.softmax(dim=-1), v)
        return self.linears[-1](x.transpose(1, 2).contiguous().view(b, -1, WIDTH))


class SublayerConnection(nn.Module):
    """Norm, branch, residual."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.norm = LayerNorm(WIDTH, o["eps"])
        self.pre = o["pre"]

    def forward(self, x: Tensor, sublayer: Any) -> Tensor:
        return x + sublayer(self.norm(x)) if self.pre else self.norm(x + sublayer(x))


class AnnotatedLayer(nn.Module):
    """Layer of encoder or decoder."""

    def __init__(self, o: dict[str, Any], is_decoder: bool) -> None:
        super().__init__()
        self.self_attn = MultiHeadedAttention(o)
        self.src_attn = MultiHeadedAttention(o) if is_decoder else None
        act = nn.ReLU() if o["act"] == "relu" else nn.GELU()
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, HIDDEN), act, nn.Linear(HIDDEN, WIDTH))
        self.sublayer = clones(SublayerConnection(o), 3 if is_decoder else 2)

    def forward(self, x: Tensor, mask: Tensor | None, memory: Tensor | None = None) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        if self.src_attn is not None:
            attend = self.src_attn
            x = self.sublayer[1](x, lambda x: attend(x, memory, memory, None))
        return self.sublayer[-1](x, self.feed_forward)


class Coder(nn.Module):
    """Layers with a norm."""

    def __init__(self, o: dict[str, Any], is_decoder: bool) -> None:
        super().__init__()
        self.layers = clones(AnnotatedLayer(o, is_decoder), LAYERS)
        self.norm = LayerNorm(WIDTH, o["eps"]) if o["final"] else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None, memory: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask, memory)
        return self.norm(x)


class Annotated(nn.Module):
    """A translator in the Annotated Transformer's style."""

    pe: Tensor

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.src_embed, self.tgt_embed = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = Coder(o, False), Coder(o, True)
        self.generator = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("pe", sinusoids(40, WIDTH), persistent=False)
        self.o = o

    def embed(self, table: nn.Module, tokens: Tensor) -> Tensor:
        """Scaled words with positions."""
        x = table(tokens) * (math.sqrt(WIDTH) if self.o["emb_scale"] else 1.0)
        first = self.o["start"]
        return x + self.pe[:, first : first + tokens.shape[1]] if self.o["positions"] else x

    def forward(self, src: Tensor, trg: Tensor) -> Tensor:
        memory = self.encoder(self.embed(self.src_embed, src), None)
        n = trg.shape[1]
        mask = torch.triu(torch.ones(1, n, n, device=trg.device), diagonal=self.o["above"]) == 0
        return self.generator(self.decoder(self.embed(self.tgt_embed, trg), mask, memory))


def annotated(**options: Any) -> nn.Module:
    """A translator in the Annotated Transformer's style."""
    return Annotated({**OPTIONS, "eps": 1e-5, **options})


def to_annotated(state: State) -> State:
    """The Annotated Transformer's weights."""
    made = renamed(
        state,
        (r"^(...)_tok_emb", r"\1_embed"),
        (r"^transformer\.", ""),
        ("multihead_attn", "src_attn"),
        (r"linear1", "feed_forward.0"),
        (r"linear2", "feed_forward.2"),
        (r"out_proj", "linears.3"),
        (r"norm1\.", "sublayer.0.norm."),
        (r"norm2\.", "sublayer.1.norm."),
        (r"norm3\.", "sublayer.2.norm."),
        (r"norm\.weight", "norm.a_2"),
        (r"norm\.bias", "norm.b_2"),
    )
    for key in [key for key in made if "in_proj" in key]:
        front, kind = key.split("in_proj_")
        made |= {f"{front}linears.{i}.{kind}": part for i, part in enumerate(made.pop(key).chunk(3))}
    return made
