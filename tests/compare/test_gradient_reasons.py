"""Reasons of gradients that part where the values agree, planted in models written by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import BASES, batch, tiny
from torch import Tensor, nn

import normscope
from normscope.compare.types import Difference, Part


def differences(base: str, model: nn.Module) -> list[Difference]:
    plain = tiny(BASES[base])
    found = normscope.diff(plain, model, batch=batch(BASES[base]), parts="function", reraise=True)
    return list(found.of(Part.FUNCTION))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("detach", "words"), [("k", "keys"), ("branch", ""), ("skip", "skip connection")])
@pytest.mark.parametrize("only", [None, 1])
def test_a_cut_gradient_is_named(base: str, detach: str, words: str, only: int | None) -> None:
    changes: dict[str, Any] = {"detach": detach} if only is None else {"detach": detach, "only": only}
    found = differences(base, tiny(BASES[base], changes))
    assert [each.name for each in found] == ["gradient-cut"]
    read = "branch" if base == "bert" else "norm's output"
    assert (read if detach == "branch" else words) in found[0].message
    assert found[0].a == "flows"
    assert found[0].b == "cut"
    is_shared = base == "phi" and detach == "skip"  # parallel branches have one skip connection
    last = "blocks.1.attn" if detach == "k" or is_shared else "blocks.1.mlp"
    assert found[0].sites[0][1] == last
    if detach == "k" and only is None:
        assert [site for _, site in found[0].sites] == ["blocks.1.attn", "blocks.0.attn"]


class ConstantStatistics(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps).detach())
        centred = x - x.mean(-1, keepdim=True)
        return (
            self.weight * (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps).detach())
            + self.bias
        )


@pytest.mark.parametrize("base", ["gpt", "llama"])
def test_a_norm_with_constant_statistics_is_named(base: str) -> None:
    model = tiny(BASES[base])
    model.norm = ConstantStatistics(model.norm)
    found = differences(base, model)
    assert [(each.name, each.a, each.b) for each in found] == [
        ("norm-gradient", "differentiated", "constant")
    ]


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


def test_a_wrong_backward_is_placed() -> None:
    model = tiny(BASES["gpt"])
    model.head.register_forward_pre_hook(lambda module, args: (args[0] + (args[0] - args[0].detach()),))
    found = differences("gpt", model)
    assert [each.name for each in found] == ["gradient-scale"]
    assert found[0].b == 2.0


class AsData(nn.Embedding):
    """A table that no gradient reaches."""

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight.data)


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("is_of_a", [True, False])
@pytest.mark.parametrize("base", ["gpt", "bert"])
def test_a_table_that_is_read_as_data_is_a_cut_gradient(base: str, is_of_a: bool, is_given: bool) -> None:
    plain, other = tiny(BASES[base]), tiny(BASES[base], seed=0 if is_given else 1)
    other.pos.__class__ = AsData
    pair = (other, plain) if is_of_a else (plain, other)
    diff = normscope.diff(*pair, batch=batch(BASES[base]), parts="function", reraise=True)
    (found,) = [each for each in diff.of(Part.FUNCTION) if "weights" not in each.name]
    assert found.name == "gradient-cut"
    assert (found.a, found.b) == (("cut", "flows") if is_of_a else ("flows", "cut"))
    assert found.sites == (("pos", "pos"),)


@pytest.mark.parametrize("base", ["gpt", "bert"])
def test_a_frozen_table_that_is_read_as_data_is_no_difference(base: str) -> None:
    other = tiny(BASES[base])
    other.pos.__class__ = AsData
    other.pos.weight.requires_grad_(False)
    assert differences(base, other) == []
