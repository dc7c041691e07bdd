"""Training scripts that fail, for `check --try-remedies -- python benchmarks/remedies/failing.py CASE`.

    python benchmarks/remedies/failing.py CASE [--lr RATE] [--pre-ln] [--steps N]

A case is one of `CASES`. Alone, the script takes its steps, 300 by default, and prints the mean of the last
20 losses beside the loss without the input on the same batches; `--lr` and `--pre-ln` apply a remedy by hand.
"""

import argparse
import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, IGNORED, CLASSES = 64, -100, 10


class Case(NamedTuple):
    """Settings of a run: data, batch size, blocks, placement, optimizer and learning rate."""

    data: str
    size: int
    depth: int
    pre_ln: bool
    optimizer: str
    lr: float


CASES = {
    "post": Case("bytes", 8, 12, False, "Adam", 1e-3),
    "pre": Case("bytes", 8, 6, True, "AdamW", 0.5),
    "nan": Case("bytes", 8, 6, True, "SGD", 3.0),
    "words": Case("words", 4, 8, False, "AdamW", 2e-3),
    "few-words": Case("words", 2, 8, False, "AdamW", 2e-3),
    "masked": Case("masked", 8, 12, False, "Adam", 1e-3),
    "images": Case("images", 8, 12, False, "AdamW", 3e-3),
    "images-nan": Case("images", 8, 6, True, "SGD", 3.0),
}


class Model(nn.Module):
    """A stack of PyTorch's blocks over embedded ids (B, T), or over patches (B, 16, 4)."""

    def __init__(self, case: Case, pre_ln: bool, vocabulary: int, length: int) -> None:
        super().__init__()
        self.is_causal, self.is_of_images = case.data in ("bytes", "words"), case.data == "images"
        self.enter = nn.Linear(4, WIDTH) if self.is_of_images else nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Embedding(length, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=pre_ln)
        norm = nn.LayerNorm(WIDTH) if pre_ln else None
        self.encoder = nn.TransformerEncoder(layer, case.depth, norm, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES if self.is_of_images else vocabulary)
        for parameter in self.encoder.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.is_causal else None
        hidden = self.enter(x) + self.places(torch.arange(length))
        hidden = self.encoder(hidden, mask=mask, is_causal=self.is_causal)
        out: Tensor = self.head(hidden.mean(1) if self.is_of_images else hidden)
        return out


def source() -> str:
    """The source of the standard library's modules."""
    return "".join(
        path.read_text(errors="replace") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    )


def ids_of(data: str) -> tuple[Tensor, int, int]:
    """Ids (N,), size of the vocabulary, and length of a sequence."""
    if data == "words":
        words = re.findall(r"\w+|[^\w\s]", source())
        known = {word: k for k, (word, _) in enumerate(Counter(words).most_common(3999))}
        return torch.tensor([known.get(word, 3999) for word in words]), 4000, 32
    return torch.tensor([byte for byte in source().encode() if byte < 128]), 128, 64


def drawn(case: Case, ids: Tensor, length: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Function that draws a batch and its targets."""
    patterns = torch.randn(CLASSES, 16, 4)

    def draw() -> tuple[Tensor, Tensor]:
        if case.data == "images":
            classes = torch.randint(CLASSES, (case.size,))
            return patterns[classes] + 0.5 * torch.randn(case.size, 16, 4), classes
        starts = torch.randint(len(ids) - length, (case.size,))
        both = torch.stack([ids[start : start + length + 1] for start in starts])
        x, y = both[:, :-1], both[:, 1:]
        if case.data == "masked":
            hidden = torch.rand(x.shape) < 0.15
            return x.masked_fill(hidden, 1), x.masked_fill(~hidden, IGNORED)
        return x, y

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--pre-ln", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    case = CASES[options.case]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ids, vocabulary, length = (
        (torch.arange(CLASSES), CLASSES, 16) if case.data == "images" else ids_of(case.data)
    )
    draw = drawn(case, ids, length)
    model = Model(case, case.pre_ln or options.pre_ln, vocabulary, length)
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), lr=options.lr or case.lr)
    shares = torch.bincount(ids) / len(ids)
    losses, without_input = [], []
    for _ in range(options.steps):
        x, y = draw()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        without_input.append(-float(shares[y[y != IGNORED]].log().mean()))
    last, without = (sum(each[-20:]) / 20 for each in (losses, without_input))
    print(f"{options.case}: loss {last:.3f}, without the input {without:.3f}")


if __name__ == "__main__":
    main()
