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


def test_condition_of_a_model_is_that_of_the_dense_gauss_newton_matrix() -> None:
    tokens, vocab = sensitivity.TOKENS, sensitivity.VOCAB
    model = build("decoder", depth=1, width=4, heads=2, vocab=vocab, context=tokens, init="xavier").double()
    ids, weights = torch.arange(tokens)[None] % vocab, dict(model.named_parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no batched backward pass
        found = condition(model, weights, ids)
        matrix = torch.zeros(2 * [sum(p.numel() for p in weights.values())], dtype=torch.float64)
        logits_TV = model(ids).logits[0]
        for token in range(tokens):
            rows = [
                torch.cat(
                    [g.flatten() for g in torch.autograd.grad(z, list(weights.values()), retain_graph=True)]
                )
                for z in logits_TV[token]
            ]
            p_V, j_VP = logits_TV[token].detach().softmax(-1), torch.stack(rows)
            matrix += j_VP.T @ (p_V.diag() - p_V.outer(p_V)) @ j_VP
    values = torch.linalg.eigvalsh(matrix).flip(0)[: tokens * (vocab - 1)]
    assert found == pytest.approx(float(values[0] / values.median()), rel=1e-6)


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
