"""A broken building block turns the verdicts of B12, B13, C21, C22 and C23."""

import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from normscope.claims import (
    CLAIMS,
    Setup,
    Verdict,
    measure_claim,
    memory,
    operations,
    sharded_norm,
)
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.nn import build, norms
from normscope.nn.models import Model


def copies_first(self: nn.LayerNorm, x: Tensor, real_BT: Tensor | None = None) -> Tensor:
    """A norm that keeps a copy, and not what went into it."""
    return nn.LayerNorm.forward(self, x.clone())


def scaled(name: str, *, scheme: str, **options: Any) -> Model:
    """A residual with learnt scales under the name of Pre-LN."""
    return build(name, scheme="layerscale", **options)


LABELLED_RMS = {**norms.NORMS, "rmsnorm": lambda width, eps: nn.LayerNorm(width, eps=eps, bias=False)}

MUTATIONS: list[tuple[str, str, object, str, object, Verdict, Verdict]] = [
    ("B12", "reason", norms.LayerNorm, "forward", copies_first, Verdict.REFUTED, Verdict.HOLDS),
    ("B13", "inside", operations, "NORMS", LABELLED_RMS, Verdict.HOLDS, Verdict.REFUTED),
    ("C22", "parameters", operations, "build", scaled, Verdict.REFUTED, Verdict.HOLDS),
]


@pytest.mark.parametrize(
    ("id", "part", "owner", "name", "broken", "before", "after"),
    MUTATIONS,
    ids=[f"{m[0]}-{m[3]}" for m in MUTATIONS],
)
def test_a_broken_block_turns_the_verdict(
    id: str,
    part: str,
    owner: object,
    name: str,
    broken: object,
    before: Verdict,
    after: Verdict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "KINDS", (("layernorm", 64),))
    monkeypatch.setattr(memory, "DEPTHS", (2,))
    monkeypatch.setattr(operations, "WIDTHS", (64, 512))
    assert _verdict(id, part) is before
    monkeypatch.setattr(owner, name, broken)
    assert _verdict(id, part) is after


def _verdict(id: str, part: str = "") -> Verdict:
    found = measure_claim(CLAIMS[id], Setup(seeds=(0,)))
    assert found.error is None
    return found.parts[part].verdict if part else found.judgement.verdict


def test_checkpointing_that_keeps_everything_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """C21."""
    monkeypatch.setattr(memory, "SIZES", ((2, 256),))
    monkeypatch.setattr(memory, "checkpoint", lambda block, *args, use_reentrant: block(*args))
    assert _verdict("C21") is Verdict.REFUTED


def test_a_collective_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """C23: each rank takes its own statistics for those of all."""
    (tmp_path / "without_sums.py").write_text(BROKEN_RANKS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setattr(sharded_norm, "WORLDS", (2,))
    monkeypatch.setattr(sharded_norm, "PROGRAM", "without_sums")
    assert _verdict("C23") is Verdict.REFUTED  # tests/claims/test_sharded_norm.py has it unbroken


BROKEN_RANKS = """
import sys
from normscope.claims import shards

shards.STATISTICS["sums"] = shards.STATISTICS["merging"] = shards.locally
shards.main(sys.argv[1])
"""
