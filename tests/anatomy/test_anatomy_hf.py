"""Tests of the reading of every model type in `hf_models` against its source."""

import pytest
from hf_models import MODELS, HFModel
from readings import lines_of

from normscope.anatomy import read_anatomy
from normscope.subjects import load


@pytest.mark.parametrize("entry", MODELS, ids=[entry.name for entry in MODELS])
@pytest.mark.filterwarnings("ignore")  # deprecations inside transformers
def test_reads_what_the_source_says(entry: HFModel) -> None:
    model, batch = entry.build()

    anatomy = read_anatomy(model, batch)

    if not entry.readable:
        assert anatomy.unread
        return
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
    assert len({entry.model_type for entry in MODELS}) >= 470


@pytest.mark.parametrize(
    ("spec", "norm"),
    [
        ("hf:t5,num_layers=2,d_model=96,d_ff=64,num_heads=4,d_kv=16,vocab_size=300", "rmsnorm"),
        (
            "hf:bart,d_model=32,encoder_layers=1,decoder_layers=2,encoder_attention_heads=2,"
            "decoder_attention_heads=2,encoder_ffn_dim=64,decoder_ffn_dim=64,vocab_size=300",
            "layernorm",
        ),
    ],
)
def test_a_decoder_whose_ids_are_shifted_labels_has_the_norms_of_its_encoder(spec: str, norm: str) -> None:
    """The model writes the labels into a tensor of zeros, which has tokens on its last axis."""
    anatomy = read_anatomy(load(spec, batch_size=3, seq_len=20))
    norms = {branch.norm for block in anatomy.blocks for branch in block.branches}
    assert norms == {norm}
    assert anatomy.final_norm is not None
