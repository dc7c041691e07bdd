"""A small decoder and its batches, for the training loops beside this file; normscope is not mentioned."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS, WIDTH, HEADS, VOCABULARY, LENGTH = 2, 32, 2, 128, 24
with open(torch.__file__, "rb") as file:
    DATA = torch.tensor([byte for byte in file.read() if byte < VOCABULARY])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(self.norm1(x)).chunk(3, dim=-1)
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, blocks: int = BLOCKS, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.apply(start)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class OwnLoss(Decoder):
    """The same, which computes its loss itself, as Hugging Face's models do."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(input_ids)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def batches(size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, (size, LENGTH) each, endless."""
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, len(DATA) - LENGTH - 1, (size,), generator=generator)
        rows = torch.stack([DATA[i : i + LENGTH + 1] for i in starts])
        yield rows[:, :-1], rows[:, 1:]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def say(step: int, loss: float | Tensor) -> None:
    """Print the loss of a step, which the test compares with the report's."""
    print("loss of step", step, loss.item() if isinstance(loss, Tensor) else loss, flush=True)


def tensors_with_decay(model: nn.Module, decay: float) -> list[dict]:
    """Parameter groups: matrices with weight decay, vectors without."""
    parameters = list(model.parameters())
    matrices, vectors = ([p for p in parameters if (p.ndim > 1) == many] for many in (True, False))
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
