"""Tests of the reading of every model type in `hf_models` against its source."""

import pytest
from hf_models import MODELS, HFModel
from readings import lines_of

from normscope.anatomy import read_anatomy


@pytest.mark.parametrize("entry", MODELS, ids=[entry.name for entry in MODELS])
@pytest.mark.filterwarnings("ignore")  # deprecations inside transformers
def test_reads_what_the_source_says(entry: HFModel) -> None:
    model, batch = entry.build()

    anatomy = read_anatomy(model, batch)

    read, expected = lines_of(anatomy), [stack.lines() for stack in entry.stacks]
    if expected and entry.one_stream:
        assert read == expected, anatomy.unread
    elif expected:
        assert [line for stack in read for line in stack[:-1]] == expected[0][:-1], anatomy.unread
    if entry.unread is not None:
        assert bool(anatomy.unread) == entry.unread, anatomy.unread
    if entry.scheme is not None:
        assert {branch.scheme for branch in anatomy.branches} == {entry.scheme}


def test_the_table_is_long_enough_and_its_names_are_unique() -> None:
    assert len({entry.name for entry in MODELS}) == len(MODELS)
    assert len({entry.model_type for entry in MODELS}) >= 100
