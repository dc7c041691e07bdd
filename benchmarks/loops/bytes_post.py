"""A training script: a deep Post-LN decoder on bytes of English text, without a warm-up.

    python benchmarks/loops/bytes_post.py [--lr LR] [--seed N]

The text describes the data sets of scikit-learn. The residual adds stand in the model's own forward.
"""

import argparse
import json
from collections.abc import Iterator
from importlib import resources

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, LAST, SEQUENCES, TOKENS = 300, 20, 12, 40
WIDTH, HEADS, DEPTH = 48, 4, 12


class Decoder(nn.Module):
    """A decoder whose norms stand behind the adds: norm(x + branch(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(DEPTH)])
        self.out = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
        self.up = nn.ModuleList([nn.Linear(WIDTH, 4 * WIDTH) for _ in range(DEPTH)])
        self.down = nn.ModuleList([nn.Linear(4 * WIDTH, WIDTH) for _ in range(DEPTH)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2 * DEPTH)])
        self.head = nn.Linear(WIDTH, 256)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (B, T) to logits (B, T, 256)."""
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for i in range(DEPTH):
            q, k, v = self.qkv[i](x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = self.norms[2 * i](x + self.out[i](mixed.transpose(1, 2).flatten(2)))
            x = self.norms[2 * i + 1](x + self.down[i](F.relu(self.up[i](x))))
        logits: Tensor = self.head(x)
        return logits


def batches() -> Iterator[Tensor]:
    """Endless batches (B, T + 1) of windows of the text."""
    folder = resources.files("sklearn.datasets.descr")
    files = sorted((each for each in folder.iterdir() if each.name.endswith(".rst")), key=lambda f: f.name)
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    while True:
        starts = torch.randint(len(text) - TOKENS, (SEQUENCES,)).tolist()
        yield torch.stack([text[start : start + TOKENS + 1] for start in starts])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = Decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    losses, targets = [], []
    for step, window in enumerate(batches(), 1):
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 256), window[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        targets.append(window[:, 1:].flatten())
        if step % 50 == 0:
            print(step, losses[-1])
        if step == STEPS:
            break
    print(json.dumps({"losses": losses, "counts": torch.bincount(torch.cat(targets[-LAST:])).tolist()}))


if __name__ == "__main__":
    main()
