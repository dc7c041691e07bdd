"""A training script: a GPT-like decoder on the tokens of Python source, with accumulation and clipping.

    python benchmarks/loops/source_gpt.py [--lr LR] [--seed N]

The blocks are Pre-LN with RMSNorm and rotary positions.
"""

import argparse
import collections
import io
import json
import sysconfig
import tokenize
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, LAST = 300, 20
ACCUMULATION, SEQUENCES, TOKENS = 2, 8, 32
VOCABULARY, WIDTH, HEADS, DEPTH = 700, 48, 4, 4
PACKAGES = ("json", "http", "logging", "urllib", "concurrent/futures")


def read_source() -> Tensor:
    """Ids (N,) of the tokens of some packages; rare tokens share id 0, literals of text have one id."""
    words = []
    for package in PACKAGES:
        for file in sorted((Path(sysconfig.get_path("stdlib")) / package).glob("*.py")):
            for token in tokenize.generate_tokens(io.StringIO(file.read_text("utf-8")).readline):
                if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.STRING):
                    words.append(tokenize.tok_name[token.type])
                elif token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
                    words.append(token.string)
    common = collections.Counter(words).most_common(VOCABULARY - 1)
    ids = {word: i for i, (word, _) in enumerate(common, 1)}
    return torch.tensor([ids.get(word, 0) for word in words])


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of features of (B, H, T, d) by angles (T, d / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        half = WIDTH // HEADS // 2
        speeds = 1e4 ** -(torch.arange(half) / half)
        self.register_buffer("angles", torch.arange(TOKENS)[:, None] * speeds)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, self.angles), rotate(k, self.angles)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of targets (B, T)."""
        logits = self.head(self.norm(self.blocks(self.embedding(ids))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    data, model = read_source(), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses, targets = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(ACCUMULATION):
            starts = torch.randint(len(data) - TOKENS, (SEQUENCES, 1))
            window = data[starts + torch.arange(TOKENS + 1)]
            loss = model(window[:, :-1], window[:, 1:]) / ACCUMULATION
            loss.backward()
            total += loss.item()
            targets.append(window[:, 1:].flatten())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
        if step % 50 == 0:
            print(f"step {step}: loss {total:.3f}")
    print(
        json.dumps(
            {"losses": losses, "counts": torch.bincount(torch.cat(targets[-LAST * ACCUMULATION :])).tolist()}
        )
    )


if __name__ == "__main__":
    main()
