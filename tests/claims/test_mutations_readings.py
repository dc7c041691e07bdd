"""A broken building block turns the verdicts of B11, B14, C4 to C7, C24, C34 and C35."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from normscope.anatomy import Anatomy
from normscope.claims import (
    CLAIMS,
    Setup,
    Verdict,
    batch_norm,
    half_precision,
    masks,
    measure_claim,
    norm_output,
    snippets,
)
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.nn import NORMS, Encoder
from normscope.nn.norms import LayerNorm
from normscope.nn.token_norms import BatchNorm

Patch = pytest.MonkeyPatch


class Plain(nn.Module):
    """A norm without parameters."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps


class WithoutSigma(Plain):
    """x − μ: the 1/σ is missing."""

    def forward(self, x: Tensor, real_BT: Tensor | None = None) -> Tensor:
        return x - x.mean(-1, keepdim=True)


class EpsOutside(Plain):
    """(x − μ)/(σ + ε)."""

    def forward(self, x: Tensor, real_BT: Tensor | None = None) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True).sqrt() + self.eps)


class InHalf(Plain):
    """Statistics in the precision of the input, one coordinate at a time."""

    def forward(self, x: Tensor, real_BT: Tensor | None = None) -> Tensor:
        return half_precision.norm_by(half_precision.two_pass, x, x.dtype)


def other_layer_norm(room: Any, kind: Callable[[int, float], nn.Module]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(room, "NORMS", dict(NORMS) | {"layernorm": kind})


def leaking_mask(patch: Patch) -> None:
    patch.setattr(masks, "Decoder", Encoder)


def without_sigma(patch: Patch) -> None:
    patch.setattr(LayerNorm, "forward", lambda self, x, real=None: x - x.mean(-1, keepdim=True))
    patch.setattr(masks, "STEPS", 1)


def deaf_to_padding(patch: Patch) -> None:
    forward = BatchNorm.forward
    patch.setattr(BatchNorm, "forward", lambda self, x, real=None: forward(self, x))


def always_of_the_batch(patch: Patch) -> None:
    def forward(self: BatchNorm, x: Tensor, real: Tensor | None = None) -> Tensor:
        return (x - x.mean((0, 1))) / (x.var((0, 1), correction=0) + self.eps).sqrt()

    patch.setattr(BatchNorm, "forward", forward)


def mislabelled(patch: Patch) -> None:
    """A reading that takes Pre-LN for Post-LN."""
    other, sound = {"pre": "post", "post": "pre"}, snippets.read

    def read(model: nn.Module) -> Anatomy:
        anatomy = sound(model)
        return replace(
            anatomy,
            stacks=tuple(
                replace(
                    stack,
                    blocks=tuple(
                        replace(
                            block,
                            branches=tuple(
                                replace(branch, placement=other.get(branch.placement, branch.placement))
                                for branch in block.branches
                            ),
                        )
                        for block in stack.blocks
                    ),
                )
                for stack in anatomy.stacks
            ),
        )

    patch.setattr(snippets, "read", read)


MUTATIONS: list[tuple[str, str, Callable[[Patch], None], Verdict]] = [
    ("B14", "", leaking_mask, Verdict.REFUTED),
    ("B11", "", without_sigma, Verdict.REFUTED),
    ("C4", "", other_layer_norm(batch_norm, BatchNorm), Verdict.REFUTED),
    ("C5", "told", deaf_to_padding, Verdict.HOLDS),
    ("C6", "", always_of_the_batch, Verdict.REFUTED),
    ("C7", "others", mislabelled, Verdict.REFUTED),
    ("C24", "robust", other_layer_norm(half_precision, InHalf), Verdict.REFUTED),
    ("C34", "", other_layer_norm(norm_output, EpsOutside), Verdict.HOLDS),
    ("C35", "moments", other_layer_norm(norm_output, WithoutSigma), Verdict.REFUTED),
]
"""Claim, part, what is broken, the verdict then; that of the sound block is in the other tests."""


@pytest.mark.parametrize(("id", "part", "broken", "verdict"), MUTATIONS)
def test_a_broken_block_turns_the_verdict(
    id: str, part: str, broken: Callable[[Patch], None], verdict: Verdict, monkeypatch: Patch
) -> None:
    broken(monkeypatch)
    found = measure_claim(CLAIMS[id], Setup(seeds=(0,)))
    assert found.error is None, found.evidence.notes
    assert (found.parts[part] if part else found.judgement).verdict is verdict
