"""The loss without the input on the batches of a trial."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_best_constant import Series, loss_of
from torch import Tensor, nn
from torch.nn import functional as F

from normscope import load
from normscope.anatomy import read_anatomy
from normscope.forecast import ForecastStep, best_constant, forecast, targets_entropy, with_baseline
from normscope.forecast.batch_entropy import SampledCrossEntropy
from normscope.forecast.recent import mean_baseline
from normscope.forecast.rule import decide
from normscope.subjects import make_subject
from normscope.subjects.stored import Stored
from normscope.subjects.subject import LOSS_INPUTS, Baseline
from normscope.subjects.without_input import LossesWithoutInput
from normscope.train import Recipe

V, PAD = 64, 63


def test_the_mean_is_that_of_the_batches_of_the_last_steps() -> None:
    subject = load("nn:decoder,depth=1,width=8,heads=1")
    for parts, num_steps in itertools.product((1, 2, 3), (20, 300)):
        found = LossesWithoutInput(lambda batch: 10.0 * batch)
        list(found.seen(iter(range(90))))
        one = dataclasses.replace(subject, without_input=found)
        config = Recipe(steps=num_steps, accumulation=parts)
        num = 10 if num_steps == 20 else 20
        for step in (0, 1, 4, 10, 30):
            numbers = [10.0 * number for number in range(max(0, step - num) * parts, step * parts)]
            expected = pytest.approx(np.mean(numbers)) if numbers else None
            assert mean_baseline(one, config, step) == expected


def test_a_step_counts_as_one_loss_however_many_batches_it_has() -> None:
    found = LossesWithoutInput(float)
    list(found.seen(iter(range(6))))
    assert found.mean([range(3), range(3, 5), range(5, 6)]) == (1 + 3.5 + 5) / 3


def test_trials_that_see_the_same_batches_compute_each_once() -> None:
    asked: list[str] = []
    found = LossesWithoutInput(lambda batch: asked.append(batch) or 1.0)
    for _ in range(3):
        assert list(found.seen(iter("abc"))) == ["a", "b", "c"]
    assert asked == ["a", "b", "c"]


def test_a_mean_with_an_unknown_batch_is_unknown() -> None:
    found = LossesWithoutInput(lambda batch: None if batch == 5 else 1.0)
    list(found.seen(iter(range(20))))
    assert found.mean([range(5)]) == found.mean([range(10, 15), range(15, 20)]) == 1.0
    assert found.mean([range(5), range(5, 6)]) is None, "of a batch it is unknown"
    assert found.mean([range(20, 21)]) is None, "a batch was not seen"
    assert found.mean([]) is None


def topics(seed: int, size: tuple[int, int] = (4, 33)) -> Iterator[Tensor]:
    """Sequences that each have a vocabulary of their own of the `V - 1` ids, so that batches differ."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = []
        for _ in range(size[0]):
            first = int(torch.randint(V - 1, (1,), generator=generator))
            offsets = (torch.rand(size[1], generator=generator) ** 3 * (3 + first % 20)).long()
            rows.append((first // 2 + offsets) % (V - 1))
        yield torch.stack(rows)


def frequencies() -> Tensor:
    ids = torch.cat([batch.flatten() for batch in itertools.islice(topics(99), 20_000)])
    return torch.bincount(ids, minlength=V) / len(ids)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(V, 8), nn.Linear(8, V)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


def padded(seed: int) -> Iterator[Tensor]:
    for number, ids in enumerate(topics(seed)):
        length = 20 + number % 13
        yield ids.masked_fill(torch.arange(ids.shape[1]) >= length, PAD)


def reading(*, padding: bool = False, smoothing: float = 0.0, factor: float = 1.0) -> Any:
    """A next-token loss."""
    ignored = PAD if padding else -100

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        rows, targets = logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        return factor * F.cross_entropy(rows, targets, label_smoothing=smoothing, ignore_index=ignored)

    return loss


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": True},
        {"smoothing": 0.1},
        {"padding": True, "smoothing": 0.1},
        {"factor": 32 / 33},
        {"factor": 128},
    ],
)
def test_a_batchs_entropy_is_its_cross_entropy_under_the_frequencies_of_the_text(options: Any) -> None:
    """Also of batches after the sample, and though the entropy of the text is estimated from the sample."""
    loss, smoothing = reading(**options), options.get("smoothing", 0.0)
    feed = padded if options.get("padding") else topics
    log = torch.log((1 - smoothing) * frequencies() + smoothing / V)[None]
    own, all_data = [], []
    for seed in range(4):
        found = targets_entropy(make_subject(Reader(), feed(seed), loss))
        for part in (range(20), range(600, 620)):
            last = [(k, ids) for k, ids in enumerate(itertools.islice(feed(seed), part.stop)) if k in part]
            expected = np.mean([float(loss(log.expand(*ids.shape, V), ids)) for _, ids in last])
            own.append(np.mean([found.of_batch(ids) for _, ids in last]) - expected)
            all_data.append(found.unit * found.value - expected)
    assert np.sqrt(np.square(own).mean()) < 0.25 * np.sqrt(np.square(all_data).mean())


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_batch_is_as_hard_in_the_second_epoch_as_in_the_first(shuffled: bool) -> None:
    """Its own sequences never count among the frequencies: those of the sample would make it look easier."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(V, (20 * 8, 33), generator=generator).clamp(max=40)
    order = torch.randperm(len(rows), generator=generator) if shuffled else torch.arange(len(rows))
    first, second = rows.split(8), rows[order].split(8)
    subject = make_subject(Reader(), [*first, *second], reading())
    found = targets_entropy(subject)
    epochs = [np.mean([found.of_batch(ids) for ids in epoch]) for epoch in (first, second)]
    assert epochs[1] == pytest.approx(epochs[0], abs=0.004)
    later = torch.randint(V, (200, 8, 33), generator=generator).clamp(max=40)
    assert np.mean([found.of_batch(ids) for ids in later]) == pytest.approx(epochs[0], abs=0.03)


@pytest.mark.parametrize("spec", ["decoder", "encoder", "encoder-decoder", "vision"])
def test_of_normscopes_data_the_mean_over_batches_is_the_entropy(spec: str) -> None:
    images = {"images": "digits"} if spec == "vision" else {}
    subject = load(f"nn:{spec},scheme=pre,depth=1,width=8,heads=1", seed=0, **images)
    assert subject.without_input is not None
    found = [subject.without_input.of(b) for b in itertools.islice(subject.batches(), 300)]
    assert np.mean(found) == pytest.approx(subject.unigram_entropy, abs=0.03)
    assert np.std(found) > 0


squared = loss_of(F.mse_loss)


def bursts() -> Iterator[dict[str, Any]]:
    """Values without a relation to the input, of which some batches are twice as large."""
    generator = torch.Generator().manual_seed(0)
    for number in itertools.count():
        size = 2.0 if number // 20 % 2 else 1.0
        targets = 3 + size * torch.randn(8, 6, 2, generator=generator)
        yield {"x": torch.randn(8, 6, 3, generator=generator), LOSS_INPUTS: (targets,)}


def test_the_loss_of_the_best_constant_is_that_of_each_batch() -> None:
    found = best_constant(make_subject(Series(), bursts(), squared))
    each = [found.of_batch(batch) for batch in itertools.islice(bursts(), 256)]
    assert np.mean(each) == pytest.approx(found.value, rel=1e-5)
    for value, batch in zip(each, bursts(), strict=False):
        assert value == pytest.approx(float((batch[LOSS_INPUTS][0] - 3).square().mean()), rel=0.05)
    other = {"x": torch.zeros(4, 6, 3), LOSS_INPUTS: (torch.zeros(4, 6, 2),)}
    assert found.of_batch(other) is None, "of another shape"


def whole(half: float, last: float, half_own: float | None, own: float | None) -> list[ForecastStep]:
    """A run of 300 steps with these mean losses, and those without the input on their batches."""
    state = {"x": 0.1}
    first, middle = ForecastStep(0, None, 2.5, state), ForecastStep(150, half, half, state, recent_loss=half)
    end = ForecastStep(300, last, last, state, 0.2, alignment=0.1, recent_loss=last, recent_baseline=own)
    return [first, dataclasses.replace(middle, recent_baseline=half_own), end]


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("unit", [1.0, 2.0])
def test_a_run_that_learnt_nothing_stays_a_failure_on_easy_batches(unit: float, tokens: bool) -> None:
    baseline = Baseline.of(None, 2.0) if unit == 2.0 else Baseline.of(2.0, None)
    for easier in (0.0, 0.15, 0.3, -0.2):
        own, half = 2.0 * (1 - easier), 2.0
        dead = decide(whole(half, own, half, own), baseline, tokens=tokens)
        assert dead.outcome == "plateau"
        assert dead.score == pytest.approx(-0.1)
        under = whole(half, own - 0.11 * (own if unit == 2.0 else 1), half, own)
        learnt = decide(under, baseline, tokens=tokens)
        assert learnt.outcome == "trains"
        assert f"of these batches, {own:.4g}" in learnt.reason
    unknown = decide(whole(2.0, 1.7, None, None), baseline, tokens=tokens)
    assert unknown.outcome == "trains"
    assert "of these batches" not in unknown.reason


def test_a_batch_without_any_loss_to_beat_is_compared_with_all_data() -> None:
    assert decide(whole(2.0, 1.7, 0.0, 0.0), Baseline.of(None, 2.0), tokens=False).outcome == "trains"


def test_a_forecast_measures_the_loss_to_beat_of_its_own_batches() -> None:
    subject, _ = with_baseline(make_subject(Series(), bursts(), squared))
    for parts in (1, 2):
        recipe = Recipe(lr=1e-9, steps=40, accumulation=parts)
        found = forecast(subject, read_anatomy(subject), recipe)
        assert found.curve[0].recent_baseline is None
        batches = list(itertools.islice(bursts(), 40 * parts))
        for each in found.curve[1:]:
            seen = batches[max(0, each.step - 10) * parts : each.step * parts]
            expected = np.mean([float((batch[LOSS_INPUTS][0] - 3).square().mean()) for batch in seen])
            assert each.recent_baseline == pytest.approx(expected, rel=0.05)
        assert math.isfinite(found.curve[-1].loss)


@pytest.mark.parametrize("smoothing", [0.0, 0.2, 0.5])
def test_two_batches_differ_by_the_logarithms_of_their_smoothed_frequencies(smoothing: float) -> None:
    """The part of the loss that is spread over all ids is the same for every batch."""
    place = Stored(0, 0, -100, smoothing=smoothing, width=V)
    common, rare = torch.zeros(1, 3960, dtype=torch.long), torch.ones(1, 40, dtype=torch.long)
    sample = [place.sequences(torch.cat([common, rare], 1))]
    found = SampledCrossEntropy.of(place, 1.0, sample)
    apart = found(rare) - found(common)
    log = [math.log((1 - smoothing) * share + smoothing / V) for share in (0.99, 0.01)]
    assert apart == pytest.approx((1 - smoothing) * (log[0] - log[1]), rel=0.01)


@pytest.mark.parametrize("half_own", [None, 1.5])
def test_measurements_are_compared_in_one_way(half_own: float | None) -> None:
    """Half-way on easy batches, at the end on others: a fall that one of the two does not know is no fall."""
    own = None if half_own is None else 2.0
    known = decide(whole(1.5, 2.0, half_own, own), Baseline(2.0))
    unknown = decide(whole(1.5, 2.0, half_own, None), Baseline(2.0))
    assert known.outcome == unknown.outcome == "plateau"
    if half_own is not None:
        assert "of these batches" in known.reason
        assert "of these batches" not in unknown.reason
        mixed = decide(whole(1.98, 1.99, half_own, None), Baseline(2.0))
        assert mixed == decide(whole(1.98, 1.99, None, None), Baseline(2.0))
        assert mixed.outcome == "plateau"


def test_no_batch_takes_more_out_of_the_sample_than_it_holds() -> None:
    """A label of a class is a sequence of one id: a batch may hold a rare one more often than the sample."""
    place = Stored(0, 0, -100)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        few = 2 + int(torch.randint(6, (1,), generator=generator))
        sample = torch.randint(few, (5, 4), generator=generator)
        found = SampledCrossEntropy.of(place, 1.0, [place.sequences(labels) for labels in sample])
        for labels in (*sample, torch.full((4,), few - 1), torch.randint(few + 2, (9,), generator=generator)):
            assert math.isfinite(found(labels))
