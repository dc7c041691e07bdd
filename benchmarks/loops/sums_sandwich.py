"""A training script: a decoder with sandwich norms on sums as text, in bfloat16.

    python benchmarks/loops/sums_sandwich.py [--lr LR] [--seed N]

Attention has grouped queries and norms of queries and keys, MLPs are SwiGLU, the head is the embedding.
"""

import argparse
import json
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, LAST, SEQUENCES, TOKENS = 300, 20, 12, 32
WIDTH, HEADS, SHARED, DEPTH = 64, 4, 2, 4
SIZE = WIDTH // HEADS
CHARACTERS = "0123456789+-=\n"


class Attention(nn.Module):
    """Causal attention: each head of keys and values serves several of queries."""

    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * SHARED * SIZE, bias=False)
        self.query_norm, self.key_norm = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        speeds = 1e4 ** -(torch.arange(0, SIZE, 2) / SIZE)
        self.register_buffer("angles", torch.arange(TOKENS)[:, None] * speeds)

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = self.angles.cos(), self.angles.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        k, v = self.key_value(x).unflatten(-1, (2, SHARED, SIZE)).permute(2, 0, 3, 1, 4)
        q, k = self.rotate(self.query_norm(q)), self.rotate(self.key_norm(k))
        mixed = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 5 * WIDTH, bias=False)
        self.down = nn.Linear(5 * WIDTH // 2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """Each branch has a norm before it and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), SwiGLU()
        self.before = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.behind = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.behind[0](self.attention(self.before[0](x)))
        out: Tensor = x + self.behind[1](self.mlp(self.before[1](x)))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.norm = nn.RMSNorm(WIDTH)
        self.apply(self.start)

    @staticmethod
    def start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (B, T) to logits (B, T, ids)."""
        x = self.embedding(ids) * math.sqrt(WIDTH)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def write_sums() -> Tensor:
    """Ids (N,) of 20,000 lines such as 17+85=102 and 30-64=-34."""
    generator = torch.Generator().manual_seed(2)
    lines = []
    for a, b, minus in torch.randint(100, (20_000, 3), generator=generator).tolist():
        lines.append(f"{a}-{b}={a - b}\n" if minus < 40 else f"{a}+{b}={a + b}\n")
    return torch.tensor([CHARACTERS.index(character) for line in lines for character in line])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    data, model = write_sums(), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), fused=True)
    losses, targets = [], []
    for step in range(STEPS):
        window = data[torch.randint(len(data) - TOKENS, (SEQUENCES, 1)) + torch.arange(TOKENS + 1)]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        targets.append(window[:, 1:].flatten())
        if step % 60 == 59:
            print(f"{step + 1}/{STEPS} {losses[-1]:.3f}")
    print(json.dumps({"losses": losses, "counts": torch.bincount(torch.cat(targets[-LAST:])).tolist()}))


if __name__ == "__main__":
    main()
