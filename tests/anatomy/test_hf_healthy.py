"""The benchmark of transformers' model types: which findings hold for a model as it is."""

import functools

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from benchmarks.hf.healthy import _is_under_no_grad
from benchmarks.hf.small import LAYERS, Size


class Frozen(nn.Linear):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Partial(nn.Linear):
    forward = functools.partial(nn.functional.relu)


def test_a_weight_is_under_no_grad_if_the_source_of_an_owner_says_so() -> None:
    made: dict[str, type[nn.Module]] = {"nn": nn}  # type: ignore[dict-item]
    exec("class Made(nn.Linear):\n    def forward(self, x): return x", made)
    model = nn.ModuleDict(
        {"frozen": nn.Sequential(Frozen(2, 2)), "made": made["Made"](2, 2), "partial": Partial(2, 2)}
    )
    assert _is_under_no_grad(model, "frozen.0.weight")
    assert not _is_under_no_grad(model, "made.weight"), "its source cannot be read"
    assert not _is_under_no_grad(model, "partial.weight"), "it has no source"


def test_the_size_gives_the_number_of_layers() -> None:
    assert (Size().of(LAYERS), Size(layers=6).of(LAYERS)) == (2, 6)
