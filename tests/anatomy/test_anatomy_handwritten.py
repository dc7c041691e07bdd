"""Tests of the reading of every model in `handwritten`."""

import pytest
import torch
from handwritten import CASES
from handwritten_base import Block, Case, pre_tower, token_ids
from readings import lines_of

from normscope.anatomy import read_anatomy

# torch says these of its own modules (jit, nn.Transformer), whatever reads them
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore:enable_nested_tensor"
)


@pytest.mark.parametrize("entry", CASES, ids=[entry.name for entry in CASES])
def test_reads_what_is_written(entry: Case) -> None:
    anatomy = read_anatomy(entry.build(), entry.batch())

    expected = [stack.lines() for stack in entry.stacks]
    assert not expected or lines_of(anatomy) == expected, anatomy.unread
    if entry.unread is not None:
        assert bool(anatomy.unread) == entry.unread, anatomy.unread
    if entry.name.startswith("axes-"):
        final = anatomy.stacks[0].final_norm
        assert final is not None
        assert final.kind == entry.stacks[0].norm
    if entry.scheme is not None:
        assert entry.scheme in {branch.scheme for branch in anatomy.branches}
    if entry.schemes is not None:
        assert {branch.scheme for branch in anatomy.branches} == entry.schemes
    for sites in ([b.site for b in anatomy.branches], [b.site for b in anatomy.blocks]):
        assert len(set(sites)) == len(sites)


@pytest.mark.parametrize(
    "name", ["pre", "shared", "Mixture", "compile-eager", "checkpoint", "encoder-decoder"]
)
def test_two_readings_of_one_model_agree(name: str) -> None:
    entry = next(entry for entry in CASES if entry.name == name)
    model, batch = entry.build(), entry.batch()

    assert read_anatomy(model, batch) == read_anatomy(model, batch)


def test_reading_changes_nothing_in_the_model() -> None:
    model = pre_tower(Block).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = token_ids()
    state = torch.get_rng_state()

    read_anatomy(model, ids)

    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_names_are_unique() -> None:
    assert len({entry.name for entry in CASES}) == len(CASES)
