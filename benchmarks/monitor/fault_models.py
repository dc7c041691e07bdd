"""Models that `benchmarks.monitor.fault_runs` puts faults into.

The replay of the first wrong value was written with those in `SEEN`. It had not been run on a model of
`HELD_OUT` before the first sample was drawn.
"""

import importlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normscope.subjects import load
from normscope.subjects.subject import Batch, call_model

VOCAB, WIDTH, TOKENS, BATCHES = 64, 32, 8, 4
"""Tokens, width, tokens of a sequence, and batches that are repeated."""


@dataclass
class Task:
    """A model, its batches, and its loss.

    Attributes:
        batches: dicts of keyword arguments or tuples of arguments.
        loss: the loss of (what the script calls, a batch).
        stream: regular expression of the paths of the modules that return the residual stream.
    """

    model: nn.Module
    batches: list[Any]
    loss: Callable[[nn.Module, Batch], Tensor]
    stream: str


def _spec(spec: str, stream: str) -> Task:
    subject = load(spec, seed=0, batch_size=2, seq_len=TOKENS)
    batches = list(itertools.islice(subject.batches(), BATCHES))
    return Task(subject.model, batches, lambda model, batch: subject.loss(batch, model), stream)


def _with_targets(model: nn.Module, stream: str, *, floats: int = 0, memory: bool = False) -> Task:
    """A model of ids, or of vectors of `floats` entries; its loss is computed by the script."""

    def batch() -> dict[str, Any]:
        ids = torch.randint(VOCAB, (2, TOKENS))
        given = (torch.randn(2, TOKENS, floats),) if floats else (ids,)
        return {"args": given * (2 if memory else 1), "targets": torch.randint(VOCAB, (2, TOKENS))}

    def loss(called: nn.Module, batch: Any) -> Tensor:
        logits = call_model(called, batch["args"])
        return F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten())

    return Task(model, [batch() for _ in range(BATCHES)], loss, stream)


class Einsum(nn.Module):
    """A decoder whose attention is written with einsum, with a mask of the keys that may be given."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        self.layers = nn.ModuleList(EinsumBlock() for _ in range(2))
        self.last = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor, seen: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.places
        for layer in self.layers:
            x = layer(x, seen)
        return torch.einsum("btd,vd->btv", self.last(x), self.tokens.weight)


class EinsumBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = EinsumAttention()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        x = x + self.mix(self.norm1(x), seen)
        gate, value = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class EinsumAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_qkv = nn.Parameter(torch.randn(3, 2, WIDTH, WIDTH // 2) / math.sqrt(WIDTH))
        self.w_out = nn.Parameter(torch.randn(2, WIDTH // 2, WIDTH) / math.sqrt(WIDTH))

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        q, k, v = torch.einsum("btd,chde->cbhte", x, self.w_qkv)
        scores = torch.einsum("bhte,bhse->bhts", q, k) / math.sqrt(WIDTH // 2)
        scores = scores.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -math.inf)
        if seen is not None:
            scores = scores.masked_fill(~seen[:, None, None, :], -math.inf)
        mixed = torch.einsum("bhts,bhse->bhte", scores.softmax(-1), v)
        return torch.einsum("bhte,hed->btd", mixed, self.w_out)


class Decoded(nn.Module):
    """PyTorch's own decoder between two linear maps; its batch is floating point."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 48, dropout=0.1, batch_first=True)
        self.entry, self.exit = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.decoder = nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(WIDTH))

    def forward(self, target: Tensor, memory: Tensor, key_padding: Tensor | None = None) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.decoder(self.entry(target), memory, tgt_mask=mask, tgt_key_padding_mask=key_padding)
        return self.exit(x)


class Encoded(nn.Module):
    """PyTorch's own encoder, post-LN, between two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 48, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.exit = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.exit(self.encoder(x))


class Mixer(nn.Module):
    """An MLP-Mixer of patches, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.exit = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(MixerBlock() for _ in range(3))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return self.exit(self.norm(x))


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-6)
        self.tokens = nn.Sequential(nn.Linear(TOKENS, 16), nn.GELU(), nn.Linear(16, TOKENS))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


def _x_transformers() -> Task:
    """A decoder of x-transformers with rotary positions and gated feed-forwards, if that is installed."""
    library = importlib.import_module("x_transformers")
    layers = library.Decoder(dim=WIDTH, depth=2, heads=2, attn_dim_head=16, rotary_pos_emb=True, ff_glu=True)
    model = library.TransformerWrapper(num_tokens=VOCAB, max_seq_len=16, attn_layers=layers)
    return _with_targets(model, r"attn_layers\.layers\.\d+\.2")


_SIZES = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=48,vocab_size=64"
_OURS = f"depth=2,width={WIDTH},heads=2,vocab={VOCAB},context=16"
_GPT2 = "n_layer=2,n_embd=32,n_head=2,vocab_size=64,n_positions=16"
_MAMBA = "hidden_size=32,num_hidden_layers=2,vocab_size=64,state_size=4"

SEEN: dict[str, Callable[[], Task]] = {
    "pre": partial(_spec, f"nn:decoder,scheme=pre,{_OURS}", r"blocks\.\d+"),
    "post": partial(_spec, f"nn:decoder,scheme=post,{_OURS}", r"blocks\.\d+"),
    "gpt2": partial(_spec, f"hf:gpt2,{_GPT2}", r"transformer\.h\.\d+"),
    "bert": partial(_spec, f"hf:bert,{_SIZES}", r"bert\.encoder\.layer\.\d+"),
    "llama": partial(_spec, f"hf:llama,{_SIZES},num_key_value_heads=2", r"model\.layers\.\d+"),
    "torch-encoder": lambda: _with_targets(Encoded(), r"encoder\.layers\.\d+", floats=WIDTH),
}
"""Architectures that the replay's authors used."""

HELD_OUT: dict[str, Callable[[], Task]] = {
    "t5": partial(
        _spec,
        "hf:t5,num_layers=2,d_model=32,num_heads=2,d_ff=48,d_kv=16,vocab_size=64",
        r"(encoder|decoder)\.block\.\d+",
    ),
    "olmo2": partial(_spec, f"hf:olmo2,{_SIZES},num_key_value_heads=2,pad_token_id=0", r"model\.layers\.\d+"),
    "gemma2": partial(_spec, f"hf:gemma2,{_SIZES},num_key_value_heads=1,head_dim=16", r"model\.layers\.\d+"),
    "vit": partial(
        _spec,
        "hf:vit,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=48,image_size=16,"
        "patch_size=4",
        r"vit\.(encoder\.layer|layers)\.\d+",
    ),
    "mamba": partial(_spec, f"hf:mamba,{_MAMBA}", r"backbone\.layers\.\d+"),
    "mixtral": partial(
        _spec,
        f"hf:mixtral,{_SIZES},num_key_value_heads=2,num_local_experts=3,num_experts_per_tok=2",
        r"model\.layers\.\d+",
    ),
    "torch-decoder": lambda: _with_targets(Decoded(), r"decoder\.layers\.\d+", floats=WIDTH, memory=True),
    "einsum": lambda: _with_targets(Einsum(), r"layers\.\d+"),
    "mixer": lambda: _with_targets(Mixer(), r"layers\.\d+", floats=WIDTH),
    "x-transformers": _x_transformers,
}
"""Architectures that they had not seen."""
