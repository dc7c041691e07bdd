"""Curvature, doubled weights and noise."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from normscope.claims import CLAIMS, Setup, Verdict, measure_claim, sensitivity
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.sensitivity import condition, is_read_by_norm, sharpness
from normscope.nn import build


def test_sharpness_of_a_bowl() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    loss = (torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64) * x.square()).sum()
    assert sharpness(loss, [x], steps=60) == pytest.approx(10)


def test_condition_of_a_model() -> None:
    model = build("decoder", depth=1, width=8, heads=2, vocab=16, context=8, init="xavier").double()
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no batched backward pass
        found = condition(model, dict(model.named_parameters()), torch.arange(8)[None])
    assert 1 < found < 1e6


def test_the_gain_of_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitivity, "SCALES", (3.0,))
    tested = measure_claim(CLAIMS["C9"], Setup(seeds=(0,)))
    assert tested.judgement.verdict is Verdict.HOLDS
    assert tested.parts["flat"].verdict is Verdict.HOLDS


def test_who_cancels_a_doubled_map() -> None:
    tested = measure_claim(CLAIMS["C12"], Setup(seeds=(0,)))
    assert tested.judgement.verdict is Verdict.CONDITION
    held = {case.where for case in tested.evidence.cases if case.holds and not case.part}
    assert "res-post, down doubled" in held
    assert "olmo2, q doubled" in held
    assert not any(where.startswith(("post", "pre")) for where in held)


def test_which_maps_a_norm_reads() -> None:
    assert is_read_by_norm("peri", "v")
    assert not is_read_by_norm("peri", "q")
    assert not is_read_by_norm("post", "down")
