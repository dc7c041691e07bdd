"""Every feed of text holds out its end, and validates all seeds on the same batches."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from normscope.errors import UsageError
from normscope.subjects import Subject, load

BERT = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
FACTORIES = """
import torch
from torch import nn

class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, ids, targets=None):
        logits = self.head(self.embed(ids))
        if targets is None:
            return logits, None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

class Two(Labelled):
    def forward(self, source, target):
        return self.head(self.embed(source) + self.embed(target))

def bare():
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))

def own_batch():
    return bare(), torch.zeros(2, 8, dtype=torch.long)
"""
MODELS = [
    "nn:decoder,depth=1,width=16,heads=2",
    "nn:encoder,depth=1,width=16,heads=2",
    "nn:encoder-decoder,depth=1,width=16,heads=2",
    "hf:gpt2,n_layer=1,n_embd=16,n_head=2",
    f"hf:bert,{BERT}",
    "hf:t5,d_model=16,d_kv=8,num_heads=2,d_ff=16,num_layers=1",
    "{folder}/factories.py:bare",
    "{folder}/factories.py:Labelled",
    "{folder}/factories.py:Two",
]
TRAINED, KEPT = b"abcdefghijklm", b"nopqrstuvwxyz"


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Subject]:
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "text").write_bytes(TRAINED * 32 + KEPT * 8)

    def built(spec: str, **options: Any) -> Subject:
        if spec.startswith("hf:"):
            pytest.importorskip("transformers")
        return load(spec.format(folder=tmp_path), text=tmp_path / "text", seq_len=12, **options)

    return built


def letters(batches: Iterator[Any]) -> set[int]:
    """Bytes of lower-case letters in a few batches, without masks, padding and start tokens."""
    found: set[int] = set()
    for batch in itertools.islice(batches, 30):
        tensors = (
            [batch]
            if isinstance(batch, Tensor)
            else list(dict(batch).values() if isinstance(batch, dict) else batch)
        )
        for tensor in tensors:
            found |= {i for i in tensor.flatten().tolist() if ord("a") <= i <= ord("z")}
    return found


@pytest.mark.parametrize("spec", MODELS)
def test_training_and_validation_share_no_token(spec: str, build: Callable[..., Subject]) -> None:
    subject = build(spec, validation=0.2)
    assert subject.validation is not None
    assert letters(subject.batches()) == set(TRAINED)
    assert letters(subject.validation()) == set(KEPT)
    assert "the last 20 % of it kept for validation" in subject.input
    if subject.unigram_entropy is not None:
        assert subject.unigram_entropy == pytest.approx(torch.tensor(13.0).log().item())


@pytest.mark.parametrize("spec", MODELS)
def test_validation_is_the_same_for_every_seed(spec: str, build: Callable[..., Subject]) -> None:
    one, other = build(spec, validation=0.2, seed=1), build(spec, validation=0.2, seed=2)
    assert one.validation is not None
    assert other.validation is not None
    for first, second in itertools.islice(zip(one.validation(), other.validation(), strict=False), 3):
        assert same(first, second)
    assert not same(next(one.batches()), next(other.batches()))


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return all(torch.equal(first[key], second[key]) for key in first)
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("spec", MODELS)
def test_without_a_share_nothing_is_kept(spec: str, build: Callable[..., Subject]) -> None:
    subject = build(spec)
    assert subject.validation is None
    assert letters(subject.batches()) >= set(TRAINED) | set(KEPT[:1])
    assert "validation" not in " ".join([subject.input, *subject.notes])


@pytest.mark.parametrize("spec", MODELS)
def test_a_validation_part_that_is_too_short(spec: str, build: Callable[..., Subject]) -> None:
    with pytest.raises(UsageError, match=r"its validation part, 5 tokens.*at least one sequence of"):
        build(spec, validation=0.0101)


def test_batches_of_the_users_keep_nothing_and_the_report_says_so(build: Callable[..., Subject]) -> None:
    subject = build("{folder}/factories.py:own_batch", validation=0.2)
    assert subject.validation is None
    assert any("nothing is held out for validation" in note for note in subject.notes)


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, float("nan"), "a tenth", True])
def test_shares_that_are_none(share: Any, build: Callable[..., Subject]) -> None:
    with pytest.raises(UsageError, match="a share from 0, under 1"):
        build(MODELS[0], validation=share)


def test_fake_tensors(build: Callable[..., Subject]) -> None:
    assert build(MODELS[0], validation=0.2, fake=True).validation is not None


def test_a_folder_keeps_the_files_that_come_last(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(TRAINED * 32)
    (tmp_path / "b").write_bytes(KEPT * 8)
    subject = load(MODELS[0], text=tmp_path, validation=0.2, seq_len=12)
    assert subject.validation is not None
    assert letters(subject.batches()) == set(TRAINED)
    assert letters(subject.validation()) == set(KEPT)
