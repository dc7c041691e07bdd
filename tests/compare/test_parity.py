"""Pairs of a Hugging Face type and our rebuild of it: weights mapped without a map, the same function."""

import pytest

from normscope.compare.compare import diff
from normscope.compare.types import Part

_OF_HF = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64,vocab_size=256"
_ROTARY = "depth=2,width=32,heads=4,kv_heads=2,hidden=64,positions=rotary,bias=false,eps=1e-6"
PAIRS = {
    "gpt2": (
        "hf:gpt2,n_layer=2,n_embd=32,n_head=4,vocab_size=256",
        "nn:decoder,scheme=gpt2,depth=2,width=32,heads=4,tie=true,activation=gelu-tanh",
    ),
    "llama": (
        f"hf:llama,{_OF_HF},num_key_value_heads=2",
        f"nn:decoder,scheme=pre,norm=rmsnorm,activation=swiglu,{_ROTARY}",
    ),
    "olmo2": (
        f"hf:olmo2,{_OF_HF},num_key_value_heads=2,rms_norm_eps=1e-6",
        f"nn:decoder,scheme=olmo2,activation=swiglu,{_ROTARY}",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_rebuild_is_the_same_function(name: str) -> None:
    found = diff(*PAIRS[name], parts="function", batch_size=2, seq_len=16, reraise=True)
    (part,) = found.parts
    assert part.how == "whole", part.why
    assert found.of(Part.FUNCTION) == (), found.differences
    assert found.weights is not None
    assert found.weights["only_a"] == found.weights["only_b"] == found.weights["guessed"] == []
    assert part.figures["largest"] < 1e-12
    assert part.figures["largest_gradient"] < 1e-12
