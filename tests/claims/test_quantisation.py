"""C31 and what it rounds with."""

import pytest
import torch

from normscope.claims import CLAIMS, Setup, measure_claim, quantisation
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.quantisation import FORMATS, MODEL, integers, planted
from normscope.subjects import load


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_have_their_levels(bits: int) -> None:
    x = torch.linspace(-1, 1, 10_001)[:, None]
    rounded = integers(bits, per_channel=False)(x)
    assert len(rounded.unique()) == 2**bits - 1
    assert float((rounded - x).abs().max()) <= 0.5001 / (2 ** (bits - 1) - 1)


def test_a_channel_has_a_scale_of_its_own() -> None:
    x = torch.randn(100, 2) * torch.tensor([1.0, 1000.0])
    of_a_tensor, of_a_channel = FORMATS["INT8 a tensor"](x), FORMATS["INT8 a channel"](x)
    assert float((of_a_tensor - x)[:, 0].norm() / x[:, 0].norm()) > 0.5
    assert float((of_a_channel - x)[:, 0].norm() / x[:, 0].norm()) < 0.02


def test_planted_outliers_change_nothing_but_the_norms() -> None:
    subject = load(MODEL, seed=0)
    other = planted(subject.model)
    torch.testing.assert_close(subject.forward(model=other).logits, subject.forward().logits)


def test_every_format_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantisation, "STEPS", 3)
    found = measure_claim(CLAIMS["C31"], Setup(seeds=(0,)))
    assert found.error is None, found.evidence.notes
    assert found.judgement.cases == len(FORMATS)
    assert found.parts["outliers"].cases == len(FORMATS)
