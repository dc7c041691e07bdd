"""A broken building block turns the verdict of a claim about training.

What the broken block is not in is planted; the runs that it is in are trained in fact, small and short.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from planted_runs import STANDS_STILL, TRAINS, Planted
from torch import Tensor

from normscope.claims import CLAIMS, Setup, Verdict, depth_limits, measure_claim, swapped, warmup, zero_start
from normscope.claims.training import Setting
from normscope.nn import schemes
from normscope.nn.joins import Scaled
from normscope.nn.placement import one, zero
from normscope.nn.schemes import SCHEMES
from normscope.nn.schemes.gates import HighwayGate
from normscope.nn.schemes.learnt import learnt
from normscope.train import RunConfig

Mislabel = Callable[..., None]


@pytest.fixture
def mislabel(monkeypatch: pytest.MonkeyPatch) -> Mislabel:
    """Puts a scheme, changed, under the name of another."""

    def put(name: str, of: str, **changes: object) -> None:
        broken = replace(SCHEMES[of], name=name, **changes)
        monkeypatch.setattr(schemes, "SCHEMES", dict(schemes.SCHEMES) | {name: broken})

    return put


def verdict(id: str, setup: Setup, part: str = "") -> Verdict:
    """Verdict of a claim or of one of its parts; fails where the measurement failed."""
    tested = measure_claim(CLAIMS[id], setup)
    assert tested.error is None, tested.evidence.notes
    return tested.parts[part].verdict if part else tested.judgement.verdict


def cold_post_alone(config: RunConfig) -> float | None:
    """Post-LN from its own weights without warm-up is trained in fact, what else there is trains."""
    real = "scheme=post" in config.model and "init" not in config.model and config.trial.warmup == 0
    return None if real else TRAINS


@pytest.mark.parametrize(("broken", "expected"), [(False, Verdict.HOLDS), (True, Verdict.REFUTED)])
def test_b4_with_pre_ln_under_the_name_of_post_ln(broken, expected, mislabel, monkeypatch):
    deep = (Setting(scheme="post", depth=8, steps=120),)
    monkeypatch.setattr(warmup, "POST", deep * 3)
    monkeypatch.setattr(warmup, "POST_NORMAL", ())
    monkeypatch.setattr(warmup, "SLOWER", warmup.POST[0].lr)
    if broken:
        mislabel("post", "pre")
    assert verdict("B4", Planted(seeds=(0,), plan=cold_post_alone)) is expected


def depth_as_measured(config: RunConfig) -> float:
    """Pre-LN trains, what else there is stands still."""
    return TRAINS if "scheme=pre" in config.model else STANDS_STILL


@pytest.mark.parametrize(("broken", "expected"), [(False, Verdict.HOLDS), (True, Verdict.REFUTED)])
def test_c2_with_a_pre_ln_stack_that_forgets_its_stream(broken, expected, mislabel, monkeypatch):
    monkeypatch.setattr(depth_limits, "CHAIN", dict.fromkeys(depth_limits.CHAIN, 60))
    if broken:
        mislabel("pre", "pre", join=Scaled(stream_scale=zero))
    assert verdict("C2", Planted(seeds=(0,), plan=depth_as_measured), "pre") is expected


@pytest.mark.parametrize(("broken", "expected"), [(False, Verdict.HOLDS), (True, Verdict.REFUTED)])
def test_c2_with_a_plain_stack_that_has_residuals(broken, expected, mislabel, monkeypatch):
    monkeypatch.setattr(depth_limits, "CHAIN", dict.fromkeys(depth_limits.CHAIN, 40))
    if broken:
        mislabel("plain", "pre")
    assert verdict("C2", Planted(seeds=(0,), plan=depth_as_measured), "limit") is expected


def adds_in_full(self: HighwayGate, x_BTD: Tensor, update: Callable, norm: Callable) -> Tensor:
    """A highway gate without the 1 - t on the stream."""
    return norm(x_BTD + torch.sigmoid(self.transform(x_BTD)) * update(x_BTD))


@pytest.mark.parametrize(("broken", "expected"), [(False, Verdict.CONDITION), (True, Verdict.REFUTED)])
def test_c3_with_a_gate_that_leaves_the_stream_alone(broken, expected, monkeypatch):
    monkeypatch.setattr(depth_limits, "HIGHWAY", Setting(scheme="highway", depth=2, width=16, steps=3))
    if broken:
        monkeypatch.setattr(HighwayGate, "forward", adds_in_full)
    assert verdict("C3", Setup(seeds=(0,))) is expected


@pytest.mark.parametrize(("broken", "expected"), [(False, Verdict.HOLDS), (True, Verdict.REFUTED)])
def test_c29_with_a_rezero_that_starts_at_one(broken, expected, mislabel, monkeypatch):
    monkeypatch.setattr(zero_start, "GATED", {"rezero": zero_start.NO_NORM})
    if broken:
        mislabel("rezero", "rezero", join=learnt(one))
    assert verdict("C29", Planted(seeds=(0,))) is expected


@pytest.mark.parametrize("broken", [False, True])
def test_c27_with_a_swap_that_leaves_the_norms_where_they_are(broken, monkeypatch):
    monkeypatch.setattr(swapped, "FIRST", Setting(scheme="post", depth=2, width=16, lr=1e-2, steps=60))
    monkeypatch.setattr(swapped, "AFTER", 3)
    if broken:
        monkeypatch.setattr(swapped, "swap", lambda model, scheme: copy.deepcopy(model))
    assert (verdict("C27", Setup(seeds=(0, 1))) is Verdict.REFUTED) is broken
