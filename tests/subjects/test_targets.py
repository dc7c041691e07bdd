"""Targets of a batch, against the loss that is taken on it."""

import argparse
import itertools
import math
from pathlib import Path

import pytest
import torch

from normscope.nn.output import IGNORED
from normscope.subjects import load
from normscope.subjects.targets import batch_entropy, hides_targets, num_random_ids, targets_of

IDS = torch.tensor([[5, 1, 2], [6, 3, 3]])


@pytest.mark.parametrize(
    ("batch", "targets"),
    [
        (IDS, [1, 2, 3, 3]),
        ((IDS, torch.ones(2, 3)), [1, 2, 3, 3]),
        ({"input_ids": IDS}, [1, 2, 3, 3]),
        ({"input_ids": IDS, "labels": IDS.clone()}, [1, 2, 3, 3]),
        ({"ids": IDS[:, :-1], "labels": IDS[:, 1:]}, [1, 2, 3, 3]),
        ({"ids": IDS, "labels": IDS.masked_fill(IDS > 3, IGNORED)}, [1, 2, 3, 3]),
        ({"pixel_values": torch.zeros(2, 1, 4, 4), "labels": torch.tensor([7, 8])}, [7, 8]),
        ({"x": torch.zeros(2, 3)}, None),
        (torch.zeros(2, 3, 4), None),
    ],
)
def test_targets_are_what_the_loss_predicts(batch: object, targets: list[int] | None) -> None:
    found = targets_of(batch)
    assert targets == (None if found is None else found.tolist())


@pytest.mark.parametrize(
    "spec", ["nn:decoder,depth=1,width=16,heads=2", "nn:encoder,depth=1,width=16,heads=2"]
)
def test_a_batchs_entropy_is_the_least_loss_of_a_model_that_ignores_its_input(spec: str) -> None:
    subject = load(spec, batch_size=2, seq_len=16)
    for batch in itertools.islice(subject.batches(), 3):
        targets = batch["labels"][batch["labels"] != IGNORED]
        shares = torch.bincount(targets).double() / targets.numel()
        logits = shares.log().clamp_min(-700).expand(targets.numel(), -1)
        least = float(torch.nn.functional.cross_entropy(logits, targets))
        assert batch_entropy(batch) == pytest.approx(least, rel=1e-9)
    assert batch_entropy(subject.batch) < subject.unigram_entropy
    assert batch_entropy({"x": torch.zeros(2, 3)}) is None


@pytest.mark.parametrize("size", [100, 256, 50257])
@pytest.mark.parametrize("rows", [2, 32])
def test_random_ids_are_recognised(size: int, rows: int) -> None:
    draws = [torch.randint(size, (rows, 64)) for _ in range(20)]
    found = [num_random_ids({"input_ids": ids, "labels": ids}) for ids in draws]
    assert all(each is not None and 0.9 * size < each <= size for each in found)


def test_delimiters_do_not_hide_that_ids_are_random() -> None:
    ids = torch.randint(59, (64, 2))
    with_equals = torch.cat([ids[:, :1], torch.full((64, 1), 60), ids[:, 1:], torch.full((64, 1), 61)], 1)
    found = num_random_ids({"ids": with_equals, "labels": torch.randint(59, (64,))})
    assert found is not None
    assert found <= 59


def test_text_positions_and_small_batches_are_not_taken_for_random_ids() -> None:
    words = Path(argparse.__file__).read_text(encoding="utf-8").split()
    order = torch.randperm(50257).tolist()  # as a tokenizer spreads frequent words over its ids
    known = {word: order[i] for i, word in enumerate(dict.fromkeys(words))}
    ids = torch.tensor([known[word] for word in words])
    assert not any(num_random_ids(part) for part in ids[: len(ids) // 128 * 128].split(128))
    assert num_random_ids(load("nn:decoder,depth=1,width=16,heads=2").batch) is None
    assert num_random_ids(torch.arange(256).view(4, 64)) is None
    assert num_random_ids(torch.arange(64).repeat(4, 1)) is None
    assert num_random_ids(torch.randint(256, (1, 64))) is None
    assert num_random_ids(torch.randint(4, (8, 64))) is None
    assert num_random_ids(torch.randint(256, (4, 64)) - 100) is None
    assert num_random_ids(torch.rand(4, 64)) is None


def masked_batch(hidden: float, mask: int) -> dict[str, torch.Tensor]:
    """Text of repeated words whose chosen tokens are the mask in a share of `hidden`."""
    text = torch.randint(16, (8, 64))
    chosen, way = torch.rand(text.shape) < 0.15, torch.rand(text.shape)
    ids = torch.where(chosen & (way < hidden), mask, text)
    return {"input_ids": ids, "labels": text.masked_fill(~chosen, IGNORED)}


@pytest.mark.parametrize("hidden", [0.8, 1.0])
@pytest.mark.parametrize("mask", [16, 103])
def test_targets_that_the_input_hides_are_seen(hidden: float, mask: int) -> None:
    assert hides_targets(masked_batch(hidden, mask)) == "mask"


def test_other_targets_are_not_hidden() -> None:
    spaces = torch.where(torch.rand(4, 65) < 0.7, 0, torch.randint(1, 90, (4, 65)))
    shifted = spaces[:, 1:].clone()
    shifted[:, -1] = IGNORED
    text = torch.randint(256, (4, 64))
    for batch in (
        masked_batch(0.2, 103),
        spaces,
        {"ids": spaces[:, :-1], "labels": shifted},  # one id is most of the text
        {"input_ids": spaces, "labels": spaces.masked_fill(spaces > 40, IGNORED)},
        {"input_ids": spaces, "labels": torch.zeros(4, dtype=torch.long)},
        {"pixel_values": torch.rand(4, 64), "labels": torch.randint(10, (4, 64))},
        {"pixel_values": torch.rand(512, 8), "labels": torch.randint(100, (512,))},  # classes, evenly spread
    ):
        assert hides_targets(batch) == ""
    for batch in (text, {"input_ids": text, "labels": text.masked_fill(text > 100, IGNORED)}):
        assert hides_targets(batch) == "random"


def test_one_target_has_no_entropy() -> None:
    subject = load("nn:decoder,depth=1,width=16,heads=2", batch_size=1, seq_len=1)
    assert math.copysign(1.0, batch_entropy(subject.batch)) == 1.0
    assert batch_entropy(subject.batch) == 0.0
