"""Batches that raise an error end a check, wherever they are drawn; a model that raises one does not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import MODELS
from torch import Tensor, nn
from torch.nn import functional as F

import normscope
from normscope import pipeline
from normscope.anatomy import read_anatomy
from normscope.errors import BatchesError, UsageError
from normscope.forecast import Forecast
from normscope.rules.remedies import try_remedies
from normscope.subjects import make_subject
from normscope.train import Recipe

FAILS = Forecast("collapses", "because", "adamw", 3e-4, 0, 2, 3.0)


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def square(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.square().mean()


def breaking(good: int) -> Iterator[Tensor]:
    """Text-like batches; the one after `good` of them cannot be read."""
    generator = torch.Generator().manual_seed(0)
    shares = 1 / torch.arange(1.0, 257)
    for _ in range(good):
        yield torch.multinomial(shares, 48, True, generator=generator).view(2, 24)
    raise OSError("disk gone")


@pytest.mark.parametrize("loss", [next_token, square, None])
@pytest.mark.parametrize("good", [0, 1, 7])
def test_the_check_ends_with_the_number_of_the_batch(
    good: int, loss: Callable[[Tensor, Tensor], Tensor] | None
) -> None:
    with pytest.raises(UsageError, match=rf"^batch {good + 1} of the batches raised OSError: disk gone:"):
        normscope.check(MODELS["pre"](), breaking(good), loss, budget="fast")


def test_no_probe_and_no_baseline_and_no_remedy_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_subject(MODELS["pre"](), breaking(1), next_token)
    with pytest.raises(BatchesError):
        pipeline.with_baseline(subject)
    anatomy = read_anatomy(subject)
    with pytest.raises(BatchesError):
        try_remedies(subject, anatomy, Recipe(), FAILS, names=["output-bias"])

    def probe(subject: Any, anatomy: Any) -> list[Any]:
        return [subject.loss(batch) for batch in subject.batches()]

    monkeypatch.setattr(pipeline, "PROBES", {"mine": probe})
    with pytest.raises(BatchesError):
        normscope.check(subject, steps=0, budget="fast")


def test_the_end_of_the_batches_is_no_error() -> None:
    batches = [next(breaking(1)) for _ in range(3)]
    report = normscope.check(MODELS["pre"](), iter(batches), next_token, steps=5, budget="fast")
    assert report.forecast is not None
    assert report.forecast.outcome != "not measured"


def test_a_model_that_raises_later_is_not_measured() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MODELS["pre"]()

        def forward(self, ids: Tensor) -> Tensor:
            if self.training:
                raise OSError("no such cache")
            return self.inner(ids)

    batches = (batch for batch in [next(breaking(1))] * 3)
    report = normscope.check(Breaks(), batches, next_token, steps=5, budget="fast")
    assert report.forecast is not None
    assert report.forecast.outcome == "not measured"
    assert "a training step raised OSError: no such cache" in report.forecast.reason
