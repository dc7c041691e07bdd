"""Small subjects of every kind, for the laws of the remedies."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, read_anatomy
from normscope.demo.examples import CausalEncoder
from normscope.subjects import Subject, load, make_subject
from normscope.train import Recipe

CONFIG = Recipe(lr=1e-2, steps=4)
_SIZE = {"batch_size": 2, "seq_len": 16}


class HandPost(nn.Module):
    """A Post-LN language model by hand: separate q, k and v, a head without a bias."""

    def __init__(self, depth: int = 3, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(HandBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.embedding(ids_BT)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class HandBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed_forward(x))


def _hf(kind: str, **options: Any) -> Subject:
    words = ",".join(f"{key}={value}" for key, value in options.items())
    return load(f"hf:{kind},{words}", seed=3, **_SIZE)


def _made(model: Callable[[], nn.Module]) -> Subject:
    torch.manual_seed(3)
    return make_subject(model(), seed=3, **_SIZE)


def _ours(name: str, scheme: str, **options: Any) -> Subject:
    words = "".join(f",{key}={value}" for key, value in options.items())
    return load(f"nn:{name},scheme={scheme},depth=3,width=24,heads=2{words}", seed=3, **_SIZE)


_BERT = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 256}
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "nn-post": lambda: _ours("decoder", "post"),
    "nn-pre": lambda: _ours("decoder", "pre", init="xavier"),
    "nn-res-post": lambda: _ours("decoder", "res-post"),
    "nn-no-final": lambda: _ours("decoder", "pre-no-final", dropout=0.1),
    "nn-deepnorm": lambda: _ours("decoder", "deepnorm"),
    "nn-encoder": lambda: _ours("encoder", "post"),
    "nn-encoder-decoder": lambda: _ours("encoder-decoder", "post"),
    "torch-post": lambda: _made(lambda: CausalEncoder(depth=3, width=24)),
    "hand-post": lambda: _made(HandPost),
    "bert": lambda: _hf("bert", intermediate_size=64, **_BERT),
    "gpt2": lambda: _hf("gpt2", n_layer=2, n_embd=32, n_head=2, vocab_size=256),
    "llama": lambda: _hf("llama", intermediate_size=64, **_BERT),
    "opt": lambda: _hf("opt", ffn_dim=64, word_embed_proj_dim=32, do_layer_norm_before="false", **_BERT),
}


@cache
def given(name: str) -> tuple[Subject, Anatomy]:
    """A subject and its reading, shared by tests: do not change it."""
    subject = SUBJECTS[name]()
    return subject, read_anatomy(subject)


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """State that a remedy must leave as it was, with the random generators."""
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "identity": [id(p) for p in model.parameters()],
        "gradients": [p.grad is None for p in model.parameters()],
        "requires": [p.requires_grad for p in model.parameters()],
        "modules": [(name, type(m).__name__, m.training) for name, m in model.named_modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "eps": [getattr(m, "eps", None) for m in model.modules()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "python": random.getstate(),
    }


def same(a: Any, b: Any) -> bool:
    """True where both are equal bit for bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)
