"""`assert_same_model`: what passes, what fails with which message, and that the models stay."""

import contextlib
import copy
import dataclasses

import pytest
import torch
from torch import nn

import normscope
from normscope.compare import Compared, Part
from normscope.testing import assert_same_model

FED = {"batch_size": 1, "seq_len": 8}


def decoder(scheme: str = "pre", **options: object) -> nn.Module:
    return normscope.nn.build(
        "decoder", scheme=scheme, depth=2, width=16, heads=2, vocab=64, context=16, **options
    )


def test_a_model_is_the_same_as_its_copy() -> None:
    model = decoder()
    found = assert_same_model(model, copy.deepcopy(model), **FED)
    assert found.is_same
    assert [each.how for each in found.parts if each.part == "function"] == ["whole"]


def test_another_seed_is_the_same_model() -> None:
    torch.manual_seed(1)
    one, other = decoder(), decoder()
    assert not torch.equal(next(one.parameters()), next(other.parameters()))
    assert_same_model(one, other, **FED)


def test_the_error_is_the_comparison() -> None:
    with pytest.raises(AssertionError) as failed:
        assert_same_model(decoder(eps=1e-5), decoder(eps=1e-2), **FED)
    words = str(failed.value)
    assert "norm-eps" in words
    assert "0.01" in words
    assert not isinstance(failed.value.__cause__, Exception)


def test_a_tolerance_passes_what_differs_less() -> None:
    one, other = decoder(eps=1e-5), decoder(eps=1.001e-5)
    with pytest.raises(AssertionError):
        assert_same_model(one, other, parts="function", **FED)
    assert_same_model(one, other, rtol=1e-3, parts="function", **FED)


def test_functions_that_cannot_be_compared_fail_unless_they_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = normscope.diff(decoder(), decoder(), parts="structure", **FED)
    assert found.parts[0].how == "whole"
    missing = Compared(Part.FUNCTION, "not", ("no weight can be mapped",))
    both = dataclasses.replace(found, parts=(*found.parts, missing))
    for each, passes in ((found, True), (both, False)):
        monkeypatch.setattr(normscope, "diff", lambda *models, each=each, **options: each, raising=False)
        with contextlib.nullcontext() if passes else pytest.raises(AssertionError, match="can be mapped"):
            assert_same_model(decoder(), decoder())


def test_both_models_stay_as_they_were() -> None:
    models = decoder(), decoder("post")
    before = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models]
    modes = [[module.training for module in model.modules()] for model in models]
    state = torch.get_rng_state()
    with pytest.raises(AssertionError):
        assert_same_model(*models, **FED)
    for model, values, mode in zip(models, before, modes, strict=True):
        assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
        assert [module.training for module in model.modules()] == mode
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(not module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_texts_and_functions_are_models_too() -> None:
    spec = "nn:decoder,depth=2,width=16,heads=2,vocab=64,context=16"
    assert_same_model(spec, lambda: decoder(), parts="structure,function", **FED)


def test_a_wrong_option_is_one_short_error() -> None:
    with pytest.raises(normscope.UsageError, match='parts "strcture"'):
        assert_same_model(decoder(), decoder(), parts="strcture")
