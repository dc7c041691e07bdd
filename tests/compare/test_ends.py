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


class Pooled(Classifier):
    """A classifier with a final norm after its pooling, or before it."""

    def __init__(self, pool: Any, *, is_first: bool, eps: float = 1e-5, **changes: Any) -> None:
        super().__init__(pool)
        self.inner = tiny(BASES["gpt"], changes)
        self.inner.head, self.inner.norm = nn.Identity(), None
        self.norm, self.is_first = nn.LayerNorm(32, eps=eps), is_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.head(self.norm(self.pool(x)) if self.is_first else self.pool(self.norm(x)))


TAKEN = {words: POOLS[words] for words in ("the first token's", "the last token's")}
LINEAR = {words: pool for words, pool in POOLS.items() if "maximum" not in words}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("words", LINEAR)
@pytest.mark.parametrize("taken", TAKEN)
def test_another_pooling_is_named_where_one_side_norms_what_it_pooled(
    taken: str, words: str, is_first: bool
) -> None:
    one, other = Pooled(TAKEN[taken], is_first=is_first), Pooled(POOLS[words], is_first=not is_first)
    differences = found(one, other, batch(BASES["gpt"]))
    assert [each.name for each in differences] == ([] if words == taken else ["pooling"])
    for each in differences:
        late = "" if is_first or words in TAKEN else ", before the final norm"
        assert (each.a, each.b) == (taken, words + late)


def test_a_mean_before_the_final_norm_is_another_pooling_than_one_after_it() -> None:
    one, other = (Pooled(lambda x: x.mean(1), is_first=is_first) for is_first in (True, False))
    (each,) = found(one, other, batch(BASES["gpt"]))
    assert each.name == "pooling"
    assert (each.a, each.b) == ("the mean of all tokens, before the final norm", "the mean of all tokens")


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"eps": 1e-2}, "final-norm-eps"), ({"activation": "relu"}, "activation"), ({"bias": False}, "bias")],
    ids=["norm", "last branch", "projections"],
)
@pytest.mark.parametrize("words", TAKEN)
def test_beside_a_pooling_before_the_norm_only_what_differs_is_named(
    words: str, changes: dict[str, Any], name: str
) -> None:
    for is_first in (True, False):
        one, other = (
            Pooled(TAKEN[words], is_first=is_first),
            Pooled(TAKEN[words], is_first=not is_first, **changes),
        )
        assert {each.name for each in found(one, other, batch(BASES["gpt"]))} == {name}


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
