"""Texts, ids and windows."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normscope.subjects.corpus import Corpus, encode
from normscope.subjects.feed import Portions
from normscope.subjects.feeds import masked_batches
from normscope.subjects.text import Text, load_text


def whole(text: Text) -> bytes:
    return text.read(0, len(text)).tobytes()


def ids_of(corpus: Corpus) -> np.ndarray:
    return corpus.read(0, len(corpus))


def test_the_default_text_is_real_and_always_the_same() -> None:
    first, second = load_text(), load_text()
    assert first.data == second.data
    assert len(first.data) == 2**20
    assert b"import" in first.data
    assert "standard library" in first.name


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("héllo " * 100, encoding="utf-8")
    assert whole(load_text(path)).decode() == "héllo " * 100


def test_a_byte_is_its_id_from_256_on() -> None:
    corpus = encode(Text("t", b"abc"), 256)
    assert ids_of(corpus).tolist() == [97, 98, 99]


def test_a_small_vocabulary_gets_ranks() -> None:
    corpus = encode(Text("t", b"aaabbcd"), 3)
    assert ids_of(corpus).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert ids_of(encode(Text("t", b"aaabbcd"), 4, reserved=(0,))).tolist() == [1, 1, 1, 2, 2, 3, 3]


@given(st.binary(min_size=1, max_size=50), st.integers(2, 300), st.sets(st.integers(0, 3), max_size=2))
def test_ids_are_in_the_vocabulary(data: bytes, vocabulary: int, reserved: set[int]) -> None:
    if vocabulary - len(reserved) < 2:
        return
    ids = ids_of(encode(Text("t", data), vocabulary, reserved))
    assert 0 <= ids.min() <= ids.max() < vocabulary
    if vocabulary < 256:
        assert not set(ids.tolist()) & reserved


def test_unigram_entropy() -> None:
    corpus = encode(Text("t", b"aabc"), 256)
    assert corpus.unigram_entropy == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    uniform = encode(Text("t", bytes(range(128))), 256)
    assert uniform.unigram_entropy == pytest.approx(math.log(128))
    assert str(encode(Text("t", b"aaa"), 256).unigram_entropy) == "0.0"


@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 5))
def test_windows_are_stretches_of_the_text_and_deterministic(size: int, length: int, seed: int) -> None:
    corpus = encode(Text("t", bytes(range(40))), 256)
    batches = list(itertools.islice(corpus.windows(size, length, seed), 3))
    again = list(itertools.islice(corpus.windows(size, length, seed), 3))
    for batch, same in zip(batches, again, strict=True):
        assert batch.shape == (size, length)
        assert batch.dtype == torch.int64
        assert torch.equal(batch, same)
        assert torch.equal(batch, batch[:, :1] + torch.arange(length))


def test_windows_reach_both_ends() -> None:
    corpus = encode(Text("t", bytes(range(10))), 256)
    starts = {int(b[0, 0]) for b in itertools.islice(corpus.windows(1, 4, 0), 200)}
    assert starts == set(range(7))


def test_another_seed_gives_other_windows() -> None:
    corpus = encode(load_text(), 256)
    assert not torch.equal(next(corpus.windows(4, 64, 0)), next(corpus.windows(4, 64, 1)))


@given(st.integers(1, 80), st.integers(0, 3))
def test_masking(length: int, seed: int) -> None:
    corpus = encode(Text("t", bytes(range(1, 101))), 256)
    batch = next(masked_batches(corpus, Portions(3, length, seed), 255, "ids", "labels"))
    assert isinstance(batch, dict)
    hidden = batch["labels"] != -100
    assert hidden.sum(dim=1).tolist() == [max(1, round(0.15 * length))] * 3
    assert torch.equal(hidden, batch["ids"] == 255)
    whole = torch.where(hidden, batch["labels"], batch["ids"])
    assert torch.equal(whole, whole[:, :1] + torch.arange(length))


def test_masks_change_from_batch_to_batch() -> None:
    corpus = encode(load_text(), 256)
    first, second = itertools.islice(masked_batches(corpus, Portions(2, 64, 0), 255, "i", "l"), 2)
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert not np.array_equal(first["i"] == 255, second["i"] == 255)
