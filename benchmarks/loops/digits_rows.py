"""A training script: an encoder that classifies digits by their rows, in epochs with a test after each.

    python benchmarks/loops/digits_rows.py [--lr LR] [--seed N]

The encoder is PyTorch's, with Post-LN and dropout.
"""

import argparse
import json

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, LAST, EPOCHS, IMAGES, TRAINING = 300, 20, 5, 24, 1440
WIDTH, HEADS, DEPTH, ROWS = 64, 4, 4, 8


class RowClassifier(nn.Module):
    """Rows as tokens, behind one token from which the class is read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(ROWS, WIDTH)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(0.02 * torch.randn(1, ROWS + 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, DEPTH)
        self.classes = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 8, 8) to logits (B, 10)."""
        tokens = torch.cat([self.first.expand(len(images), -1, -1), self.embed(images)], 1)
        logits: Tensor = self.classes(self.encoder(tokens + self.places)[:, 0])
        return logits


def loaders() -> tuple[DataLoader, DataLoader]:
    """Batches of training and of test images; the split does not depend on the seed."""
    pixels, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(1))
    images = torch.tensor(pixels, dtype=torch.float32)[order].unflatten(1, (8, 8)) / 16
    labels = torch.tensor(classes)[order]
    training = TensorDataset(images[:TRAINING], labels[:TRAINING])
    test = TensorDataset(images[TRAINING:], labels[TRAINING:])
    return DataLoader(training, batch_size=IMAGES, shuffle=True), DataLoader(test, batch_size=100)


@torch.no_grad()
def accuracy(model: nn.Module, batches: DataLoader) -> float:
    """Share of images whose class is right."""
    model.eval()
    right = torch.cat([model(images).argmax(-1) == labels for images, labels in batches])
    return right.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    training, test = loaders()
    model, criterion = RowClassifier(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    losses, targets = [], []
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in training:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            targets.append(labels)
        print(f"epoch {epoch}: loss {losses[-1]:.3f}, test accuracy {accuracy(model, test):.3f}")
    assert len(losses) == STEPS
    print(json.dumps({"losses": losses, "counts": torch.bincount(torch.cat(targets[-LAST:])).tolist()}))


if __name__ == "__main__":
    main()
