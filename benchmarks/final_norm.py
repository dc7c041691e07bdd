"""Cost of a missing final norm: the loss of small Pre-LN decoders with and without one.

    python -m benchmarks.final_norm

2 and 12 blocks of width 48 with two heads, Xavier weights, 32 bytes of context, 200 steps of AdamW on the
standard library's source, one seed. One row a depth and learning rate: the mean loss of the last 50 steps in
nats, and the RMS of what the head reads at the start and at the end. Forty seconds on one core.
"""

import statistics
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.logit_spread import losses_of, text

WIDTH, HEADS, LENGTH, STEPS, LAST = 48, 2, 32, 200, 50
DEPTHS, RATES = (2, 12), (1e-3, 1e-2)


class Decoder(nn.Module):
    """A byte-level Pre-LN decoder; `read` is the last input of its head."""

    read: Tensor

    def __init__(self, depth: int, final: bool):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        norm: Any = nn.LayerNorm(WIDTH) if final else None
        self.blocks = nn.TransformerEncoder(layer, depth, norm=norm, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        for parameter in self.blocks.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, ids_BT: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x_BTC = self.bytes(ids_BT) + self.places(torch.arange(LENGTH))
        self.read = self.blocks(x_BTC, mask=mask, is_causal=True)
        logits: Tensor = self.head(self.read)
        return logits


def run(data: Tensor, depth: int, final: bool, rate: float, seed: int = 0) -> tuple[float, float, float]:
    """Mean loss of the last steps, and the RMS of the head's input at the first and the last step."""
    torch.manual_seed(seed)
    model = Decoder(depth, final)
    losses, sizes = [], []
    for loss in losses_of(model, data, rate, seed, LENGTH, STEPS):
        losses.append(loss)
        sizes.append(model.read.square().mean().sqrt().item())
    return statistics.fmean(losses[-LAST:]), sizes[0], sizes[-1]


def main() -> None:
    torch.set_num_threads(1)
    data = text()
    for depth in DEPTHS:
        for rate in RATES:
            cells = (run(data, depth, final, rate) for final in (True, False))
            shown = [f"{loss:.3f} ({start:.2f} → {end:.2f})" for loss, start, end in cells]
            print(f"{depth} blocks, {rate:g}: with a final norm {shown[0]}, without {shown[1]}", flush=True)


if __name__ == "__main__":
    main()
