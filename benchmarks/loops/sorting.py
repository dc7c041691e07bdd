"""A training script: an encoder-decoder that sorts numbers, with teacher forcing and padding.

    python benchmarks/loops/sorting.py [--lr LR] [--seed N]

The model is PyTorch's nn.Transformer with Pre-LN, dropout and sines as positions.
"""

import argparse
import json
import math

import torch
from torch import Tensor, nn

STEPS, LAST, SEQUENCES, SHORTEST, LONGEST, NUMBERS = 300, 20, 16, 10, 20, 50
PAD, BEGIN, END, FIRST = 0, 1, 2, 3
WIDTH, HEADS, DEPTH = 48, 4, 3


class Sorter(nn.Module):
    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(FIRST + NUMBERS, WIDTH, padding_idx=PAD)
        speeds = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(1e4) / WIDTH))
        angles = torch.arange(LONGEST + 2)[:, None] * speeds
        self.register_buffer("places", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        self.transformer = nn.Transformer(
            d_model=WIDTH,
            nhead=HEADS,
            num_encoder_layers=DEPTH,
            num_decoder_layers=DEPTH,
            dim_feedforward=3 * WIDTH,
            dropout=0.05,
            batch_first=True,
            norm_first=True,
        )
        self.head = nn.Linear(WIDTH, FIRST + NUMBERS)

    def embed(self, ids: Tensor) -> Tensor:
        """The stream (B, T, d) of ids (B, T)."""
        out: Tensor = self.embedding(ids) * math.sqrt(WIDTH) + self.places[: ids.shape[1]]
        return out

    def forward(self, source: Tensor, inputs: Tensor) -> Tensor:
        """Logits (B, T, ids) of the next number at each place of `inputs`."""
        later = torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool).triu(1)
        out = self.transformer(
            self.embed(source),
            self.embed(inputs),
            tgt_mask=later,
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=inputs == PAD,
            memory_key_padding_mask=source == PAD,
        )
        logits: Tensor = self.head(out)
        return logits


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, and the inputs and targets of the decoder: the numbers in ascending order, and an end."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (SEQUENCES,)).tolist()
    rows = [torch.randint(FIRST, FIRST + NUMBERS, (length,)) for length in lengths]
    begin, end = torch.tensor([BEGIN]), torch.tensor([END])
    sides = (
        rows,
        [torch.cat([begin, row.sort().values]) for row in rows],
        [torch.cat([row.sort().values, end]) for row in rows],
    )
    source, inputs, targets = (nn.utils.rnn.pad_sequence(side, batch_first=True) for side in sides)
    return source, inputs, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model, criterion = Sorter(), nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr, betas=(0.9, 0.98), eps=1e-9)
    losses, seen = [], []
    model.train()
    for step in range(1, STEPS + 1):
        source, inputs, targets = batch()
        logits = model(source, inputs)
        loss = criterion(logits.transpose(1, 2), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seen.append(targets[targets != PAD])
        if step % 100 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")
    print(json.dumps({"losses": losses, "counts": torch.bincount(torch.cat(seen[-LAST:])).tolist()}))


if __name__ == "__main__":
    main()
