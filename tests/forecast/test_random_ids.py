"""Ids that are equally frequent: noise decides nothing, and a task on them trains where the loss shows it."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import normscope
from normscope.anatomy import read_anatomy
from normscope.forecast.one_rate import as_forecast
from normscope.forecast.record import ForecastStep
from normscope.forecast.rule import Decision
from normscope.subjects import Subject, load, make_subject
from normscope.subjects.repeats import FEW, LAST, sequences_repeat
from normscope.subjects.subject import LOSS_INPUTS
from normscope.train import Recipe

V = 32


def drawn(rows: int = 16, length: int = 16) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(V, (rows, length), generator=generator)


def renamed() -> Iterator[dict[str, Tensor]]:
    """The task to give each id another name: its ids and its targets are as even as noise."""
    names = torch.randperm(V, generator=torch.Generator().manual_seed(1))
    for ids in drawn():
        yield {"ids": ids, LOSS_INPUTS: names[ids]}


def reshuffled() -> Iterator[Tensor]:
    """Epochs over the same 64 sequences, each in another order."""
    sequences, generator = next(drawn(64)), torch.Generator().manual_seed(2)
    while True:
        yield from sequences[torch.randperm(64, generator=generator)].split(16)


def of_names(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), batch[LOSS_INPUTS].flatten())


def next_id(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def forecast_of(batches: Any, loss: Any, steps: int) -> normscope.forecast.Forecast:
    model = load(f"nn:decoder,scheme=pre,depth=1,width=32,heads=2,vocab={V},context=16").model
    report = normscope.check(model, batches, loss, steps=steps, lr=1e-2, budget="fast")
    assert "ids that look random" in report.input
    assert report.forecast is not None
    return report.forecast


def test_a_task_trains_whose_loss_falls_under_the_entropy_on_new_batches() -> None:
    found = forecast_of(renamed(), of_names, 20)
    assert found.outcome == "trains"
    assert found.unigram_entropy == pytest.approx(math.log(V), abs=0.02)
    assert found.certainty is not None


def test_noise_does_not() -> None:
    found = forecast_of(drawn(), next_id, 20)
    assert (found.outcome, found.unigram_entropy, found.certainty) == ("undecided", None, None)


@pytest.mark.parametrize(
    "batches", [reshuffled(), list(itertools.islice(drawn(), 4))], ids=["rows", "batches"]
)
def test_noise_that_is_learnt_by_heart_does_not(batches: Any) -> None:
    found = forecast_of(batches, next_id, 110)
    assert found.curve[-1].recent_loss is not None
    assert found.curve[-1].recent_loss < math.log(V) - 0.2
    assert (found.outcome, found.unigram_entropy) == ("undecided", None)


@pytest.fixture
def few() -> Subject:
    """A subject of 20 batches of ids that look random, whose entropy is known."""
    model = load(f"nn:decoder,scheme=pre,depth=1,width=16,heads=2,vocab={V},context=16").model
    subject = make_subject(model, list(itertools.islice(drawn(), 20)), next_id)
    subject.unigram_entropy = math.log(V)
    return subject


@pytest.mark.parametrize(
    ("last", "accumulation", "outcome"), [(20, 1, "trains"), (36, 1, "undecided"), (10, 4, "undecided")]
)
def test_a_longer_trial_of_a_ladder_may_repeat_what_a_short_one_does_not(
    few: Subject, last: int, accumulation: int, outcome: str
) -> None:
    curve = [ForecastStep(0, None, 3.5, {}), ForecastStep(last, 1.0, 1.0, {}, recent_loss=1.0)]
    decision = Decision("trains", "so", score=1.0)
    found = as_forecast(
        decision, few, read_anatomy(few), Recipe(steps=last, accumulation=accumulation), curve
    )
    assert found.outcome == outcome
    assert (found.unigram_entropy is None) == (outcome == "undecided")
    assert ("learnt by heart" in found.reason) == (outcome == "undecided")


@pytest.mark.parametrize("num_old", [2, 3])
def test_a_few_sequences_may_come_again(num_old: int) -> None:
    batches = list(itertools.islice(drawn(1), 30))
    batches[-num_old:] = batches[:num_old]
    assert sequences_repeat(lambda start=0: iter(batches), 30) == (num_old > FEW * LAST)


def test_ids_without_sequences_are_compared_by_the_batch() -> None:
    batches = [torch.arange(12).roll(k) for k in range(12)]
    assert not sequences_repeat(lambda start=0: iter(batches), 12)
    assert sequences_repeat(lambda start=0: itertools.cycle(batches), 24)
