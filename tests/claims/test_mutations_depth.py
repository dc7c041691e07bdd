"""A broken building block turns the verdicts of A10, A12, A14, A24, B1, B9 and C17.

What they are with the block as it is stands in the tests of their modules.
"""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from normscope.claims import (
    CLAIMS,
    Setup,
    Verdict,
    deep_gradients,
    deep_jacobian,
    measure_claim,
    real_blocks,
    unrolled,
    weyl,
)
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.at_start import stack_of
from normscope.linalg import layer_norm_jacobian
from normscope.nn.stack import Stack

LOOK = Setup(seeds=(0,))


def half_the_norm(branch_norm: float, stream_scale: float = 1.0) -> float:
    """A bound that is too good."""
    return abs(stream_scale) - branch_norm / 2


def without_sigma(z: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The norm's Jacobian without its 1/σ."""
    return layer_norm_jacobian(z, weight, eps) * z.std(-1, correction=0)[..., None, None]


def labelled(name: str) -> Callable[..., Any]:
    """Models of the scheme `name`, whatever was asked for."""
    return lambda scheme, **options: real_blocks.started(name, **options)


def without_final_norm(scheme: str, **options: Any) -> Any:
    """Models that lack their final norm."""
    return real_blocks.started(scheme, **options | {"final_norm": False})


def post_for_pre(scheme: str, *rest: Any, **options: Any) -> Stack:
    """A stack without residuals under the name of Pre-LN."""
    return stack_of("plain", *rest, **options)


MUTATIONS: list[tuple[str, str, object, str, object, Verdict]] = [
    ("A10", "", weyl, "weyl_lower_bound", half_the_norm, Verdict.REFUTED),
    ("A12", "form", real_blocks, "layer_norm_jacobian", without_sigma, Verdict.REFUTED),
    ("A14", "", deep_jacobian, "started", labelled("pre"), Verdict.REFUTED),
    ("A24", "", deep_jacobian, "started", without_final_norm, Verdict.HOLDS),
    ("B1", "", unrolled, "started", labelled("post"), Verdict.REFUTED),
    ("B9", "second", real_blocks, "layer_norm_jacobian", without_sigma, Verdict.REFUTED),
    ("C17", "pre", deep_gradients, "stack_of", post_for_pre, Verdict.REFUTED),
]


def verdict_of(id: str, part: str) -> Verdict:
    found = measure_claim(CLAIMS[id], LOOK)
    assert found.error is None
    return (found.parts[part] if part else found.judgement).verdict


@pytest.mark.parametrize(
    ("id", "part", "owner", "name", "broken", "after"),
    MUTATIONS,
    ids=[f"{m[0]}-{m[3]}" for m in MUTATIONS],
)
def test_a_broken_block_turns_the_verdict(
    id: str,
    part: str,
    owner: object,
    name: str,
    broken: object,
    after: Verdict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, broken)
    assert verdict_of(id, part) is after
