"""B12, C21, C30: bytes where theory says what they must be."""

import pytest
import torch
from torch.nn import functional as F

from normscope.claims import CLAIMS, ClaimResult, Setup, Verdict, measure_claim, memory
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.allocations import kept_for_backward, peak_bytes


def _tested(id: str) -> ClaimResult:
    found = measure_claim(CLAIMS[id], Setup(seeds=(0,)))
    assert found.error is None
    return found


def test_bytes_are_those_of_the_tensors() -> None:
    x = torch.randn(10, 100, requires_grad=True)
    weight = torch.randn(100, 100, requires_grad=True)
    assert sum(kept_for_backward(lambda: x @ weight, [weight]).values()) == 4000
    assert not kept_for_backward(lambda: x + x)
    assert sum(kept_for_backward(lambda: F.gelu(x.tanh())).values()) == 4000  # the tanh, kept once
    assert peak_bytes(lambda: torch.ones(1000) + 1) in range(8000, 8400)


def test_pre_ln_saves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "KINDS", (("layernorm", 64),))
    monkeypatch.setattr(memory, "DEPTHS", (2, 4))
    found = _tested("B12")
    assert found.judgement.verdict is Verdict.REFUTED
    assert {part.verdict for part in found.parts.values()} == {Verdict.REFUTED}
    stream = memory.BATCH * memory.TOKENS * 64 * 4
    pre, post = (memory.Bytes(scheme, "layernorm", 64, 2) for scheme in ("pre", "post"))
    # The final norm keeps the stream, its mean and its 1/σ; the head reads what it makes.
    assert 0 < pre.activations - post.activations - stream < stream / 10
    assert pre.norm_inputs_kept == 1.0


def test_recomputation_keeps_the_inputs_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SIZES", ((2, 256),))
    found = _tested("C21")
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.parts["all"].verdict is found.parts["sum"].verdict is Verdict.REFUTED
    saved = {case.part: case.at["saved"] for case in found.evidence.cases if case.at}
    more = {case.part: case.value for case in found.evidence.cases}
    assert 45 < found.evidence.cases[0].at["whole"] < 50, "half of the forward pass, but for the head"
    assert saved["all"] > 80
    assert 50 < more["all"] < 100  # the last product of a block is not run again
    assert more["sum"] == 0


def test_in_place_adds_save_nothing_and_autograd_refuses_them() -> None:
    found = _tested("C30")
    assert found.judgement.verdict is Verdict.REFUTED
    assert found.parts["kept"].verdict is Verdict.REFUTED
    assert found.parts["refuses"].verdict is Verdict.HOLDS
    trained = [case for case in found.evidence.cases if not case.part and "training" in case.where]
    assert len(trained) == 3
    assert all(case.where.endswith("refused") for case in trained)
