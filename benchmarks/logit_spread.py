"""Cost of wide attention logits: the loss of a small decoder whose logits start 1 to 32 times as wide.

    python -m benchmarks.logit_spread

Three Pre-LN blocks of width 64 with two heads, 64 bytes of context, 300 steps of AdamW on the standard
library's source, two seeds. One row a factor: the mean loss of the last 50 steps, in nats, without and with a
norm on queries and keys. Twelve minutes on one core.
"""

import math
import statistics
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, DEPTH, LENGTH, BATCH, STEPS, LAST = 64, 2, 3, 64, 8, 300, 50
FACTORS, RATES, SEEDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0), (1e-3, 3e-3), (0, 1)


class Block(nn.Module):
    """A Pre-LN block whose logits are `factor` times as wide as with 1/√d_h."""

    def __init__(self, factor: float, normed: bool):
        super().__init__()
        head = WIDTH // HEADS
        self.scale = factor / math.sqrt(head)
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.qkv.weight, std=WIDTH**-0.5)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norm_q, self.norm_k = (nn.RMSNorm(head) if normed else nn.Identity() for _ in "qk")

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x_BTC)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv)
        q, k = self.norm_q(q), self.norm_k(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        x_BTC = x_BTC + self.out(y.transpose(1, 2).flatten(2))
        return x_BTC + self.mlp(self.before_mlp(x_BTC))


class Decoder(nn.Module):
    """A byte-level decoder."""

    def __init__(self, factor: float, normed: bool):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(factor, normed) for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        for weight, deviation in ((self.bytes, 0.7), (self.places, 0.7), (self.head, 0.02)):
            nn.init.normal_(weight.weight, std=deviation)

    def forward(self, ids_BT: Tensor) -> Tensor:
        places = self.places(torch.arange(ids_BT.shape[1]))
        return self.head(self.norm(self.blocks(self.bytes(ids_BT) + places)))


def text() -> Tensor:
    """The bytes of the first sixty files of the standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()


def losses_of(
    model: nn.Module, data: Tensor, rate: float, seed: int, length: int, steps: int
) -> Iterator[float]:
    """Train a model on windows of `data`, and yield the loss of each step after it."""
    generator = torch.Generator().manual_seed(seed + 100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - length - 1, (BATCH,), generator=generator)
        ids = torch.stack([data[start : start + length + 1] for start in starts])
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def final_loss(data: Tensor, factor: float, normed: bool, rate: float, seed: int) -> float:
    """Mean loss of the last steps of one run."""
    torch.manual_seed(seed)
    losses = list(losses_of(Decoder(factor, normed), data, rate, seed, LENGTH, STEPS))
    return statistics.fmean(losses[-LAST:])


def main() -> None:
    torch.set_num_threads(1)
    data = text()
    for normed in (False, True):
        for rate in RATES:
            for factor in FACTORS:
                found = [round(final_loss(data, factor, normed, rate, seed), 3) for seed in SEEDS]
                print(
                    f"norm on q and k: {normed}, learning rate {rate:g}, factor {factor:g}: {found}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
