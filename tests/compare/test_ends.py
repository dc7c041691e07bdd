"""Ways into and out of models that read no tokens, or give one output a sequence."""

from typing import Any

import pytest
import torch
from tiny_models import BASES, batch, tiny
from torch import Tensor, nn

import normscope
from normscope.compare.types import Difference, Part
from normscope.subjects import make_subject


class Classifier(nn.Module):
    """A sequence → one output, from vectors (B, T, 32) or from tokens."""

    def __init__(
        self, pool: Any = lambda x: x.mean(1), reads_tokens: bool = True, placed: bool = True
    ) -> None:
        super().__init__()
        self.inner, self.pool, self.reads_tokens = tiny(BASES["bert"]), pool, reads_tokens
        self.inner.head = nn.Identity()
        torch.manual_seed(3)
        self.head, self.read = nn.Linear(32, 5), nn.Linear(32, 32)
        self.place = nn.Parameter(torch.randn(1, 12, 32)) if placed else None

    def forward(self, x: Tensor) -> Tensor:
        if self.reads_tokens:
            return self.head(self.pool(self.inner(x)))
        x = self.read(x) if self.place is None else self.read(x) + self.place
        for block in self.inner.blocks:
            x = block(x)
        return self.head(self.pool(x))


def found(a: nn.Module, b: nn.Module, inputs: Tensor) -> tuple[Difference, ...]:
    return normscope.diff(a, b, batch=inputs, parts="function", reraise=True).of(Part.FUNCTION)


POOLS = {
    "the first token's": lambda x: x[:, 0],
    "the last token's": lambda x: x[:, -1],
    "the mean of all tokens but the first": lambda x: x[:, 1:].mean(1),
    "the maximum over all tokens": lambda x: x.amax(1),
}


@pytest.mark.parametrize("words", POOLS)
def test_another_pooling_is_named(words: str) -> None:
    (each,) = found(Classifier(), Classifier(POOLS[words]), batch(BASES["bert"]))
    assert each.name == "pooling"
    assert (each.a, each.b) == ("the mean of all tokens", words)


@pytest.mark.parametrize("is_of_a", [True, False])
def test_positions_of_a_model_that_reads_vectors_are_named(is_of_a: bool) -> None:
    one, other = Classifier(reads_tokens=False), Classifier(reads_tokens=False, placed=False)
    inputs = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(0))
    (each,) = found(*((one, other) if is_of_a else (other, one)), inputs)
    assert each.name == "positions"
    assert each.confirmed
    assert (each.a if is_of_a else each.b, each.b if is_of_a else each.a) == (
        "added to the embeddings",
        "none",
    )


@pytest.mark.parametrize("base", BASES)
def test_sequences_of_other_lengths_are_cut_and_compared(base: str) -> None:
    ids = batch(BASES[base])
    long, short = (
        make_subject(tiny(BASES[base]), ids),
        make_subject(tiny(BASES[base], {"scale": 0.1}), ids[:, :7]),
    )
    for pair in ((long, short), (short, long)):
        (each,) = normscope.diff(*pair, parts="function", reraise=True).of(Part.FUNCTION)
        assert each.name == "attention-scale"
        assert each.confirmed
