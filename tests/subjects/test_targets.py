"""Targets of a batch, against the loss that is taken on it."""

import itertools
import math

import pytest
import torch

from normscope.nn.output import IGNORED
from normscope.subjects import load
from normscope.subjects.targets import batch_entropy, targets_of

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


def test_one_target_has_no_entropy() -> None:
    subject = load("nn:decoder,depth=1,width=16,heads=2", batch_size=1, seq_len=1)
    assert math.copysign(1.0, batch_entropy(subject.batch)) == 1.0
    assert batch_entropy(subject.batch) == 0.0
