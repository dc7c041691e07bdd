"""A model that is built again: `load`'s weights at its seed, others at another, without a forward."""

from pathlib import Path

import pytest
import torch

from normscope.nn import build, save_model
from normscope.subjects import load
from normscope.subjects.again import build_again

TINY = "depth=2,width=16,heads=2"
FACTORY = "from torch import nn\n\n\ndef build(width=8):\n    return nn.Sequential(nn.Linear(width, width))\n"


@pytest.mark.parametrize(
    "spec",
    [
        f"nn:decoder,{TINY},vocab=64",
        f"nn:decoder,{TINY},vocab=256,output_bias=unigram",
        f"nn:vision,{TINY}",
        "hf:gpt2,n_layer=1,n_embd=16,n_head=2,vocab_size=64",
        "hf:bert,num_hidden_layers=1,hidden_size=16,num_attention_heads=2,intermediate_size=16,vocab_size=300",
        "FOLDER/model.py:build,width=6",
        "nn:FOLDER/saved",
    ],
)
def test_the_same_weights_at_a_seed_and_others_at_another(spec: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FACTORY)
    save_model(build("decoder", depth=1, width=16, heads=2, vocab=64), tmp_path / "saved")
    spec = spec.replace("FOLDER", str(tmp_path))
    like = load(spec, seed=3, batch_size=1, seq_len=8).model
    same, other = (build_again(spec, like, seed) for seed in (3, 4))
    first, second, third = (dict(model.named_parameters()) for model in (like, same, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], third[name]) for name in first) != ("saved" in spec)
    assert type(same).__name__ == type(like).__name__


def test_dtype_is_that_of_load() -> None:
    spec = f"nn:decoder,{TINY},vocab=64"
    model = build_again(spec, load(spec, seq_len=8).model, 0, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
