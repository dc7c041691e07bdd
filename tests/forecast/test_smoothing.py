"""Label smoothing: its share in the gradient, and the loss of a model that ignores its input."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normscope.forecast import with_baseline
from normscope.forecast.entropy import estimate
from normscope.forecast.smoothing import smoothed_entropy, smoothing_of, smoothing_without_loss
from normscope.subjects import make_subject

WIDTHS, SHARES = (10, 256, 4000), (0.05, 0.1, 0.3)


def gradient_of(
    logits: Tensor, targets: Tensor, dtype: torch.dtype = torch.float32, factor: float = 1, **options: object
) -> tuple[Tensor, float]:
    """Gradient of a cross-entropy times `factor` by the logits, and its value."""
    leaf = logits.clone().requires_grad_()
    loss = factor * F.cross_entropy(leaf.to(dtype), targets, **options)  # type: ignore[arg-type]
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad, float(loss.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "share"), list(itertools.product(WIDTHS, (0.0, *SHARES))))
def test_the_share_is_found_in_the_gradient(width: int, share: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(64, width), torch.randint(width, (64,))
    for factor in (1, 0.98, 64):
        gradient, loss = gradient_of(logits, targets, dtype, factor, label_smoothing=share)
        assert torch.equal(gradient.argmin(1), targets)
        assert smoothing_of(logits, gradient, targets, loss) == pytest.approx(share, abs=0.007, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "share"), list(itertools.product(WIDTHS, (0.0, *SHARES))))
def test_the_share_is_found_without_the_loss(width: int, share: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(64, width) / 2, torch.randint(width, (64,))
    for factor in (1 / 4, 65536):
        gradient, _ = gradient_of(logits, targets, dtype, factor, label_smoothing=share)
        assert smoothing_without_loss(logits, gradient) == pytest.approx(share, abs=0.007, rel=0.05)


def test_logits_that_hardly_differ_do_not_tell_smoothing_without_the_loss() -> None:
    torch.manual_seed(0)
    targets = torch.randint(4000, (64,))
    gradient, _ = gradient_of(
        logits := torch.randn(64, 4000) / 50, targets, torch.bfloat16, label_smoothing=0.3
    )
    assert smoothing_without_loss(logits, gradient.bfloat16()) is None
    pair = torch.tensor([[0.0, 2.0]]).expand(8, 2)
    gradient, _ = gradient_of(pair, torch.zeros(8, dtype=torch.int64), label_smoothing=0.3)
    assert smoothing_without_loss(pair, gradient) is None, "one target of two: two shares explain it"


def test_other_losses_have_no_smoothing_without_the_loss_either() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(64, 10), torch.randint(10, (64,))
    weighted, _ = gradient_of(logits, targets, weight=torch.linspace(0.5, 2, 10))
    assert smoothing_without_loss(logits, weighted) == 0


def test_other_losses_have_no_smoothing() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(64, 10), torch.randint(10, (64,))
    weighted, loss = gradient_of(logits, targets, weight=torch.linspace(0.5, 2, 10))
    assert smoothing_of(logits, weighted, targets, loss) == 0
    plain, loss = gradient_of(logits, targets)
    assert smoothing_of(logits, -plain.abs(), targets, loss) == 0, "no row has a sum of 0"
    wide = torch.randn(64, 4000, requires_grad=True)
    squared = F.mse_loss(wide, torch.randn(64, 4000))
    squared.backward()
    assert wide.grad is not None
    assert smoothing_of(wide.detach(), wide.grad, wide.grad.argmin(1), float(squared.detach())) == 0
    single = torch.ones(4, 1)
    assert smoothing_of(single, single, torch.zeros(4, dtype=torch.int64), 1.0) == 0, (
        "a regression of one value"
    )


@pytest.mark.parametrize(("width", "share"), list(itertools.product(WIDTHS, SHARES)))
def test_the_entropy_is_the_least_loss_of_constant_logits(width: int, share: float) -> None:
    """Reference: the loss function itself, minimised over constant logits in float64."""
    ids = torch.from_numpy(np.random.default_rng(0).zipf(1.5, 500) % (width // 2))
    shares = torch.bincount(ids, minlength=width).double() / len(ids)
    entropy = float(-torch.special.xlogy(shares, shares).sum())
    logits = torch.zeros(width, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([logits], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        found = F.cross_entropy(logits.expand(len(ids), -1), ids, label_smoothing=share)
        found.backward()
        return found

    search.step(loss)
    counts = np.bincount(ids.numpy(), minlength=width)
    assert smoothed_entropy(counts, entropy, share) == pytest.approx(float(loss().detach()), abs=1e-5)


@pytest.mark.parametrize("share", SHARES)
def test_a_sample_shows_the_smoothed_entropy_of_its_text(share: float) -> None:
    width = 2048
    shares = 1 / np.arange(1, width + 1)
    shares /= shares.sum()
    text = (1 - share) * shares + share / width
    sample = [np.random.default_rng(k).choice(width, 64, p=shares) for k in range(1000)]
    counts = np.bincount(np.concatenate(sample), minlength=width)
    found = smoothed_entropy(counts, estimate(sample).value, share)
    assert found == pytest.approx(-float((text * np.log(text)).sum()), abs=0.05)


@pytest.mark.parametrize(("width", "more"), [(256, 0.2), (16_000, 0.4)])
def test_smoothing_adds_to_the_entropy_of_a_zipf_law_what_the_docs_say(width: int, more: float) -> None:
    shares = 1 / np.arange(1, width + 1)
    counts = np.round(1e5 * shares)
    shares = counts / counts.sum()
    entropy = -float((shares * np.log(shares)).sum())
    assert smoothed_entropy(counts, entropy, 0.1) - entropy == pytest.approx(more, abs=0.05)


class Bytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(3 * self.table(ids))  # wide logits: some are far below the mean
        return out


def windows() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shares = 1 / torch.arange(1.0, 257)
    while True:
        yield torch.multinomial(shares, 4 * 65, True, generator=generator).view(4, 65)


def test_the_loss_to_beat_is_that_of_smoothed_targets() -> None:
    def smoothed(logits: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.2)

    shares = (1 / torch.arange(1.0, 257)).double()
    shares = 0.8 * shares / shares.sum() + 0.2 / 256
    subject, notes = with_baseline(make_subject(Bytes(), windows(), smoothed))
    assert subject.unigram_entropy == pytest.approx(float(-(shares * shares.log()).sum()), abs=0.05)
    assert any("label smoothing of 0.2" in note for note in notes)


def test_a_sum_that_is_divided_by_all_labels_has_the_entropy_times_that_share() -> None:
    """The Trainer of transformers divides the sum over T − 1 targets by T labels."""

    def over_all(logits: Tensor, ids: Tensor) -> Tensor:
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        return total / ids.numel()

    subject, notes = with_baseline(make_subject(Bytes(), (ids[:, :17] for ids in windows()), over_all))
    shares = (1 / torch.arange(1.0, 257)).double()
    shares /= shares.sum()
    entropy = float(-(shares * shares.log()).sum())
    assert subject.unigram_entropy == pytest.approx(16 / 17 * entropy, abs=0.05)
    assert not notes
