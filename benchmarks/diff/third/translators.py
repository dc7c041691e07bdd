"""Encoder–decoders and T5's encoder: nn.Transformer, the Annotated Transformer, fairseq, Mesh TensorFlow."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diff.families import State
from benchmarks.diff.third.base import Style, blocks, renamed
from benchmarks.diff.third.encoders import initialised

V, T, W, L, H, HIDDEN = 79, 40, 48, 2, 4, 112
D = W // H
BUCKETS, FARTHEST = 12, 40


class TorchTranslator(nn.Module):
    """Translator of nn.Transformer's tutorial: norms behind the branches, ReLU, one table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(V, W), nn.Embedding(T, W)
        self.transformer = nn.Transformer(W, H, L, L, HIDDEN, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(W, V)
        initialised(self)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        one, two = (self.embed(x) * math.sqrt(W) + self.pos.weight[: x.shape[1]] for x in (src, tgt))
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        return self.generator(self.transformer(one, two, tgt_mask=mask.to(one.dtype), tgt_is_causal=True))


def heads(x: Tensor, linear: nn.Linear) -> Tensor:
    """Projected heads [batch, head, time, channel]."""
    return linear(x).view(x.size(0), -1, H, D).transpose(1, 2)


class Annotation(nn.Module):
    """Attention from a state to a memory."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.w_qs, self.w_ks, self.w_vs, self.fc = (nn.Linear(W, W) for _ in range(4))
        self.temperature = 1.0 if slip == "no scale" else D**0.5

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = heads(x, self.w_qs), heads(memory, self.w_ks), heads(memory, self.w_vs)
        attn = torch.matmul(q / self.temperature, k.transpose(2, 3))
        if mask is not None:
            attn = attn.masked_fill(mask == 0, -1e9)
        out = torch.matmul(F.softmax(attn, dim=-1), v)
        return self.fc(out.transpose(1, 2).contiguous().view(x.size(0), -1, W))


class Feed(nn.Module):
    """Two convolutions of width 1, as in older ports."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Conv1d(W, HIDDEN, 1), nn.Conv1d(HIDDEN, W, 1)
        self.act = F.gelu if slip == "gelu" else F.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.act(self.w_1(x.transpose(1, 2)))).transpose(1, 2)


class Encoding(nn.Module):
    """Layer of the encoder."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.slf_attn, self.pos_ffn = Annotation(slip), Feed(slip)
        self.norms = nn.ModuleList(nn.LayerNorm(W, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.slf_attn(x, x) + x)
        return self.norms[1](self.pos_ffn(x) + x)


class Decoding(nn.Module):
    """Layer of the decoder."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.slf_attn, self.enc_attn, self.pos_ffn = Annotation(slip), Annotation(slip), Feed(slip)
        self.norms = nn.ModuleList(nn.LayerNorm(W, eps=1e-5) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        x = self.norms[0](self.slf_attn(x, x, mask) + x)
        x = self.norms[1](self.enc_attn(x, memory) + x)
        return self.norms[2](self.pos_ffn(x) + x)


class Translator(nn.Module):
    """Translator in the style of "attention is all you need" in PyTorch."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.word_emb, self.position = nn.Embedding(V, W), nn.Embedding(T, W)
        self.encoder = nn.ModuleList(Encoding(slip) for _ in range(L))
        self.encoder_norm = nn.LayerNorm(W)
        self.decoder = nn.ModuleList(Decoding(slip) for _ in range(L))
        self.decoder_norm = nn.LayerNorm(W)
        self.trg_word_prj = nn.Linear(W, V)
        self.slip = slip
        initialised(self)

    def embedded(self, ids: Tensor) -> Tensor:
        scale = 1.0 if self.slip == "embedding not scaled" else W**0.5
        return self.word_emb(ids) * scale + self.position(torch.arange(ids.shape[1]))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory = self.embedded(src)
        for layer in self.encoder:
            memory = layer(memory)
        if self.slip != "memory not normed":
            memory = self.encoder_norm(memory)
        n = tgt.shape[1]
        mask = None if self.slip == "decoder not causal" else torch.ones(n, n).tril().bool()
        x = self.embedded(tgt)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        return self.trg_word_prj(self.decoder_norm(x))


def to_translator(state: State) -> State:
    """Projections apart, matrices of the feed-forward as convolutions."""
    outer = {
        "embed": "word_emb",
        "pos": "position",
        "generator": "trg_word_prj",
        "transformer.encoder.norm": "encoder_norm",
        "transformer.decoder.norm": "decoder_norm",
    }
    made = renamed(state, outer)
    for side in ("encoder", "decoder"):
        for i, block in enumerate(blocks(state, f"transformer.{side}.layers")):
            to = f"{side}.{i}."
            names = {f"norm{j + 1}": f"norms.{j}" for j in range(3)}
            names |= {"linear1": "pos_ffn.w_1", "linear2": "pos_ffn.w_2"}
            for known, new in (("self_attn", "slf_attn"), ("multihead_attn", "enc_attn")):
                names[f"{known}.out_proj"] = f"{new}.fc"
                for kind in ("weight", "bias") if f"{known}.in_proj_weight" in block else ():
                    for name, part in zip("qkv", block[f"{known}.in_proj_{kind}"].chunk(3), strict=True):
                        made[f"{to}{new}.w_{name}s.{kind}"] = part
            block = {
                name: v[..., None] if name.startswith("linear") and v.dim() == 2 else v
                for name, v in block.items()
            }
            made |= renamed(block, names, to)
    return made


class TimeFirst(nn.Module):
    """The same translator from nn's layers one by one, with time first and pairs of arguments."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.tables = nn.ParameterDict({"words": torch.randn(V, W) * 0.02, "pos": torch.randn(T, W) * 0.02})
        self.enc = nn.ModuleList(nn.TransformerEncoderLayer(W, H, HIDDEN, 0.0) for _ in range(L))
        first = slip == "decoder norm first"
        self.dec = nn.ModuleList(
            nn.TransformerDecoderLayer(W, H, HIDDEN, 0.0, norm_first=first) for _ in range(L)
        )
        self.norm_e, self.norm_d = nn.LayerNorm(W), nn.LayerNorm(W)
        self.out = nn.Linear(W, V)
        initialised(self)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        one, two = (
            (F.embedding(x, self.tables["words"]) * W**0.5 + self.tables["pos"][: x.shape[1]]).transpose(0, 1)
            for x in (src, tgt)
        )
        for layer in self.enc:
            one = layer(one)
        one = self.norm_e(one)
        mask = torch.ones(two.shape[0], two.shape[0], dtype=torch.bool).triu(1)
        for layer in self.dec:
            two = layer(two, one, tgt_mask=mask)
        return self.out(self.norm_d(two).transpose(0, 1))


def to_time_first(state: State) -> State:
    """New names alone."""
    return renamed(
        state,
        {
            "embed.weight": "tables.words",
            "pos.weight": "tables.pos",
            "generator": "out",
            "transformer.encoder.norm": "norm_e",
            "transformer.decoder.norm": "norm_d",
            "transformer.encoder.layers": "enc",
            "transformer.decoder.layers": "dec",
        },
    )


def bucket(distance: Tensor) -> Tensor:
    """Bucket of a distance to a key: half for keys behind, half for keys ahead, the farther ones by log."""
    half = BUCKETS // 2
    ahead, n = (distance > 0).long() * half, distance.abs()
    exact = half // 2
    far = exact + (torch.log(n.float() / exact) / math.log(FARTHEST / exact) * (half - exact)).long()
    return ahead + torch.where(n < exact, n, far.clamp(max=half - 1))


class MeshLayer(nn.Module):
    """Layer of T5's encoder with matrices (in, out)."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        deviations = {"q": (W * D) ** -0.5, "k": W**-0.5, "v": W**-0.5, "o": W**-0.5}
        self.att = nn.ParameterDict({name: torch.randn(W, W) * std for name, std in deviations.items()})
        self.ffn = nn.ParameterDict(
            {"wi": torch.randn(W, HIDDEN) * W**-0.5, "wo": torch.randn(HIDDEN, W) * HIDDEN**-0.5}
        )
        self.scales = nn.ParameterList([torch.ones(W), torch.ones(W)])
        self.slip = slip

    def normed(self, x: Tensor, which: int) -> Tensor:
        if self.slip == "layer norm":
            return F.layer_norm(x, (W,), self.scales[which], None, 1e-6)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scales[which]

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.normed(x, 0)
        q, k, v = (torch.einsum("bnd,dhk->bhnk", y, self.att[name].view(W, H, D)) for name in "qkv")
        logits = q @ k.mT
        if self.slip == "scaled by the width of a head":
            logits = logits / D**0.5
        weights = (logits + bias).softmax(-1)
        x = x + torch.einsum("bhnk,hkd->bnd", weights @ v, self.att["o"].view(H, D, W))
        return x + F.relu(self.normed(x, 1) @ self.ffn["wi"]) @ self.ffn["wo"]


class Mesh(nn.Module):
    """T5's encoder in the style of Mesh TensorFlow."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.vocabulary = nn.Embedding(V, W)
        self.relative = nn.Parameter(torch.randn(BUCKETS, H) * W**-0.5)
        self.layers = nn.ModuleList(MeshLayer(slip) for _ in range(L))
        self.final = nn.RMSNorm(W, 1e-6)
        self.slip = slip

    def forward(self, input_ids: Tensor) -> Tensor:
        n = torch.arange(input_ids.shape[1])
        distance = n[:, None] - n[None] if self.slip == "distance backwards" else n[None] - n[:, None]
        bias = self.relative[bucket(distance)].movedim(-1, 0)
        x = self.vocabulary(input_ids)
        for i, layer in enumerate(self.layers):
            only = self.slip == "table in the first layer alone" and i
            x = layer(x, torch.zeros_like(bias) if only else bias)
        return self.final(x)


def to_mesh(state: State) -> State:
    """Transposed matrices."""
    made = renamed(state, {"shared": "vocabulary", "encoder.final_layer_norm": "final"})
    made["relative"] = state["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    for i, block in enumerate(blocks(state, "encoder.block")):
        for name in "qkvo":
            made[f"layers.{i}.att.{name}"] = block[f"layer.0.SelfAttention.{name}.weight"].t()
        for name in ("wi", "wo"):
            made[f"layers.{i}.ffn.{name}"] = block[f"layer.1.DenseReluDense.{name}.weight"].t()
        for j in range(2):
            made[f"layers.{i}.scales.{j}"] = block[f"layer.{j}.layer_norm.weight"]
    return made


TORCH = Style(
    TorchTranslator,
    dict,
    ("transformer.decoder.layers.{}", "transformer.encoder.layers.{}"),
    tuple(
        f"transformer.{x}"
        for x in (
            "encoder.layers.{}.self_attn",
            "encoder.layers.{}.norm1",
            "decoder.layers.{}.self_attn",
            "decoder.layers.{}.norm1",
            "decoder.layers.{}.multihead_attn",
            "decoder.layers.{}.norm2",
        )
    ),
    tuple(
        f"transformer.{x}.layers.{{}}.{y}"
        for x in ("encoder", "decoder")
        for y in ("linear1", "linear2", "norm2", "norm3")
    ),
    ("embed", "pos"),
    ("generator", "transformer.decoder.norm"),
)
TRANSLATORS = {
    "own layers": Style(
        Translator,
        to_translator,
        ("decoder.{}", "encoder.{}"),
        (
            "encoder.{}.slf_attn",
            "encoder.{}.norms.0",
            "decoder.{}.slf_attn",
            "decoder.{}.norms.0",
            "decoder.{}.enc_attn",
            "decoder.{}.norms.1",
        ),
        ("encoder.{}.pos_ffn", "encoder.{}.norms.1", "decoder.{}.pos_ffn", "decoder.{}.norms.2"),
        ("word_emb", "position"),
        ("trg_word_prj", "decoder_norm"),
    ),
    "time first": Style(
        TimeFirst,
        to_time_first,
        ("dec.{}", "enc.{}"),
        tuple(
            f"{x}.{{}}.{y}"
            for x, names in (
                ("enc", ("self_attn", "norm1")),
                ("dec", ("self_attn", "norm1", "multihead_attn", "norm2")),
            )
            for y in names
        ),
        tuple(f"{x}.{{}}.{y}" for x in ("enc", "dec") for y in ("linear1", "linear2", "norm2", "norm3")),
        ("tables",),
        ("out", "norm_d"),
    ),
}
MESH = Style(
    Mesh,
    to_mesh,
    ("layers.{}",),
    ("layers.{}.att", "layers.{}.scales", "layers.{}"),
    ("layers.{}.ffn", "layers.{}.scales", "layers.{}"),
    ("vocabulary",),
    ("final",),
)
