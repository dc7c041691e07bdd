"""BERT with PyTorch's layers and in the style of Dive into Deep Learning."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diff.families import State
from benchmarks.diff.third.base import Style, blocks, renamed

V, T, W, L, H, HIDDEN = 93, 40, 48, 2, 4, 128


def initialised(model: nn.Module) -> None:
    """Normal matrices of 0.02, biases of 0."""
    for name, p in model.named_parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(p)


class BertLayers(nn.Module):
    """BERT with nn.TransformerEncoder as its layers."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.tok, self.pos, self.seg = nn.Embedding(V, W), nn.Embedding(T, W), nn.Embedding(2, W)
        self.norm = nn.LayerNorm(W, eps=1e-12)
        layer = nn.TransformerEncoderLayer(
            W,
            H,
            HIDDEN,
            dropout=0.0,
            activation=F.relu if slip == "relu" else F.gelu,
            layer_norm_eps=1e-5 if slip == "eps of torch" else 1e-12,
            batch_first=True,
            norm_first=slip == "norm first",
        )
        self.encoder = nn.TransformerEncoder(layer, L, enable_nested_tensor=False)
        self.dense, self.head_norm = nn.Linear(W, W), nn.LayerNorm(W, eps=1e-12)
        self.decoder = nn.Linear(W, V)
        self.slip = slip
        initialised(self)
        self.decoder.weight = self.tok.weight

    def forward(self, x: Tensor) -> Tensor:
        where = torch.arange(x.shape[1], device=x.device).expand_as(x)
        e = self.tok(x) + self.pos(where)
        if self.slip != "no segments":
            e = e + self.seg(torch.zeros_like(x))
        h = self.encoder(e if self.slip == "no norm of the embedding" else self.norm(e))
        return self.decoder(self.head_norm(F.gelu(self.dense(h))))


_BERT = {
    "bert.embeddings.word_embeddings": "tok",
    "bert.embeddings.position_embeddings": "pos",
    "bert.embeddings.token_type_embeddings": "seg",
    "bert.embeddings.LayerNorm": "norm",
    "cls.predictions.transform.dense": "dense",
    "cls.predictions.transform.LayerNorm": "head_norm",
    "cls.predictions.decoder": "decoder",
}


def to_layers(state: State) -> State:
    """The names of nn.TransformerEncoderLayer."""
    names = {
        "attention.output.dense": "self_attn.out_proj",
        "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "linear1",
        "output.dense": "linear2",
        "output.LayerNorm": "norm2",
    }
    made = renamed(state, _BERT)
    for i, block in enumerate(blocks(state, "bert.encoder.layer")):
        made |= renamed(block, names, f"encoder.layers.{i}.")
        for kind in ("weight", "bias"):
            parts = [block[f"attention.self.{x}.{kind}"] for x in ("query", "key", "value")]
            made[f"encoder.layers.{i}.self_attn.in_proj_{kind}"] = torch.cat(parts)
    return made


class AddNorm(nn.Module):
    """Residual connection followed by LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.ln = nn.Dropout(0.0), nn.LayerNorm(W, eps=1e-12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.ln(self.dropout(y) + x)


class LessonAttention(nn.Module):
    """Multi-head attention with heads moved into the batch."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        bias = slip != "no biases in attention"
        self.W_q, self.W_k = nn.Linear(W, W, bias=bias), nn.Linear(W, W, bias=bias)
        self.W_v, self.W_o = nn.Linear(W, W, bias=bias), nn.Linear(W, W, bias=bias)
        self.slip = slip

    def transpose_qkv(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], x.shape[1], H, -1).permute(0, 2, 1, 3)
        return x.reshape(-1, x.shape[2], x.shape[3])

    def transpose_output(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, H, x.shape[1], x.shape[2]).permute(0, 2, 1, 3)
        return x.reshape(x.shape[0], x.shape[1], -1)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        queries, keys = self.transpose_qkv(self.W_q(queries)), self.transpose_qkv(self.W_k(keys))
        values = self.transpose_qkv(self.W_v(values))
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
        if self.slip == "causal":
            scores = scores + torch.full(scores.shape[1:], -torch.inf).triu(1)
        weights = F.softmax(scores.reshape(-1, scores.shape[-1]), dim=-1).reshape(scores.shape)
        return self.W_o(self.transpose_output(torch.bmm(weights, values)))


class LessonBlock(nn.Module):
    """Encoder block of a lesson: attention, add & norm, FFN, add & norm."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.attention, self.addnorm1 = LessonAttention(slip), AddNorm()
        self.ffn = nn.ModuleDict({"dense1": nn.Linear(W, HIDDEN), "dense2": nn.Linear(HIDDEN, W)})
        self.addnorm2 = AddNorm()
        self.slip = slip

    def forward(self, x: Tensor) -> Tensor:
        y = self.addnorm1(x, self.attention(x, x, x))
        h = self.ffn["dense1"](y)
        if self.slip == "gelu by tanh":
            h = F.gelu(h, approximate="tanh")
        else:
            h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
        return self.addnorm2(y, self.ffn["dense2"](h))


class BertLesson(nn.Module):
    """BERT in the style of Dive into Deep Learning."""

    def __init__(self, slip: str = "") -> None:
        super().__init__()
        self.token_embedding, self.segment_embedding = nn.Embedding(V, W), nn.Embedding(2, W)
        self.blks = nn.Sequential()
        for i in range(L):
            self.blks.add_module(f"{i}", LessonBlock(slip))
        self.pos_embedding = nn.Parameter(torch.randn(1, T, W))
        self.norm = nn.LayerNorm(W, eps=1e-12)
        self.mlp = nn.Sequential(nn.Linear(W, W), nn.GELU(), nn.LayerNorm(W, eps=1e-12))
        self.bias = nn.Parameter(torch.zeros(V))
        self.slip = slip
        initialised(self)

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        segments = torch.zeros_like(tokens) if segments is None else segments
        x = self.token_embedding(tokens) + self.segment_embedding(segments)
        table = self.pos_embedding.data if self.slip == "positions as data" else self.pos_embedding
        x = self.norm(x + table[:, : x.shape[1], :])
        for blk in self.blks:
            x = blk(x)
        return F.linear(self.mlp(x), self.token_embedding.weight, self.bias)


def to_lesson(state: State) -> State:
    """The names of the lesson; positions with an axis for the batch."""
    made = renamed(
        state,
        {
            "bert.embeddings.word_embeddings": "token_embedding",
            "bert.embeddings.token_type_embeddings": "segment_embedding",
            "bert.embeddings.LayerNorm": "norm",
            "cls.predictions.transform.dense": "mlp.0",
            "cls.predictions.transform.LayerNorm": "mlp.2",
            "cls.predictions.decoder.bias": "bias",
        },
    )
    made["pos_embedding"] = state["bert.embeddings.position_embeddings.weight"][None]
    names = {
        "attention.self.query": "attention.W_q",
        "attention.self.key": "attention.W_k",
        "attention.self.value": "attention.W_v",
        "attention.output.dense": "attention.W_o",
        "attention.output.LayerNorm": "addnorm1.ln",
        "intermediate.dense": "ffn.dense1",
        "output.dense": "ffn.dense2",
        "output.LayerNorm": "addnorm2.ln",
    }
    for i, block in enumerate(blocks(state, "bert.encoder.layer")):
        made |= renamed(block, names, f"blks.{i}.")
    return made


def styled(block: str, attention: str, mlp: str, first: str, last: str) -> tuple[tuple[str, ...], ...]:
    """The places of a style, names with spaces between them."""
    inside = [tuple(f"{block}.{x}" for x in each.split()) for each in (attention, mlp)]
    return (block,), *inside, tuple(first.split()), tuple(last.split())


BERT = {
    "torch layers": Style(
        BertLayers,
        to_layers,
        *styled(
            "encoder.layers.{}",
            "self_attn norm1",
            "linear1 linear2 norm2",
            "tok pos seg norm",
            "dense head_norm decoder",
        ),
    ),
    "lesson": Style(
        BertLesson,
        to_lesson,
        *styled(
            "blks.{}",
            "attention addnorm1",
            "ffn addnorm2",
            "token_embedding segment_embedding pos_embedding norm",
            "mlp bias token_embedding",
        ),
    ),
}
