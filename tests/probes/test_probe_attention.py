"""Tests of the attention probe: closed forms, every kind of mask, and plain softmax in every placement."""

import dataclasses
import math

import pytest
import torch
from hand_read import PLACEMENTS, subject_of, toy
from torch import Tensor, nn

from normscope.anatomy import Anatomy, AttentionSites, Block, Branch, Site, Stack
from normscope.probes import Measurements
from normscope.probes.attention import measure_attention

SOFTMAX = "aten._softmax.default"
LENGTH = 4


class Softmax(nn.Module):
    """A softmax whose batch is its logits (B, H, T, S); `mask` names how they are masked."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, logits: Tensor) -> Tensor:
        behind = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        if self.mask == "none":
            return logits.softmax(-1)
        if self.mask == "fill":
            return logits.masked_fill(behind, -torch.inf).softmax(-1)
        if self.mask == "after":  # by hand: the mask is not in the logits
            weights = logits.exp() * ~behind
            return weights / weights.sum(-1, keepdim=True)
        lowest = {"lowest": torch.finfo(logits.dtype).min, "-1e4": -1e4, "-1e30": -1e30}[self.mask]
        return (logits * ~behind + lowest * behind).softmax(-1)


def softmax_anatomy(mask: str, kind: str = "attention") -> Anatomy:
    nowhere, op = Site("", 0, "aten.add.Tensor", 99), SOFTMAX
    logits, probabilities = Site("", 0, op, 0, -1), Site("", 0, op, 0)
    if mask == "after":
        logits, probabilities = Site("", 0, "aten.exp.default", 0, -1), Site("", 0, "aten.div.Tensor", 0)
    seen = AttentionSites(nowhere, nowhere, nowhere, logits, probabilities)
    branch = Branch(kind, "none", "none", "attn", 0, "add", None, None, None, nowhere, nowhere, nowhere)
    branch = dataclasses.replace(branch, attention=(seen,))
    return Anatomy((Stack("s", (Block("b", 0, (branch,), nowhere, nowhere),), None, nowhere),))


def figures(logits: Tensor, mask: str) -> dict[str, float]:
    rows = Measurements(measure_attention(subject_of(Softmax(mask), logits), softmax_anatomy(mask)))
    assert all(row.measured for row in rows), list(rows)
    return {row.quantity.removeprefix("attention/"): row.value for row in rows}


MASKS = ("none", "fill", "lowest", "-1e4", "-1e30", "after")


@pytest.mark.parametrize("mask", MASKS)
def test_equal_logits_are_uniform_over_what_is_visible(mask: str) -> None:
    found = figures(torch.full((2, 3, LENGTH, LENGTH), -2.5), mask)
    visible = [LENGTH] * LENGTH if mask == "none" else range(1, LENGTH + 1)
    assert found["entropy"] == pytest.approx(1.0, rel=1e-6)
    assert found["logit-spread"] == pytest.approx(0.0, abs=1e-12)
    assert found["max-logit"] == 2.5
    assert found["max-probability"] == pytest.approx(sum(1 / n for n in visible) / LENGTH, rel=1e-6)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min, -1e4, -100.0])
def test_padding_is_no_key(lowest: float) -> None:
    logits = torch.zeros(2, 1, LENGTH, LENGTH)
    logits[1, ..., 0] = lowest  # the first key of the second sequence: before its queries
    found = figures(logits, "none")
    assert found["entropy"] == pytest.approx(1.0, rel=1e-6)
    assert found["max-logit"] == 0.0
    assert found["max-probability"] == pytest.approx((1 / LENGTH + 1 / (LENGTH - 1)) / 2, rel=1e-6)


def test_low_logits_beside_large_ones_are_no_mask() -> None:
    logits = torch.tensor([[80.0, -100.0, 0.0], [0.0, 0.0, -100.0], [0.0, -30.0, -100.0]])
    assert figures(logits[None, :2], "none")["logit-spread"] > 30
    assert figures(logits[None, 2:], "none")["logit-spread"] > 20
    low = torch.tensor([[-100.0, -100.0, -100.0], [0.0, 0.0, -100.0]])
    assert figures(low[None], "none")["logit-spread"] > 10, "a mask leaves each query a key"


@pytest.mark.parametrize("mask", MASKS)
def test_one_key_that_wins_is_entropy_zero(mask: str) -> None:
    logits = torch.zeros(1, 1, LENGTH, LENGTH)
    logits[..., 0] = 80.0
    found = figures(logits, mask)
    assert found["entropy"] == pytest.approx(0.0, abs=1e-12)
    assert found["max-logit"] == 80.0
    assert found["max-probability"] == pytest.approx(1.0)


def test_an_entropy_worked_out_by_hand() -> None:
    logits = torch.tensor([[0.0, -torch.inf], [math.log(3.0), 0.0]], dtype=torch.float64)
    found = figures(
        logits.reshape(1, 2, 2), "none"
    )  # no head axis; the first query sees one key and does not count
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert found["entropy"] == pytest.approx(entropy / math.log(2), rel=1e-14)
    spread = math.log(3) / 2 / math.sqrt(2 * math.log(2))
    assert found["logit-spread"] == pytest.approx(spread, rel=1e-14)
    assert found["max-logit"] == pytest.approx(math.log(3))
    assert found["max-probability"] == pytest.approx((1 + 0.75) / 2)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_values_are_those_of_a_plain_softmax(placement: str) -> None:
    subject, anatomy = toy(placement)
    rows = Measurements(measure_attention(subject, anatomy))
    for i in range(2):
        f = subject.model.blocks[i][0].f
        seen: list[Tensor] = []
        f.vqk.register_forward_hook(lambda m, inputs, output, seen=seen: seen.append(output.detach()))
        subject.model.eval()(subject.batch)
        _, q, k = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in seen[0].chunk(3, -1))
        logits = q @ k.mT / 2
        causal = torch.ones(6, 6, dtype=torch.bool).tril()
        p = logits.masked_fill(~causal, -torch.inf).softmax(-1)
        entropy = -(p * p.clamp_min(1e-300).log()).sum(-1)[..., 1:] / torch.arange(2.0, 7).double().log()
        site = f"blocks.{i}.0.f"
        spreads = [
            row[: n + 1].double().std(correction=0) / math.sqrt(2 * math.log(n + 1))
            for head in logits.flatten(0, 1)
            for n, row in enumerate(head)
            if n
        ]
        spread = float(torch.stack(spreads).mean())
        assert rows.of("attention/logit-spread")[site] == pytest.approx(spread, rel=1e-6)
        assert rows.of("attention/entropy")[site] == pytest.approx(float(entropy.mean()), rel=1e-12)
        assert rows.of("attention/max-logit")[site] == pytest.approx(float(logits[..., causal].abs().max()))
        assert rows.of("attention/max-probability")[site] == pytest.approx(float(p.amax(-1).mean()))


def test_reasons() -> None:
    def reason(mask: str, logits: Tensor, anatomy: Anatomy) -> str:
        rows = measure_attention(subject_of(Softmax(mask), logits), anatomy)
        assert len(rows) == 4
        assert not any(row.measured for row in rows)
        return rows[0].how

    logits, seen = torch.zeros(1, 1, 2, 2), softmax_anatomy("none")
    assert "not finite" in reason("none", torch.full_like(logits, torch.inf), seen)
    assert "this forward did not run" in reason("after", logits, seen)
    branch = seen.stacks[0].blocks[0].branches[0]
    blind = dataclasses.replace(
        seen.stacks[0].blocks[0], branches=(dataclasses.replace(branch, attention=()),)
    )
    assert "no softmax" in reason(
        "none", logits, Anatomy((dataclasses.replace(seen.stacks[0], blocks=(blind,)),))
    )


def test_a_query_that_sees_one_key_has_no_entropy() -> None:
    rows = Measurements(
        measure_attention(subject_of(Softmax("none"), torch.zeros(1, 1, 1, 1)), softmax_anatomy("none"))
    )
    row = rows.find("attention/entropy", "attn")
    assert row is not None
    assert row.how == "not measured: no query sees two keys"
    assert rows.of("attention/max-probability") == {"attn": 1.0}


def test_logits_of_deviation_at_which_a_softmax_condenses_have_spread_one() -> None:
    """√(2 log n) for n keys, whatever their mean; unit queries and keys of 128 dimensions are far beyond it
    without 1/√d_h, and far inside with it."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(2, 4, 4, 256, 128, generator=generator)
    products = queries @ keys.mT
    limit = math.sqrt(2 * math.log(256))
    sharp = products / products.std(-1, correction=0, keepdim=True) * limit + 7.0
    assert figures(sharp, "none")["logit-spread"] == pytest.approx(1.0, rel=1e-5)
    assert figures(products, "none")["logit-spread"] == pytest.approx(math.sqrt(128) / limit, rel=0.02)
    assert figures(products / math.sqrt(128), "none")["logit-spread"] == pytest.approx(1 / limit, rel=0.02)
