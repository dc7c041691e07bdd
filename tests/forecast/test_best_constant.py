"""The baseline of losses that are no cross-entropy: the loss of the best constant output."""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normscope
from normscope.forecast import (
    NoTargetsError,
    UnknownEntropyError,
    baseline,
    best_constant,
    targets_entropy,
    with_baseline,
)
from normscope.subjects import Subject, make_subject
from normscope.subjects.subject import LOSS_INPUTS, Baseline

MEANS, SPREADS = torch.tensor([3.0, -1.0]), torch.tensor([2.0, 0.5])


class Series(nn.Module):
    """(B, T, 3) → (B, T, 2), and what else it returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.enter, self.leave = nn.Linear(3, 16), nn.Linear(16, 2)
        self.stack = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.leave(self.stack(self.enter(x)))}


def pieces(size: tuple[int, int] = (16, 10)) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        targets = MEANS + SPREADS * torch.randn(*size, 2, generator=generator)
        yield {"x": torch.randn(*size, 3, generator=generator), LOSS_INPUTS: (targets,)}


def loss_of(function: Callable[..., Tensor], factor: float = 1.0) -> Callable[[Any, Any], Tensor]:
    return lambda out, batch: factor * function(out["out"], batch[LOSS_INPUTS][0])


def subject_of(loss: Callable[[Any, Any], Tensor], batches: Any = None) -> Subject:
    return make_subject(Series(), pieces() if batches is None else batches, loss)


def drawn() -> Tensor:
    return torch.cat([batch[LOSS_INPUTS][0].flatten(0, 1) for batch in itertools.islice(pieces(), 64)])


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "squared": (F.mse_loss, lambda t: (t - t.mean(0)).square().mean()),
    "absolute": (F.l1_loss, lambda t: (t - t.median(0).values).abs().mean()),
    "huber": (F.huber_loss, lambda t: F.huber_loss(MEANS.expand_as(t), t)),
    "by hand": (lambda y, t: (y - t).pow(2).sum(-1).sqrt().mean(), lambda t: (t - MEANS).norm(dim=-1).mean()),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("factor", [1.0, 320.0])
def test_it_is_the_loss_of_the_best_constant(name: str, factor: float) -> None:
    function, expected = LOSSES[name]
    found = best_constant(subject_of(loss_of(function, factor))).value
    assert found == pytest.approx(factor * float(expected(drawn())), rel=5e-3)


def bursts() -> Iterator[dict[str, Any]]:
    """Targets that are twice as large in one batch of 16, as in a series with bursts."""
    for number, batch in enumerate(pieces()):
        size = 2 if number % 16 == 0 else 1
        yield batch | {LOSS_INPUTS: (size * (batch[LOSS_INPUTS][0] - MEANS),)}


def test_more_batches_are_read_where_their_losses_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(loss_of(F.mse_loss), bursts())
    assert best_constant(subject).value == pytest.approx(
        float(SPREADS.square().mean()) * (15 + 4) / 16, rel=0.1
    )
    monkeypatch.setattr(baseline, "NUMBERS_OF_BATCHES", (64,))
    with pytest.raises(UnknownEntropyError, match="64 batches show the loss"):
        best_constant(subject_of(loss_of(F.mse_loss), bursts()))


@pytest.mark.parametrize(("size", "num"), [(20.0, 64), (4.2, 1024)])
def test_no_more_batches_are_read_where_they_cannot_suffice(size: float, num: int) -> None:
    """The smaller of two large losses may still become known: its error is 12 % in 1024 batches."""
    reads = []

    def rare() -> Iterator[dict[str, Any]]:
        for number, batch in enumerate(pieces()):
            reads.append(number)
            targets = batch[LOSS_INPUTS][0] - MEANS
            yield batch | {LOSS_INPUTS: ((size if number % 16 == 0 else 1) * targets,)}

    with pytest.raises(UnknownEntropyError) as raised:
        best_constant(subject_of(loss_of(F.mse_loss), rare()))
    said = r"(\d+) batches show the loss .* only to (\d+) %, and 10 % are needed: about ([\d,]+) batches"
    found = re.fullmatch(said, raised.value.reason)
    assert found is not None, raised.value.reason
    read, error, needed = (int(each.replace(",", "")) for each in found.groups())
    assert read == num
    assert max(reads) < num + 3
    assert needed == pytest.approx(num * (error / 10) ** 2, rel=0.1)


def test_places_that_do_not_count_are_left_out() -> None:
    def masked(out: Any, batch: Any) -> Tensor:
        return F.mse_loss(out["out"][:, 5:, :1], batch[LOSS_INPUTS][0][:, 5:, :1])

    assert best_constant(subject_of(masked)).value == pytest.approx(4.0, rel=0.05)


def test_a_loss_of_one_value_for_each_sample() -> None:
    def pooled(out: Any, batch: Any) -> Tensor:
        return F.mse_loss(out["out"].mean((1, 2)), batch[LOSS_INPUTS][0].mean((1, 2)))

    expected = drawn().view(-1, 20).mean(1).var(correction=0)
    assert best_constant(subject_of(pooled)).value == pytest.approx(float(expected), rel=0.02)


REFUSED: dict[str, tuple[Callable[[Any, Any], Tensor], type[Exception], str]] = {
    "softmax": (
        lambda out, b: F.cross_entropy(out["out"].flatten(0, 1), b[LOSS_INPUTS][0].argmax(-1).flatten()),
        NoTargetsError,
        "cross-entropy",
    ),
    "nothing": (
        lambda out, b: torch.ones((), requires_grad=True) * 1.0,
        NoTargetsError,
        "several|not depend",
    ),
    "no target": (lambda out, b: out["out"].square().mean(), UnknownEntropyError, "expected one above 0"),
    "without an end": (lambda out, b: out["out"].mean(), UnknownEntropyError, "expected one above 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_losses_have_none(name: str) -> None:
    loss, kind, said = REFUSED[name]
    with pytest.raises(kind, match=said):
        best_constant(subject_of(loss))


def test_a_loss_of_two_outputs_has_none() -> None:
    class Two(Series):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            found = super().forward(x)["out"]
            return {"out": found, "more": 2 * found}

    subject = make_subject(Two(), pieces(), lambda out, b: (out["out"] + out["more"]).square().mean())
    with pytest.raises(NoTargetsError, match="several"):
        best_constant(subject)


def test_few_batches_and_few_values_are_not_enough() -> None:
    mse = loss_of(F.mse_loss)
    with pytest.raises(UnknownEntropyError, match="1 batches are different, and 8"):
        best_constant(subject_of(mse, [next(pieces())]))
    with pytest.raises(UnknownEntropyError, match=r"only to \d+ %, and 10 %"):
        best_constant(subject_of(mse, itertools.islice(pieces((1, 2)), 8)))


def test_batches_of_another_shape_are_passed_over() -> None:
    mixed = [*itertools.islice(pieces(), 20), next(pieces((3, 10)))]
    assert best_constant(subject_of(loss_of(F.mse_loss), mixed)).value == pytest.approx(2.125, rel=0.05)


def test_a_sum_is_known_where_all_batches_have_one_shape() -> None:
    def summed(out: Any, batch: Any) -> Tensor:
        return F.mse_loss(out["out"], batch[LOSS_INPUTS][0], reduction="sum")

    assert best_constant(subject_of(summed)).value == pytest.approx(16 * 10 * 2 * 2.125, rel=0.05)
    mixed = [*itertools.islice(pieces(), 20), next(pieces((3, 10)))]
    subject, notes = with_baseline(subject_of(summed, mixed))
    assert subject.baseline.loss is None
    assert "the loss depends on the size of a batch" in notes[0]


@pytest.mark.parametrize("sum_of", [False, True])
def test_a_mean_over_batches_of_different_sizes_is_no_sum(sum_of: bool) -> None:
    """Also where its size depends on the targets, as that of a binary cross-entropy does."""

    def binary(out: Any, batch: Any) -> Tensor:
        targets = (batch[LOSS_INPUTS][0][..., :1] > 4).float()
        reduction = "sum" if sum_of else "mean"
        return F.binary_cross_entropy_with_logits(out["out"][..., :1], targets, reduction=reduction)

    def far(out: Any, batch: Any) -> Tensor:
        return F.mse_loss(
            out["out"], 1e5 + 1e4 * batch[LOSS_INPUTS][0], reduction="sum" if sum_of else "mean"
        )

    for loss in (binary, far):
        batches = [*itertools.islice(pieces(), 20), next(pieces((3, 10)))]
        subject, notes = with_baseline(subject_of(loss, batches))
        assert (subject.baseline.loss is None) == sum_of
        assert any("depends on the size of a batch" in note for note in notes) == sum_of


def test_a_target_inside_the_output_is_no_constant() -> None:
    class Rebuilt(Series):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return super().forward(x) | {"target": x[..., :2]}

    subject = make_subject(Rebuilt(), pieces(), lambda out, b: F.mse_loss(out["out"], out["target"].detach()))
    with pytest.raises(NoTargetsError, match="the same on all batches"):
        best_constant(subject)


def test_labels_that_are_spread_evenly_are_not_random_ids() -> None:
    """Inputs are measured values: classes of images are often equally frequent."""
    generator = torch.Generator().manual_seed(0)

    def images() -> Iterator[dict[str, Any]]:
        while True:
            yield {
                "input": torch.randn(256, 5, generator=generator),
                LOSS_INPUTS: (torch.randint(20, (256,), generator=generator),),
            }

    model = nn.Linear(5, 20)
    subject = make_subject(model, images(), lambda out, b: F.cross_entropy(out, b[LOSS_INPUTS][0]))
    assert targets_entropy(subject).value == pytest.approx(torch.tensor(20.0).log().item(), abs=0.02)


def test_the_unit_is_a_nat_or_the_baseline_itself() -> None:
    assert Baseline.of(3.0, None) == (3.0, 1.0, True)
    assert Baseline.of(3.0, None, unit=64.0) == (192.0, 64.0, True)
    assert Baseline.of(None, 5.0) == (5.0, 5.0, False)
    assert Baseline.of(None, None) == (None, 1.0, True)
    subject, notes = with_baseline(subject_of(loss_of(F.mse_loss)))
    assert subject.baseline.unit == subject.baseline.loss == pytest.approx(2.125, rel=0.05)
    assert notes == ()
    assert with_baseline(subject)[0] is subject


def test_the_report_has_it_and_a_note_says_why_it_is_unknown() -> None:
    for batches in (pieces(), [next(pieces())]):
        report = normscope.check(Series(), batches, loss_of(F.mse_loss), steps=12, budget="fast")
        said = report.to_dict()
        assert report.forecast is not None
        if isinstance(batches, list):
            assert said["forecast"]["best_constant"] is None
            assert any("the loss without the input is not known: 1 batches" in note for note in report.notes)
        else:
            assert said["forecast"]["best_constant"] == pytest.approx(2.125, rel=0.05)
            assert report.forecast.curve[-1].coherence is not None
