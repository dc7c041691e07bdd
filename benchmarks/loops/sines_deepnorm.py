"""A training script: an encoder with DeepNorm that forecasts noisy sums of sines.

    python benchmarks/loops/sines_deepnorm.py [--lr LR] [--seed N]

The loss is smooth L1. Weights decay, norms and biases do not.
"""

import argparse
import json
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, LAST, SERIES, PAST, FUTURE = 300, 20, 16, 40, 8
WIDTH, HEADS, DEPTH, NOISE = 48, 4, 8, 0.2
ALPHA, BETA = (2 * DEPTH) ** 0.25, (8 * DEPTH) ** -0.25


class DeepNormLayer(nn.Module):
    """Attention and an MLP, each with a norm behind its residual add."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key, self.value = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        nn.init.xavier_normal_(self.query_key.weight)
        for linear in (self.value, self.out, self.up, self.down):
            nn.init.xavier_normal_(linear.weight, gain=BETA)

    def attend(self, x: Tensor) -> Tensor:
        q, k = self.query_key(x).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        v = self.value(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(ALPHA * x + self.attend(x))
        out: Tensor = self.norm2(ALPHA * x + self.down(F.relu(self.up(x))))
        return out


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, WIDTH)
        self.places = nn.Embedding(PAST, WIDTH)
        self.layers = nn.ModuleList([DeepNormLayer() for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, FUTURE)

    def forward(self, values: Tensor) -> Tensor:
        """Map past values (B, T) to future ones (B, FUTURE)."""
        x = self.embed(values[..., None]) + self.places(torch.arange(values.shape[1]))
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x[:, -1])
        return out


def batch() -> tuple[Tensor, Tensor]:
    """Past and future values of sums of three sines with noise."""
    periods = 6 + 24 * torch.rand(SERIES, 3, 1)
    phases, sizes = 2 * math.pi * torch.rand(SERIES, 3, 1), 0.3 + torch.rand(SERIES, 3, 1)
    times = torch.arange(PAST + FUTURE)
    values = (sizes * torch.sin(2 * math.pi * times / periods + phases)).sum(1)
    values = values + NOISE * torch.randn(SERIES, PAST + FUTURE)
    return values[:, :PAST], values[:, PAST:]


def best_constant_loss(targets: Tensor) -> float:
    """The smallest smooth L1 loss of one constant, which gradient descent finds."""
    constant = targets.mean()
    for _ in range(100):
        constant = constant + (targets - constant).clamp(-1, 1).mean()
    return float(F.smooth_l1_loss(constant.expand_as(targets), targets))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = Forecaster()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.lr)
    losses, futures = [], []
    for step in range(STEPS):
        past, future = batch()
        loss = F.smooth_l1_loss(model(past), future)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        futures.append(future)
        if step % 100 == 99:
            print(f"{step + 1} steps: loss {sum(losses[-100:]) / 100:.4f}")
    print(json.dumps({"losses": losses, "constant": best_constant_loss(torch.cat(futures[-LAST:]))}))


if __name__ == "__main__":
    main()
