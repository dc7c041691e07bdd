"""Targets of cross-entropies, found by the gradient, and the entropy of their text."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normscope
from normscope.forecast import NoTargetsError, UnknownEntropyError, targets_entropy, with_baseline
from normscope.forecast.entropy import GROUPS, chao_wang_jost, estimate
from normscope.forecast.targets import LARGEST_ERROR, ROUGH_ERROR, TOLERANCE, stored
from normscope.report.words import forecast_in_words
from normscope.subjects import Subject, make_subject
from normscope.subjects.subject import LOSS_INPUTS

V = 12
SHARES = torch.tensor([0.5, 0.2, 0.1, 0.05, 0.05, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01, 0.0])
ENTROPY = float(-(SHARES[:-1] * SHARES[:-1].log()).sum())
PAD = V - 1
Loss = Callable[[Any, Any], Tensor]


def texts(size: tuple[int, ...] = (8, 33)) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.multinomial(SHARES, math.prod(size), True, generator=generator).view(size)


FORWARDS: list[int] = []
"""One entry for each forward of a `Reader`, whose own attributes are restored."""


class Reader(nn.Module):
    """Embedding, a linear map, logits."""

    def __init__(self, *, own_loss: bool = False, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(V, 8), nn.Linear(8, 8)
        self.head = None if tied else nn.Linear(8, V)
        self.own_loss = own_loss

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        FORWARDS.append(1)
        hidden = self.body(self.embedding(ids))
        logits = F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)
        if not self.own_loss:
            return logits
        assert labels is not None
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def next_token(logits: Tensor, batch: Any) -> Tensor:
    ids = batch if isinstance(batch, Tensor) else batch["ids"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def by_hand(logits: Tensor, batch: Tensor) -> Tensor:
    """No function of PyTorch's that knows targets."""
    scores = logits[:, :-1]
    chosen = scores.gather(-1, batch[:, 1:, None])[..., 0]
    return (scores.logsumexp(-1) - chosen).mean()


def padded() -> Iterator[Tensor]:
    for number, ids in enumerate(texts()):
        ids[: number + 1, 20:] = PAD
        yield ids


def without_padding(logits: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD)


def subject_of(model: nn.Module, batches: Iterator[Any] | list[Any], loss: Loss | None = None) -> Subject:
    return make_subject(model, batches, loss)


CASES: dict[str, Callable[[], Subject]] = {
    "next token": lambda: subject_of(Reader(), texts(), next_token),
    "by hand": lambda: subject_of(Reader(), texts(), by_hand),
    "tied": lambda: subject_of(Reader(tied=True), texts(), next_token),
    "found loss": lambda: subject_of(Reader(), texts()),
    "own loss": lambda: subject_of(Reader(own_loss=True), ({"ids": x, "labels": x} for x in texts())),
    "padding": lambda: subject_of(Reader(), padded(), without_padding),
    "labels apart": lambda: subject_of(
        Reader(),
        ({"ids": x[:, :-1], LOSS_INPUTS: (x[:, 1:],)} for x in texts()),
        lambda out, b: F.cross_entropy(out.flatten(0, 1), b[LOSS_INPUTS][0].flatten()),
    ),
    "ignored": lambda: subject_of(
        Reader(),
        ({"ids": x[:, :-1], LOSS_INPUTS: (masked(x[:, 1:]),)} for x in texts()),
        lambda out, b: F.cross_entropy(out.flatten(0, 1), b[LOSS_INPUTS][0].flatten()),
    ),
}


def window(start: int, stop: int | None) -> Loss:
    """The loss on the targets at these positions alone."""

    def loss(logits: Tensor, batch: Tensor) -> Tensor:
        targets = batch[:, start:stop]
        return F.cross_entropy(logits[:, : targets.shape[1]].flatten(0, 1), targets.flatten())

    return loss


CASES |= {
    "a horizon": lambda: subject_of(Reader(), texts(), window(16, None)),
    "the middle": lambda: subject_of(Reader(), texts(), window(4, 20)),
    "the last": lambda: subject_of(Reader(), texts((64, 33)), window(32, None)),
    "twice in the batch": lambda: subject_of(
        Reader(),
        ({"ids": x, LOSS_INPUTS: (x,)} for x in texts()),
        lambda out, b: window(16, None)(out, b["ids"]),
    ),
}


def masked(ids: Tensor) -> Tensor:
    return ids.masked_fill(torch.arange(ids.shape[1]) % 3 > 0, -100)


@pytest.mark.parametrize("name", CASES)
def test_the_entropy_is_that_of_the_text_wherever_the_targets_are(name: str) -> None:
    subject = CASES[name]()
    assert subject.unigram_entropy is None
    assert subject.has_own_batches
    assert targets_entropy(subject).value == pytest.approx(ENTROPY, abs=0.04)


@pytest.mark.parametrize(("own_loss", "forwards"), [(False, 2), (True, 3)])
def test_it_costs_a_training_step_at_most(own_loss: bool, forwards: int) -> None:
    model = Reader(own_loss=own_loss)
    batches = ({"ids": x, "labels": x} for x in texts()) if own_loss else texts()
    subject = subject_of(model, batches, None if own_loss else next_token)
    FORWARDS.clear()
    targets_entropy(subject)
    assert len(FORWARDS) == forwards


def test_classes_of_samples_have_an_entropy() -> None:
    def samples() -> Iterator[dict[str, Any]]:
        for classes in texts((128,)):
            yield {"input": torch.randn(128, 5), LOSS_INPUTS: (classes,)}

    subject = subject_of(
        nn.Linear(5, V),
        samples(),
        lambda out, b: F.cross_entropy(out, b[LOSS_INPUTS][0]),
    )
    assert targets_entropy(subject).value == pytest.approx(ENTROPY, abs=0.05)


OTHERS: dict[str, tuple[Loss, str]] = {
    "squares": (lambda out, b: out.square().mean(), "not a cross-entropy"),
    "penalty": (lambda out, b: next_token(out, b) + 0.2, "the mean cross-entropy"),
    "other targets": (lambda out, b: F.cross_entropy(out.flatten(0, 1), (b.flatten() + 1) % V), "not stored"),
    "nothing": (lambda out, b: torch.zeros((), requires_grad=True) * 1.0, "does not depend"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_loss_has_no_entropy(name: str) -> None:
    loss, said = OTHERS[name]
    with pytest.raises(NoTargetsError, match=said):
        targets_entropy(subject_of(Reader(), texts(), loss))


def counted(logits: Tensor, batch: Tensor, reduction: str) -> Tensor:
    """Cross-entropy of the targets that are no padding."""
    total = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD, reduction="sum"
    )
    number = {"sum": 1, "by sequence": len(batch), "quarter": 4 * int((batch[:, 1:] != PAD).sum())}
    return total / number[reduction]


def last_is_short() -> Iterator[Tensor]:
    """Epochs of eight batches, the last one of three sequences."""
    for number, ids in enumerate(texts()):
        yield ids[:3] if number % 8 == 7 else ids


def evenly_padded() -> Iterator[Tensor]:
    for ids in texts():
        ids[:2, 20:] = PAD
        yield ids


BATCHES = {"none": texts, "same": evenly_padded, "differs": padded, "last is short": last_is_short}
UNITS = {
    ("sum", "none"): 8 * 32.0,
    ("sum", "same"): 8 * 32.0 - 2 * 13,
    ("sum", "differs"): None,
    ("sum", "last is short"): None,
    ("by sequence", "none"): 32.0,
    ("by sequence", "same"): 32 - 2 * 13 / 8,
    ("by sequence", "differs"): None,
    ("by sequence", "last is short"): 32.0,
    ("quarter", "none"): 0.25,
    ("quarter", "same"): 0.25,
    ("quarter", "differs"): 0.25,
    ("quarter", "last is short"): 0.25,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("reduction", "padding"), UNITS)
def test_a_multiple_of_the_mean_has_a_loss_to_beat_if_it_is_the_same_in_all_batches(
    reduction: str, padding: str, dtype: torch.dtype
) -> None:
    unit = UNITS[reduction, padding]
    loss = functools.partial(counted, reduction=reduction)
    subject, notes = with_baseline(subject_of(Reader().to(dtype), BATCHES[padding](), loss))
    if unit is None:
        assert subject.baseline.loss is None
        said = (
            r"the entropy of the targets is not known: the loss is \S+ times the mean cross-entropy in one "
            r"batch and \S+ times in another, as a sum over \d+ "
            r"and \d+ targets is: divide it by their number"
        )
        assert re.fullmatch(said, notes[0]), notes
        return
    assert subject.baseline.unit == pytest.approx(unit, rel=0.005)
    assert subject.baseline.loss == pytest.approx(unit * ENTROPY, rel=0.03)
    assert subject.unigram_entropy == pytest.approx(ENTROPY, rel=0.03)
    said = re.match(
        r"the loss is (\S+) times the mean cross-entropy of its targets: the loss to beat is", notes[0]
    )
    assert said is not None, notes
    assert float(said[1]) == pytest.approx(unit, rel=0.005)


@pytest.mark.parametrize("is_upcast", [False, True], ids=["loss in bfloat16", "its mean in float32"])
def test_the_rounding_of_bfloat16_does_not_hide_the_entropy(is_upcast: bool) -> None:
    """A mean cross-entropy of 5.6 comes out as 5.5."""
    shares = 1 / torch.arange(1.0, 257)
    shares /= shares.sum()

    def words() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.multinomial(shares, 64 * 65, True, generator=generator).view(64, 65)

    def upcast(logits: Tensor, batch: Tensor) -> Tensor:
        each = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        return each.float().mean() + 0.06

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256)).bfloat16()
    with torch.no_grad():
        model[1].weight *= 0.5
        model[1].bias.zero_()
        ids = next(words())
        exact = float(next_token(model(ids).float(), ids))
        found = float((upcast if is_upcast else next_token)(model(ids), ids))
    assert abs(found - exact) > TOLERANCE, "else the test shows nothing"
    entropy = float(-(shares * shares.log()).sum())
    subject = subject_of(model, words(), upcast if is_upcast else next_token)
    assert targets_entropy(subject).value == pytest.approx(entropy, abs=0.05)


@pytest.mark.parametrize(("dtype", "penalty"), [(torch.float32, 0.06), (torch.bfloat16, 0.2)])
def test_a_penalty_is_no_rounding(dtype: torch.dtype, penalty: float) -> None:
    subject = subject_of(Reader().to(dtype), texts(), lambda out, b: next_token(out, b) + penalty)
    with pytest.raises(UnknownEntropyError, match="and the mean cross-entropy"):
        targets_entropy(subject)


def test_a_small_sample_is_not_judged_as_the_whole() -> None:
    with pytest.raises(UnknownEntropyError, match="the batches hold 8 sequences, and 16"):
        targets_entropy(subject_of(Reader(), [next(texts())], next_token))
    few = list(itertools.islice(texts((4, 5)), 6))
    with pytest.raises(UnknownEntropyError, match=r"96 targets show it only to 0\.\d+ nats, and 0\.15"):
        targets_entropy(subject_of(Reader(), few, next_token))


def test_batches_that_repeat_are_counted_once() -> None:
    """Six batches again and again are no larger sample."""
    few = list(itertools.islice(texts((4, 5)), 6))
    with pytest.raises(UnknownEntropyError, match="96 targets"):
        targets_entropy(subject_of(Reader(), few, next_token))


def test_more_batches_are_read_until_the_entropy_is_known() -> None:
    """The entropy of a vocabulary of 20,000 needs more than 64 small batches."""
    shares = 1 / torch.arange(1.0, 20_001)
    shares /= shares.sum()
    entropy = float(-(shares * shares.log()).sum())

    def words() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.multinomial(shares, 4 * 65, True, generator=generator).view(4, 65)

    model = nn.Sequential(nn.Embedding(20_000, 8), nn.Linear(8, 20_000))
    assert targets_entropy(subject_of(model, words(), next_token)).value == pytest.approx(entropy, abs=0.05)


def random_ids(num: int | None = None) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in itertools.count() if num is None else range(num):
        yield torch.randint(0, 256, (8, 64), generator=generator)


def test_random_ids_have_that_of_equally_likely_ones_until_their_sequences_repeat() -> None:
    model = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))
    subject, notes = with_baseline(subject_of(model, random_ids(), next_token), taken=20)
    assert subject.unigram_entropy == pytest.approx(math.log(256), abs=0.02)
    assert not notes
    batches = list(random_ids(12))
    for repeated in (batches, [*batches, *(batch.roll(3, 0) for batch in batches)]):  # rolled: another order
        subject, notes = with_baseline(subject_of(model, repeated, next_token), taken=20)
        assert subject.unigram_entropy is None
        assert any("by heart; to decide, give as many different sequences as" in note for note in notes)


def test_the_entropy_of_random_ids_is_known_well_or_not_at_all() -> None:
    """A loss under it is a proof, so that an error as large as the margin would make one."""
    model = nn.Sequential(nn.Embedding(4096, 8), nn.Linear(8, 4096))
    generator = torch.Generator().manual_seed(0)
    few = [torch.randint(0, 4096, (8, 64), generator=generator) for _ in range(8)]
    estimated = estimate([row.numpy() for batch in few for row in batch[:, 1:]])
    assert LARGEST_ERROR < estimated.error < ROUGH_ERROR
    with pytest.raises(UnknownEntropyError, match=r"0\.05 are needed"):
        targets_entropy(subject_of(model, few, next_token))


def test_the_place_of_targets() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    place = stored((ids.float(), ids), torch.tensor([2, 3, 5, 6]))
    assert place is not None
    assert (place.index, place.shift) == (1, 1)
    assert [row.tolist() for row in place.sequences((ids.float(), ids))] == [[2, 3], [5, 6]]
    assert stored(ids, torch.tensor([3, 2, 5, 6])) is None
    assert stored(ids, torch.tensor([2, 3])) is None, "two ids would have to be padding"


def test_the_place_of_targets_in_a_window() -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 1]])
    place = stored(ids, torch.tensor([3, 4, 8, 9]))
    assert place is not None
    assert (place.index, place.shift, place.left_out) == (0, 2, 1)
    longer = torch.arange(14).reshape(2, 7)
    assert [row.tolist() for row in place.sequences(longer)] == [[2, 3, 4, 5], [9, 10, 11, 12]]
    assert stored(ids, torch.tensor([3, 4, 7, 8])) is None, "of other positions in each sequence"
    assert stored(ids, torch.tensor([3, 4, 8])) is None, "not as many in each"
    again = torch.tensor([[1, 2, 1, 2, 5, 6], [3, 4, 3, 4, 7, 8]])
    assert stored(again, torch.tensor([1, 2, 3, 4])) is None, "at two places, and one may be by chance"
    label = torch.tensor([[3, 4, 0], [8, 9, 0]])
    whole = stored((ids, label), torch.tensor([3, 4, 0, 8, 9, 0]))
    assert whole is not None
    assert (whole.index, whole.shift) == (1, 0), "a whole tensor goes before a window"


class TestEstimator:
    """The estimator of Chao, Wang and Jost, against its formula in 60 digits."""

    @pytest.mark.parametrize("counts", [[5, 3, 2, 2, 1, 1], [1] * 9 + [4, 2], [1] * 30 + [20], [7, 7], [1]])
    def test_it_is_its_formula(self, counts: list[int]) -> None:
        mpmath.mp.dps = 60
        n, once, twice = sum(counts), counts.count(1), counts.count(2)
        expected = sum(mpmath.mpf(c) / n * sum(mpmath.mpf(1) / k for k in range(c, n)) for c in counts)
        if once and n > 1:
            a = mpmath.mpf(2 * twice) / ((n - 1) * once + 2 * twice)
            a = a if twice else mpmath.mpf(2) / ((n - 1) * (once - 1) + 2)
            if a < 1:
                tail = -mpmath.log(a) - sum((1 - a) ** r / r for r in range(1, n))
                expected += mpmath.mpf(once) / n * (1 - a) ** (1 - n) * tail
        assert chao_wang_jost(np.array(counts)) == pytest.approx(float(expected), rel=1e-7, abs=1e-12)

    def test_a_large_sample_stays_finite(self) -> None:
        counts = np.array([1] * 1000 + [2] * 300 + [10**6])
        assert 0 < chao_wang_jost(counts) < 1

    def test_it_corrects_a_small_sample(self) -> None:
        dice = np.random.default_rng(0)
        shares = 1 / np.arange(1, 2001)
        shares /= shares.sum()
        entropy = float(-(shares * np.log(shares)).sum())
        sample = list(dice.choice(2000, size=(64, 256), p=shares))
        found = estimate(sample)
        _, counts = np.unique(sample, return_counts=True)
        plain = counts / counts.sum()
        assert abs(found.value - entropy) < 0.02 < entropy + (plain * np.log(plain)).sum()
        assert 0.005 < found.error < 0.05

    def test_the_error_holds_the_bias_of_a_sample_that_met_few_ids(self) -> None:
        dice = np.random.default_rng(0)
        shares = 1 / np.arange(1, 20_001)
        shares /= shares.sum()
        entropy = float(-(shares * np.log(shares)).sum())
        found = estimate(list(dice.choice(20_000, size=(64, 64), p=shares)))
        assert 0.1 < entropy - found.value < found.error

    def test_the_error_holds_the_scatter_between_sequences(self) -> None:
        """Every sequence repeats one id: many ids, few independent ones."""
        dice = np.random.default_rng(0)
        drawn = dice.integers(0, 8, size=64)
        alike = estimate([np.full(200, one) for one in drawn])
        apart = estimate(list(dice.integers(0, 8, size=(64, 200))))
        assert alike.error > 10 * apart.error

    def test_too_few_sequences(self) -> None:
        with pytest.raises(ValueError, match="15 sequences: expected 16"):
            estimate([np.arange(5)] * (GROUPS - 1))


class TestInACheck:
    """`check` of a user's own batches."""

    @staticmethod
    def model() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        stack = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(V, 16), stack, nn.Linear(16, V))

    def test_the_forecast_has_the_entropy(self) -> None:
        report = normscope.check(self.model(), texts(), next_token, steps=3, budget="fast")
        assert report.forecast is not None
        assert report.forecast.unigram_entropy == pytest.approx(ENTROPY, abs=0.04)
        assert "targets" in report.cost
        assert not any("entropy" in note for note in report.notes)

    def test_a_sum_is_judged_as_its_mean(self) -> None:
        def summed(logits: Tensor, batch: Tensor) -> Tensor:
            return 8 * 32 * next_token(logits, batch)

        of_mean, of_sum = (
            normscope.check(self.model(), texts(), loss, steps=10, optimizer="adam", lr=1e-3, budget="fast")
            for loss in (next_token, summed)
        )
        mean, total = of_mean.forecast, of_sum.forecast
        assert mean is not None
        assert total is not None
        assert total.loss_unit == pytest.approx(256, rel=1e-3)
        assert total.baseline.loss == pytest.approx(256 * ENTROPY, rel=0.03)
        assert total.outcome == mean.outcome
        assert total.score is not None
        assert 0 < total.score < 3, "in units of the loss: clipping slows it down"
        assert total.to_dict()["loss_unit"] == total.loss_unit
        assert f"(unigram entropy {total.unigram_entropy:.3g} × 256)" in forecast_in_words(total)
        assert "In nats × 256. Dashed: unigram entropy" in of_sum.to_html()

    def test_a_note_says_why_it_is_unknown(self) -> None:
        report = normscope.check(self.model(), [next(texts())], next_token, steps=3, budget="fast")
        assert report.forecast is not None
        assert report.forecast.unigram_entropy is None
        assert any("entropy of the targets is not known: the batches hold 8" in note for note in report.notes)

    def test_a_loss_without_targets_needs_no_note(self) -> None:
        report = normscope.check(
            self.model(), texts(), lambda out, b: out.square().mean(), steps=3, budget="fast"
        )
        assert not any("entropy" in note for note in report.notes)

    def test_an_error_in_it_does_not_end_the_check(self) -> None:
        def fails_on_leaves(out: Tensor, batch: Any) -> Tensor:
            if out.is_leaf and out.requires_grad:
                raise KeyError("mine")
            return next_token(out, batch)

        report = normscope.check(self.model(), texts(), fails_on_leaves, steps=3, budget="fast")
        assert any("not known: KeyError" in note for note in report.notes)
        assert report.forecast is not None
        assert report.forecast.outcome != "not measured"

    def test_without_steps_it_is_not_looked_for(self) -> None:
        report = normscope.check(self.model(), texts(), next_token, steps=0, budget="fast")
        assert "targets" not in report.cost

    def test_classes_of_what_is_no_text_are_not_judged_as_text(self) -> None:
        """Their gradients need not agree: the labels may be random."""

        class Classifier(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
                self.stack = nn.TransformerEncoder(
                    layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False
                )
                self.head = nn.Linear(16, V)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.stack(x).mean(1))

        def samples() -> Iterator[dict[str, Any]]:
            for classes in texts((128,)):
                yield {"x": torch.randn(128, 6, 16), LOSS_INPUTS: (classes,)}

        report = normscope.check(
            Classifier(), samples(), lambda out, b: F.cross_entropy(out, b[LOSS_INPUTS][0]), steps=3
        )
        assert report.forecast is not None
        assert report.forecast.unigram_entropy == pytest.approx(ENTROPY, abs=0.05)
        assert report.forecast.curve[-1].coherence < 0.15
        assert report.forecast.outcome == "undecided"
        assert not report.forecast.tokens
