"""Small models of images with both norms."""

import pytest
import torch
from torch import nn

from normscope.claims import CLAIMS, NotMeasured, Setup, Verdict, images, measure_claim
from normscope.errors import UsageError
from normscope.nn.token_norms import BatchNorm


@pytest.mark.parametrize("kind", images.MODELS)
@pytest.mark.parametrize("norm", images.NORMS)
def test_models_have_the_norm_that_they_are_named_by(kind, norm):
    model = images.MODELS[kind](norm)
    assert images.logits_of(model, torch.randn(3, 1, 8, 8)).shape == (3, 10)
    over_batch = any(isinstance(module, nn.BatchNorm2d | BatchNorm) for module in model.modules())
    assert over_batch == (norm == "batchnorm")


def test_a_short_training_gives_a_case_a_seed_and_model(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(images, "STEPS", 2)
    found = measure_claim(CLAIMS["C32"], Setup(seeds=(0, 1)))
    assert found.error is None, found.evidence.notes
    assert [(case.part, case.seed) for case in found.evidence.cases] == [
        ("", 0),
        ("", 1),
        ("cnn", 0),
        ("cnn", 1),
    ]


def test_without_scikit_learn_it_is_not_measured(monkeypatch):
    def missing(*_: object) -> None:
        raise UsageError("images", "scikit-learn", "install it")

    monkeypatch.setattr(images, "load_images", missing)
    with pytest.raises(NotMeasured):
        images._images()
    found = measure_claim(CLAIMS["C32"], Setup(seeds=(0,)))
    assert found.judgement.verdict is Verdict.NOT_MEASURED
    assert "scikit-learn" in found.reason


def test_a_lead_is_in_points_and_turned_round_for_the_cnn():
    found = {("ViT", "layernorm"): {0: 0.9}, ("ViT", "batchnorm"): {0: 0.8}}
    found |= {("CNN", "layernorm"): {0: 0.9}, ("CNN", "batchnorm"): {0: 0.8}}
    assert images._case(found, "ViT", 0).value == pytest.approx(10)
    assert images._case(found, "CNN", 0).value == pytest.approx(-10)
