"""Gradients through deep stacks against one backward pass, and depths whose results are known."""

import math

import pytest
import torch
from planted_runs import STANDS_STILL, TRAINS, Planted, judged

from normscope.claims import Verdict, depth_limits
from normscope.claims.depth_limits import SHAPE, log_gradients
from normscope.nn import Block, ModelConfig
from normscope.nn.placement import Where
from normscope.train import RunConfig


def whole(scheme: str, depth: int, width: int, seed: int) -> float:
    """log10 of the gradient at the bottom over that at the top, by one backward pass through all blocks."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = ModelConfig(scheme=scheme, depth=depth, width=width, heads=2)
        blocks = [Block(config, Where(k, depth), causal=True).double() for k in range(1, depth + 1)]
    start = torch.randn(*SHAPE, width, dtype=torch.float64, generator=generator).requires_grad_(True)
    x = start
    for block in blocks:
        x = block(x)
    top = torch.randn(*SHAPE, width, dtype=torch.float64, generator=generator)
    (bottom,) = torch.autograd.grad(x, start, top)
    return math.log10(float(bottom.norm() / top.norm()))


@pytest.mark.parametrize("scheme", ["plain", "residual-no-norm", "post", "pre", "highway"])
def test_block_by_block_is_the_gradient_of_the_whole(scheme):
    assert log_gradients(scheme, 3, 8, 1)[-1] == pytest.approx(whole(scheme, 3, 8, 1), abs=1e-9)


def test_a_gradient_far_below_the_smallest_number_is_still_measured():
    logs = log_gradients("plain", 100, 8, 0)
    assert len(logs) == 101
    assert all(math.isfinite(log) for log in logs)
    assert log_gradients("plain", 60, 8, 0)[-1] < -20


@pytest.mark.parametrize(
    ("deep", "verdict"), [(STANDS_STILL, Verdict.HOLDS), (TRAINS, Verdict.REFUTED)], ids=["fails", "trains"]
)
def test_b5_asks_whether_deep_post_ln_trains(deep, verdict):
    def plan(config: RunConfig) -> float:
        return TRAINS if "scheme=pre" in config.model else deep

    assert judged("B5", plan, long=True).judgement.verdict is verdict
    found = judged("B5", plan, (0, 1))
    assert found.judgement.verdict is verdict
    assert found.parts["pre"].verdict is Verdict.HOLDS
    assert found.parts["harder"].verdict is verdict
    assert found.evidence.figure.value == pytest.approx(deep, abs=0.01)


def test_b5_has_one_setting_that_trains_for_all():
    """The best setting decides."""

    def plan(config: RunConfig) -> float:
        return TRAINS if config.trial.warmup == 200 and config.trial.lr < 2e-3 else STANDS_STILL

    found = judged("B5", plan, (0, 1))
    assert found.judgement.verdict is found.parts["xavier"].verdict is Verdict.REFUTED
    assert found.parts["longer"].verdict is Verdict.HOLDS
    assert found.parts["pre"].verdict is Verdict.REFUTED


@pytest.mark.parametrize("long", [False, True])
def test_c2_reads_chains_and_trainings(long, monkeypatch):
    monkeypatch.setattr(depth_limits, "CHAIN", dict.fromkeys(depth_limits.CHAIN, 24))

    def plan(config: RunConfig) -> float:
        return TRAINS if "scheme=pre" in config.model else STANDS_STILL

    found = judged("C2", plan, long=long)
    assert found.judgement.verdict is Verdict.REFUTED
    assert found.parts["pre"].verdict is Verdict.HOLDS
    assert found.parts["limit"].verdict is Verdict.HOLDS
    assert found.parts["shallow"].verdict is Verdict.REFUTED
    assert found.evidence.figure.value > 3


def test_a_gates_bias_decides_how_fast_a_gradient_falls():
    lost = [-log_gradients("highway", 40, 8, 0, gate_bias=bias)[-1] for bias in (0.0, -2.0, -5.0)]
    assert lost[0] > lost[1] > lost[2]
    assert pytest.approx(-3.3, abs=0.05) == depth_limits.OPEN


def test_gates_of_a_highway_block_are_about_a_tenth_open(monkeypatch):
    monkeypatch.setattr(depth_limits, "HIGHWAY", depth_limits.Setting(scheme="highway", depth=1, steps=2))
    before, _, extra = depth_limits._gates(Planted(seeds=(0,)))
    assert before[0] == pytest.approx(1 / (1 + math.e**2), rel=0.1)
    width = depth_limits.HIGHWAY.width
    block = Block(ModelConfig(scheme="residual-no-norm", width=width, heads=2), Where(1, 1), causal=True)
    plain = sum(parameter.numel() for parameter in block.parameters())
    assert extra == pytest.approx(2 * (width**2 + width) / plain)
