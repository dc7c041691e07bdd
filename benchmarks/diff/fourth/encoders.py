"""BERT in the styles of a textbook and of `nn.TransformerEncoder`, and RoBERTa in fairseq's (time first)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMaskedLM

from benchmarks.diff.fourth.base import VOCABULARY, State, fused, renamed

WIDTH, HEADS, HIDDEN, LAYERS, LENGTH = 32, 4, 72, 2, 40


def published(kind: str, **changes: Any) -> nn.Module:
    """BERT or RoBERTa with a head for masked words."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    rest = {"num_attention_heads": HEADS, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    config = AutoConfig.for_model(kind, **sizes, **none, **rest, **changes)
    return AutoModelForMaskedLM.from_config(config)


OPTIONS: dict[str, Any] = {
    "eps": 1e-12,
    "act": "none",
    "types": True,
    "emb_norm": True,
    "scaled": True,
    "pre": False,
} | {"head_bias": True, "head_act": "gelu", "masked": False, "start": 2, "k_bias": True}


def transpose_qkv(x: Tensor, num_heads: int) -> Tensor:
    """Heads beside the batch."""
    x = x.reshape(x.shape[0], x.shape[1], num_heads, -1).permute(0, 2, 1, 3)
    return x.reshape(-1, x.shape[2], x.shape[3])


def transpose_output(x: Tensor, num_heads: int) -> Tensor:
    """Undo `transpose_qkv`."""
    x = x.reshape(-1, num_heads, x.shape[1], x.shape[2]).permute(0, 2, 1, 3)
    return x.reshape(x.shape[0], x.shape[1], -1)


class MultiHeadAttention(nn.Module):
    """Attention of a textbook."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.W_q, self.W_k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.W_v, self.W_o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)
        self.o = o

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        queries = transpose_qkv(self.W_q(queries), HEADS)
        keys, values = transpose_qkv(self.W_k(keys), HEADS), transpose_qkv(self.W_v(values), HEADS)
        d = queries.shape[-1] if self.o["scaled"] else 1
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(d)
        if self.o["masked"]:
            scores = scores + torch.full_like(scores, float("-inf")).triu(1)
        output = torch.bmm(self.dropout(nn.functional.softmax(scores, dim=-1)), values)
        return self.W_o(transpose_output(output, HEADS))


class AddNorm(nn.Module):
    """Residual and norm."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH, eps=eps)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.ln(y + x)


class PositionWiseFFN(nn.Module):
    """Feed-forward of a textbook."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.dense1, self.dense2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act: nn.Module = nn.ReLU() if o["act"] == "relu" else nn.GELU(approximate=o["act"])

    def forward(self, x: Tensor) -> Tensor:
        return self.dense2(self.act(self.dense1(x)))


class EncoderBlock(nn.Module):
    """Layer of a textbook."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(o)
        self.addnorm1 = AddNorm(o["eps"])
        self.ffn = PositionWiseFFN(o)
        self.addnorm2 = AddNorm(o["eps"])
        self.pre = o["pre"]

    def forward(self, x: Tensor) -> Tensor:
        if self.pre:
            y = self.addnorm1.ln(x)
            x = x + self.attention(y, y, y)
            return x + self.ffn(self.addnorm2.ln(x))
        y = self.addnorm1(x, self.attention(x, x, x))
        return self.addnorm2(y, self.ffn(y))


class TextbookBERT(nn.Module):
    """BERT in a textbook's style."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.segment_embedding = nn.Embedding(2, WIDTH) if o["types"] else None
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, LENGTH, WIDTH))
        self.ln = nn.LayerNorm(WIDTH, eps=o["eps"]) if o["emb_norm"] else nn.Identity()
        self.blks = nn.Sequential()
        for i in range(LAYERS):
            self.blks.add_module(f"{i}", EncoderBlock(o))
        act = nn.ReLU() if o["head_act"] == "relu" else nn.GELU()
        self.mlm = nn.Sequential(nn.Linear(WIDTH, WIDTH), act, nn.LayerNorm(WIDTH, eps=o["eps"]))
        self.mlm_bias = nn.Parameter(torch.zeros(VOCABULARY)) if o["head_bias"] else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens)
        if self.segment_embedding is not None:
            x = x + self.segment_embedding(torch.zeros_like(tokens))
        x = self.ln(x + self.pos_embedding[:, : x.shape[1]])
        for blk in self.blks:
            x = blk(x)
        y = self.mlm(x) @ self.token_embedding.weight.T
        return y if self.mlm_bias is None else y + self.mlm_bias


def textbook(**options: Any) -> nn.Module:
    """BERT in a textbook's style."""
    return TextbookBERT({**OPTIONS, **options})


def to_textbook(state: State) -> State:
    """A textbook's weights of BERT."""
    made = renamed(
        state,
        (r"^bert\.embeddings\.word_embeddings", "token_embedding"),
        (r"^bert\.embeddings\.token_type_embeddings", "segment_embedding"),
        (r"^bert\.embeddings\.position_embeddings\.weight", "pos_embedding"),
        (r"^bert\.embeddings\.LayerNorm", "ln"),
        (r"^bert\.encoder\.layer", "blks"),
        (r"attention\.self\.query", "attention.W_q"),
        (r"attention\.self\.key", "attention.W_k"),
        (r"attention\.self\.value", "attention.W_v"),
        (r"attention\.output\.dense", "attention.W_o"),
        (r"attention\.output\.LayerNorm", "addnorm1.ln"),
        (r"intermediate\.dense", "ffn.dense1"),
        (r"output\.dense", "ffn.dense2"),
        (r"output\.LayerNorm", "addnorm2.ln"),
        (r"^cls\.predictions\.transform\.dense", "mlm.0"),
        (r"^cls\.predictions\.transform\.LayerNorm", "mlm.2"),
        (r"^cls\.predictions\.bias", "mlm_bias"),
        drop=r"predictions\.decoder",
    )
    made["pos_embedding"] = made["pos_embedding"][None]
    return made


class TorchBERT(nn.Module):
    """BERT of PyTorch's own layers."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.seg = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=o["eps"])
        layer = nn.TransformerEncoderLayer(
            WIDTH,
            HEADS,
            HIDDEN,
            dropout=0.0,
            activation="relu" if o["act"] == "relu" else "gelu",
            layer_norm_eps=o["eps"],
            batch_first=True,
            norm_first=o["pre"],
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.transform, self.transform_norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, eps=o["eps"])
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]] + self.seg.weight[0]
        x = self.encoder(self.norm(x))
        return self.decoder(self.transform_norm(F.gelu(self.transform(x))))


def of_torch(**options: Any) -> nn.Module:
    """BERT of PyTorch's own layers."""
    return TorchBERT({**OPTIONS, **options})


def to_torch(state: State) -> State:
    """The weights of PyTorch's layers of BERT."""
    made = renamed(
        to_textbook(state),
        (r"^token_embedding", "tok"),
        (r"^segment_embedding", "seg"),
        (r"^pos_embedding", "pos.weight"),
        (r"^ln\.", "norm."),
        (r"^blks", "encoder.layers"),
        (r"attention\.W_o", "self_attn.out_proj"),
        (r"addnorm(.)\.ln", r"norm\1"),
        (r"ffn\.dense", "linear"),
        (r"^mlm\.0", "transform"),
        (r"^mlm\.2", "transform_norm"),
        (r"^mlm_bias", "decoder.bias"),
    )
    made["pos.weight"] = made["pos.weight"][0]
    made["decoder.weight"] = made["tok.weight"]
    name = "encoder.layers.{}."
    fused(made, name + "self_attn.in_proj_{}", *(name + f"attention.W_{part}.{{}}" for part in "qkv"))
    return made


class FairseqAttention(nn.Module):
    """Attention of fairseq: scaled queries, time first."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=o["k_bias"])
        self.v_proj, self.q_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=o["k_bias"])
        self.out_proj = nn.Linear(WIDTH, WIDTH)
        self.scaling = (WIDTH // HEADS) ** -0.5

    def forward(self, query: Tensor, key_padding_mask: Tensor) -> Tensor:
        tgt_len, bsz, embed_dim = query.size()
        q = self.q_proj(query) * self.scaling
        k, v = self.k_proj(query), self.v_proj(query)
        q, k, v = (
            t.contiguous().view(tgt_len, bsz * HEADS, embed_dim // HEADS).transpose(0, 1) for t in (q, k, v)
        )
        weights = torch.bmm(q, k.transpose(1, 2)).view(bsz, HEADS, tgt_len, tgt_len)
        weights = weights.masked_fill(key_padding_mask[:, None, None], float("-inf"))
        probs = F.softmax(weights, dim=-1).view(bsz * HEADS, tgt_len, tgt_len)
        attn = torch.bmm(probs, v).transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn)


class FairseqLayer(nn.Module):
    """Layer of fairseq, Post-LN."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn = FairseqAttention(o)
        self.self_attn_layer_norm = nn.LayerNorm(WIDTH, eps=o["eps"])
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.final_layer_norm = nn.LayerNorm(WIDTH, eps=o["eps"])
        self.o = o

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        residual = x
        x = self.self_attn(x, mask)
        x = F.dropout(x, p=0.0, training=self.training)
        x = self.self_attn_layer_norm(residual + x)
        residual = x
        x = self.fc1(x)
        x = F.gelu(x, approximate="tanh" if self.o["act"] == "tanh" else "none")
        return self.final_layer_norm(residual + self.fc2(x))


class FairseqRoBERTa(nn.Module):
    """RoBERTa in fairseq's style."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=1)
        self.embed_positions = nn.Embedding(LENGTH, WIDTH, padding_idx=1)
        self.segment_embeddings = nn.Embedding(1, WIDTH)
        self.layernorm_embedding = nn.LayerNorm(WIDTH, eps=o["eps"])
        self.layers = nn.ModuleList([FairseqLayer(o) for _ in range(LAYERS)])
        self.lm_head = nn.ModuleDict(
            {"dense": nn.Linear(WIDTH, WIDTH), "layer_norm": nn.LayerNorm(WIDTH, eps=o["eps"])}
        )
        self.lm_bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.o = o

    def forward(self, src_tokens: Tensor) -> Tensor:
        padding = src_tokens.eq(1)
        mask = src_tokens.ne(1).int()
        places = torch.cumsum(mask, dim=1) * mask - 1 + self.o["start"]
        x = self.embed_tokens(src_tokens) + self.embed_positions(places)
        x = x + self.segment_embeddings(torch.zeros_like(src_tokens))
        x = self.layernorm_embedding(x).transpose(0, 1)
        for layer in self.layers:
            x = layer(x, padding)
        x = F.gelu(self.lm_head["dense"](x.transpose(0, 1)))
        return F.linear(self.lm_head["layer_norm"](x), self.embed_tokens.weight) + self.lm_bias


def fairseq(**options: Any) -> nn.Module:
    """RoBERTa in fairseq's style."""
    return FairseqRoBERTa({**OPTIONS, "eps": 1e-5, **options})


def to_fairseq(state: State) -> State:
    """Fairseq's weights of RoBERTa."""
    return renamed(
        state,
        (r"^roberta\.embeddings\.word_embeddings", "embed_tokens"),
        (r"^roberta\.embeddings\.position_embeddings", "embed_positions"),
        (r"^roberta\.embeddings\.token_type_embeddings", "segment_embeddings"),
        (r"^roberta\.embeddings\.LayerNorm", "layernorm_embedding"),
        (r"^roberta\.encoder\.layer", "layers"),
        (r"attention\.self\.query", "self_attn.q_proj"),
        (r"attention\.self\.key", "self_attn.k_proj"),
        (r"attention\.self\.value", "self_attn.v_proj"),
        (r"attention\.output\.dense", "self_attn.out_proj"),
        (r"attention\.output\.LayerNorm", "self_attn_layer_norm"),
        (r"intermediate\.dense", "fc1"),
        (r"output\.dense", "fc2"),
        (r"output\.LayerNorm", "final_layer_norm"),
        (r"^lm_head\.bias", "lm_bias"),
        drop=r"lm_head\.decoder",
    )
