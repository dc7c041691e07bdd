"""Tensors read by hooks at their taps are those that a capture by ops finds."""

import pytest
import torch

from normscope import load, read_anatomy
from normscope.anatomy import capture, measuring
from normscope.anatomy.taps import find_taps, read_taps

SPECS = (
    "nn:decoder,scheme=peri,depth=3,width=16,heads=2",
    "nn:encoder-decoder,scheme=post,depth=2,width=16,heads=2",
    "hf:albert,vocab_size=64,num_hidden_layers=3,hidden_size=16,embedding_size=16,num_attention_heads=2",
    "hf:gpt2,vocab_size=64,n_layer=2,n_embd=16,n_head=2",
)


@pytest.mark.parametrize("spec", SPECS)
def test_hooks_read_what_a_capture_finds(spec: str) -> None:
    """A shared module, as ALBERT's, is read at the call that is meant."""
    subject = load(spec, batch_size=2, seq_len=8)
    model, anatomy = subject.model, read_anatomy(subject)
    sites = [stack.hidden for stack in anatomy.stacks]
    for block in anatomy.blocks:
        sites += [block.entry, block.exit, *(branch.output for branch in block.branches)]
    with measuring(model):
        _, expected = capture(model, subject.forward, sites)
        taps = find_taps(model, subject.forward, sites)
        _, found = read_taps(model, subject.forward, taps)
    assert set(found) == set(taps)
    assert len(taps) > len(expected) / 2
    for site, tensor in found.items():
        assert torch.equal(tensor.flatten(), expected[site].flatten()), site
