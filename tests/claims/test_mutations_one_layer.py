"""A broken building block turns the verdicts of A1 to A8 and A18."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from normscope.claims import (
    CLAIMS,
    Setup,
    Verdict,
    layer_jacobian,
    lost_gradients,
    measure_claim,
    norm_jacobian,
    one_layer,
    real_blocks,
)
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.linalg import layer_norm_jacobian, left_kernel, right_kernel
from normscope.nn import Residual


def without_sigma(z: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """(I − 11ᵀ/d − ẑẑᵀ/d), no 1/σ."""
    return layer_norm_jacobian(z, weight, eps) * (z.var(-1, correction=0) + eps).sqrt()[..., None, None]


def gain_on_the_right(z: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    plain = layer_norm_jacobian(z, None, eps)
    return plain if weight is None else plain * weight


def without_mean(normalised: Tensor, centred: bool) -> Tensor:
    """RMSNorm's kernel under the name of LayerNorm's."""
    return right_kernel(normalised, centred=False)


def without_inverse(normalised: Tensor, weight: Tensor | None, centred: bool) -> tuple[Tensor, Tensor]:
    """γ ⊙ span{1, ẑ} instead of γ⁻¹ ⊙ span{1, ẑ}."""
    return left_kernel(normalised, None if weight is None else 1 / weight, centred)


def mislabelled(scheme: str, *rest: Any, other: str, **options: Any) -> Residual:
    """A residual of another scheme than it is called."""
    return Residual(other, *rest, **options)


MUTATIONS: list[tuple[str, str, ModuleType, str, Callable[..., object]]] = [
    ("A1", "", norm_jacobian, "layer_norm_jacobian", without_sigma),
    ("A2", "", norm_jacobian, "right_kernel", without_mean),
    ("A3", "left", norm_jacobian, "layer_norm_jacobian", gain_on_the_right),
    ("A4", "", one_layer, "Residual", partial(mislabelled, other="pre")),
    ("A4", "", real_blocks, "layer_norm_jacobian", gain_on_the_right),
    ("A5", "", one_layer, "Residual", partial(mislabelled, other="pre")),
    ("A6", "", layer_jacobian, "right_kernel", without_mean),
    ("A8", "", one_layer, "Residual", partial(mislabelled, other="res-post")),
    ("A18", "left", lost_gradients, "left_kernel", without_inverse),
]


@pytest.mark.parametrize(
    ("id", "part", "module", "name", "broken"), MUTATIONS, ids=[f"{m[0]}-{m[3]}" for m in MUTATIONS]
)
def test_a_broken_block_turns_the_verdict(
    id: str,
    part: str,
    module: ModuleType,
    name: str,
    broken: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(norm_jacobian, "WIDTHS", (3, 16))
    monkeypatch.setattr(norm_jacobian, "GAIN_WIDTHS", (4, 16, 256))
    monkeypatch.setattr(norm_jacobian, "STARTS", ("small",))
    monkeypatch.setattr(one_layer, "LARGE", ((2, 8), (1, 32)))
    assert _verdict(id, part) is Verdict.HOLDS
    monkeypatch.setattr(module, name, broken)
    assert _verdict(id, part) is Verdict.REFUTED


def _verdict(id: str, part: str) -> Verdict:
    found = measure_claim(CLAIMS[id], Setup(seeds=(0,)))
    assert found.error is None
    return found.parts[part].verdict if part else found.judgement.verdict


def test_a_norm_whose_backward_lets_everything_through_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A7: the straight-through norm, whose gradient is the identity's."""

    def straight_through(z: Tensor, *rest: Any, **options: Any) -> Tensor:
        y = torch.nn.functional.layer_norm(z, *rest, **options)
        return z + (y - z).detach()

    crossing = lost_gradients.crossings("post", "xavier", 2, 32, 0, Setup(seeds=(0,)))[-1]
    assert crossing.leak < 1e-3
    fake = type("Functional", (), {"layer_norm": staticmethod(straight_through)})
    monkeypatch.setattr(lost_gradients, "functional", fake)
    crossing = lost_gradients.crossings("post", "xavier", 2, 32, 0, Setup(seeds=(0,)))[-1]
    assert crossing.leak > 1e-2
