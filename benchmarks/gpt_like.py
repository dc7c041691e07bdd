"""A training script of a small GPT-like model, in plain PyTorch: `gpt_like.py WIDTH DEPTH STEPS TIMES`.

It writes the processor time of each turn of its loop, in seconds, as JSON to the file TIMES.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, TOKENS, VOCABULARY = 4, 64, 256


class Block(nn.Module):
    """A Pre-LN block with causal attention of four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map the stream (B, T, d) to the next one."""
        q, k, v = self.attention(self.norms[0](x)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """Learnt positions, Pre-LN blocks, a final norm and a head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (B, T) to logits (B, T, ids)."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def train(width: int, depth: int, steps: int, times: Path) -> None:
    """Train for `steps` steps."""
    torch.manual_seed(0)
    model = Model(width, depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()
    turns, begin = [], time.process_time()
    for _ in range(steps):
        starts = torch.randint(len(data) - TOKENS - 1, (BATCH,)).tolist()
        ids = torch.stack([data[i : i + TOKENS] for i in starts])
        targets = torch.stack([data[i + 1 : i + TOKENS + 1] for i in starts])
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        now = time.process_time()
        turns.append(now - begin)
        times.write_text(json.dumps(turns))  # before the last step ends the script
        begin = time.process_time()


if __name__ == "__main__":
    width, depth, steps = map(int, sys.argv[1:4])
    train(width, depth, steps, Path(sys.argv[4]))
