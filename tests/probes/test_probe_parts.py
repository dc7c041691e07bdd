"""Tests of parts that probes share: roles, norms, terms with a factor inside the add, visible keys."""

import dataclasses

import pytest
import torch
from hand_read import ADD, norm_of

import normscope
from normscope.anatomy import Branch, Fused, Site
from normscope.probes.added import added
from normscope.probes.attention import visible
from normscope.probes.norms import factor, guarded, normalised
from normscope.probes.parameters import Parameters
from normscope.probes.roles import reached


def test_an_operand_behind_a_norm_is_reached() -> None:
    """A constant cotangent would be erased by the norm: centred features sum to zero."""
    output = torch.tensor([[1.0, 2.0, 3.0, 6.0, 5.0]], requires_grad=True)
    centred = output[:, :4] - output[:, :4].mean(-1, keepdim=True)
    assert reached(centred, output).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", "l2norm"])
def test_what_a_norm_makes_has_mean_square_one(kind: str) -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    norm = norm_of("n", kind, eps=None)
    torch.testing.assert_close(normalised(norm, x).square().mean(-1), torch.ones(5).double())
    expected = {
        "layernorm": ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1),
        "rmsnorm": (x**2).mean(-1),
        "l2norm": (x**2).sum(-1),
    }
    torch.testing.assert_close(guarded(norm, x), expected[kind])


def test_the_factor_of_a_norm_has_its_offset() -> None:
    norm = dataclasses.replace(norm_of("n"), weight_offset=1.0)
    assert factor(norm, {"n.weight": torch.tensor([0.5, -1.0])}).tolist() == [1.5, 0.0]


@pytest.mark.parametrize(("how", "expected"), [("times", 0.5), ("over", 8.0), ("rest", 1.5)])
def test_a_factor_inside_the_add(how: str, expected: float) -> None:
    term, weight, total = Site("", 0, ADD, 0, -2), Site("", 0, ADD, 1), Site("", 0, ADD, 0)
    branch = Branch("other", "none", "none", "f", 0, "gate", None, None, None, total, term, total)
    branch = dataclasses.replace(branch, fused=(Fused(weight, how),))
    found = added(branch, {term: torch.tensor([2.0]), weight: torch.tensor([0.25])})
    assert found.tolist() == [expected]


def test_keys_of_a_cache_are_behind_no_query() -> None:
    """Two queries after two cached keys: the first sees three keys, one of them at probability 0."""
    probabilities = torch.tensor([[[0.5, 0.5, 0.0, 0.0], [0.2, 0.3, 0.0, 0.5]]])
    seen = visible(torch.zeros_like(probabilities), probabilities, False)
    assert seen.tolist() == [[[True, True, True, False], [True, True, True, True]]]


def test_a_mask_that_is_in_the_logits_is_read_there() -> None:
    logits = torch.tensor([[[0.0, -torch.inf], [-1e4, 3.0]]])
    seen = visible(logits, torch.zeros(1, 2, 2), True)
    assert seen.tolist() == [[[True, False], [False, True]]]


def test_the_parameters_of_a_block_are_in_the_order_of_the_model() -> None:
    """And those of block 10 are not counted to block 1."""
    subject = normscope.load("nn:decoder,scheme=pre,depth=11,width=8,heads=2")
    anatomy = normscope.read_anatomy(subject)
    found = Parameters(subject.model, anatomy)
    for block in anatomy.blocks:
        own = [p for name, p in subject.model.named_parameters() if name.startswith(f"{block.path}.")]
        assert list(map(id, found.of_block(block))) == list(map(id, own)) != []
