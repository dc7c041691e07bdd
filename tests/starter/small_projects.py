"""Small folders of code, built as well-known training repositories are."""

GPT = """
import inspect
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


class LayerNorm(nn.Module):
    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, True)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, True)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

"""
NANO = (
    GPT
    + """
@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 300
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 16


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = LayerNorm(config.n_embd, True)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        assert idx.size(1) <= self.config.block_size
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
)
NANO_TRAIN = """
import torch
from model import GPT, GPTConfig

n_layer = 3
n_head = 2
dropout = 0.0
model_args = dict(n_layer=n_layer, n_head=n_head)
gptconf = GPTConfig(n_layer=n_layer, **model_args)
model = GPT(gptconf)
while True:
    raise SystemExit("training began")
"""
MINI = (
    GPT
    + """
class CN:
    def __init__(self, **values):
        self.__dict__.update(values)


class GPT(nn.Module):
    @staticmethod
    def get_default_config():
        C = CN()
        C.model_type = 'gpt'
        C.n_layer = None
        C.n_head = None
        C.n_embd = None
        C.vocab_size = None
        C.block_size = None
        return C

    def __init__(self, config):
        super().__init__()
        assert config.vocab_size is not None and config.block_size is not None
        if config.model_type is not None:
            sizes = {'gpt-nano': dict(n_layer=3, n_head=2, n_embd=16)}[config.model_type]
            config.__dict__.update(sizes)
        self.block_size = config.block_size
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.LayerNorm(config.n_embd),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss
"""
)
MINI_DEMO = """
from mingpt.model import GPT

if __name__ == '__main__':
    config = GPT.get_default_config()
    config.model_type = 'gpt-nano'
    config.vocab_size = dataset.get_vocab_size()
    config.block_size = 16
    model = GPT(config)
    train(model)
"""
ENCODER = """
import argparse
import math

import torch
from torch import nn


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=500):
        super().__init__()
        self.register_buffer("pe", torch.zeros(max_len, 1, d_model))

    def forward(self, x):
        return x + self.pe[: x.size(0)]


class TransformerModel(nn.Module):
    def __init__(self, ntoken, d_model, nhead, nlayers, dropout=0.5):
        super().__init__()
        self.embedding = nn.Embedding(ntoken, d_model)
        self.pos_encoder = PositionalEncoding(d_model)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(d_model, nhead, 32, dropout), nlayers)
        self.linear = nn.Linear(d_model, ntoken)

    def forward(self, src, src_mask=None):
        if src_mask is None:
            src_mask = nn.Transformer.generate_square_subsequent_mask(len(src))
        return self.linear(self.encoder(self.pos_encoder(self.embedding(src)), src_mask))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nlayers", type=int, default=2)
    args = parser.parse_args()
    ntokens = len(vocabulary)
    emsize = 16
    model = TransformerModel(ntokens, emsize, 2, args.nlayers, 0.2)


if __name__ == "__main__":
    main()
"""
UNKNOWN_DEPTH = """
import sys
from torch import nn


class Net(nn.Module):
    def __init__(self, vocab_size, depth, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(width, 2, 32) for _ in range(depth)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


if __name__ == "__main__":
    net = Net(100, int(sys.argv[1]))
"""
ONE_FILE = """
import torch
from torch import nn


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        return self.stack(self.embed(x))


model = TinyLM()
for step in range(10):
    raise SystemExit("training began")
"""
NO_CLASS = """
from torch import nn
import torch

width = 16
encoder_layer = nn.TransformerEncoderLayer(d_model=width, nhead=2, dim_feedforward=2 * 16, batch_first=True)
encoder = nn.TransformerEncoder(encoder_layer, num_layers=2, enable_nested_tensor=False)
for _ in range(10):
    raise SystemExit("training began")
"""
HUGGING_FACE = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=len(tokenizer), n_positions=64)
model = GPT2LMHeadModel(config)
Trainer(model=model).train()
"""
OWN_PRETRAINED = """
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class TinyConfig(PretrainedConfig):
    model_type = "tiny"

    def __init__(self, vocab_size=256, width=16, depth=2, **kwargs):
        self.vocab_size, self.width, self.depth = vocab_size, width, depth
        super().__init__(**kwargs)


class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config: TinyConfig):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        make = lambda: nn.TransformerEncoderLayer(config.width, 2, 32, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList([make() for _ in range(config.depth)])
        self.head = nn.Linear(config.width, config.vocab_size)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)
"""
