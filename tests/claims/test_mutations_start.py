"""A broken building block turns the verdicts of B6, C8, C9, C12, C14, C15, C16 and C19."""

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from normscope.claims import (
    CLAIMS,
    Setup,
    Verdict,
    deep_scaling,
    measure_claim,
    sensitivity,
    start_stream,
    zero_start,
)
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.at_start import stack_of
from normscope.linalg import layer_norm_jacobian
from normscope.nn import SCHEMES, build, swap
from normscope.nn.joins import WeightedSum

Patch = pytest.MonkeyPatch


def without_norm(self: WeightedSum, x: Tensor, update: Callable[[Tensor], Tensor], norm: object) -> Tensor:
    """A sum that forgets the norm on the stream."""
    return x + update(x)


def leaky(self: WeightedSum, x: Tensor, update: Callable[[Tensor], Tensor], norm: object) -> Tensor:
    """A stream that loses a little at each add."""
    return 0.999 * x + update(x)


def post_for_pre(patch: Patch) -> None:
    patch.setattr(start_stream, "train_changed", lambda setup, config: {})
    patch.setattr(start_stream, "build", lambda kind, scheme, **rest: build(kind, scheme="post", **rest))


def no_stream_norm(patch: Patch) -> None:
    patch.setattr(start_stream, "SCHEMES", {name: SCHEMES[name] for name in ("post", "pre")})
    patch.setattr(start_stream, "PLAIN_SCHEMES", ("post",))
    patch.setattr(WeightedSum, "forward", without_norm)


def no_sigma(patch: Patch) -> None:
    def broken(z: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return z.std(correction=0) * layer_norm_jacobian(z, weight, eps)

    patch.setattr(sensitivity, "SCALES", (1.0,))
    patch.setattr(sensitivity, "layer_norm_jacobian", broken)


def pre_for_res_post(patch: Patch) -> None:
    def broken(model: object, name: str) -> object:
        return swap(model, "pre" if name == "res-post" else name)  # type: ignore[arg-type]

    patch.setattr(sensitivity, "swap", broken)


def lossy_stream(patch: Patch) -> None:
    patch.setattr(zero_start, "STEPS", 2)
    patch.setattr(zero_start, "SCHEMES", {name: SCHEMES[name] for name in ("pre", "peri")})
    patch.setattr(zero_start, "BORN_ZERO", ())
    patch.setattr(WeightedSum, "forward", leaky)


def wrong_root(patch: Patch) -> None:
    right = start_stream.divide_last_maps
    patch.setattr(start_stream, "divide_last_maps", lambda module, n: right(module, 1 / n))


def pre_as_deepnorm(patch: Patch) -> None:
    patch.setattr(deep_scaling, "SHORT_RUN", (2, 2))
    patch.setattr(deep_scaling, "build", lambda kind, scheme, **rest: build(kind, scheme="pre", **rest))


def gain_elsewhere(patch: Patch) -> None:
    def broken(scheme: str, depth: int, seed: int, **options: object) -> nn.Module:
        return stack_of("peri" if scheme == "res-post" else scheme, depth, seed, **options)  # type: ignore[arg-type]

    def spared(module: nn.Module, slot: object, value: float) -> None:
        """Leaves γ as it is."""

    patch.setattr(zero_start, "STEPS", 4)
    patch.setattr(zero_start, "stack_of", broken)
    patch.setattr(zero_start, "set_gains", spared)


MUTATIONS = [
    ("B6", Verdict.HOLDS, Verdict.REFUTED, post_for_pre),
    ("C8", Verdict.CONDITION, Verdict.REFUTED, no_stream_norm),
    ("C9", Verdict.HOLDS, Verdict.REFUTED, no_sigma),
    ("C12", Verdict.CONDITION, Verdict.REFUTED, pre_for_res_post),
    ("C14", Verdict.HOLDS, Verdict.REFUTED, lossy_stream),
    ("C15 depth", Verdict.HOLDS, Verdict.REFUTED, wrong_root),
    ("C16", Verdict.REFUTED, Verdict.HOLDS, pre_as_deepnorm),
    ("C19", Verdict.CONDITION, Verdict.REFUTED, gain_elsewhere),
]


@pytest.mark.parametrize(("id", "right", "wrong", "breaks"), MUTATIONS, ids=[m[0] for m in MUTATIONS])
def test_a_broken_part_turns_the_verdict(
    id: str, right: Verdict, wrong: Verdict, breaks: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    """The unbroken verdicts `right` are those of the tests of each module."""
    breaks(monkeypatch)
    name, _, part = id.partition(" ")
    tested = measure_claim(CLAIMS[name], Setup(seeds=(0,)))
    assert tested.error is None
    verdict = tested.parts[part].verdict if part else tested.judgement.verdict
    assert verdict is wrong is not right
