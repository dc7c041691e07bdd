"""Pairs of one model in two implementations: weights mapped without a map, the same function."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reimplemented
import torch
from torch import nn

import normscope
from normscope.compare import Diff
from normscope.compare.types import Part

OWN = f"{Path(reimplemented.__file__)}:"
_OF_HF = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64,vocab_size=256"
_ROTARY = "depth=2,width=32,heads=4,kv_heads=2,hidden=64,positions=rotary,bias=false,eps=1e-6"
GPT2 = "hf:gpt2,n_layer=2,n_embd=32,n_head=4,vocab_size=256"
LLAMA = f"hf:llama,{_OF_HF},num_key_value_heads=2"
T5 = "hf:t5,d_model=32,num_layers=2,num_heads=4,d_kv=8,d_ff=64,vocab_size=256"
VIT = (
    "hf:vit,hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64,image_size=32,"
    "patch_size=8,num_labels=10"
)
GPT2_OF_OURS = "nn:decoder,scheme=gpt2,depth=2,width=32,heads=4,tie=true,activation=gelu-tanh"
PAIRS = {
    "gpt2": (GPT2, GPT2_OF_OURS),
    "llama": (LLAMA, f"nn:decoder,scheme=pre,norm=rmsnorm,activation=swiglu,{_ROTARY}"),
    "olmo2": (
        f"hf:olmo2,{_OF_HF},num_key_value_heads=2,rms_norm_eps=1e-6",
        f"nn:decoder,scheme=olmo2,activation=swiglu,{_ROTARY}",
    ),
    "gemma2": (f"{OWN}hf_gemma", f"{OWN}gemma"),
    "bert": (f"hf:bert,{_OF_HF}", f"{OWN}bert"),
    "bert with padding": (f"{OWN}hf_bert_padded", f"{OWN}bert_padded"),
    "t5": (T5, f"{OWN}t5"),
    "t5, the other way": (f"{OWN}t5", T5),
    "nanogpt": (GPT2, f"{OWN}nanogpt"),
    "nanogpt to ours": (f"{OWN}nanogpt", GPT2_OF_OURS),
    "vit": (VIT, f"{OWN}vit"),
}


def compared(a: Any, b: Any, **options: Any) -> Diff:
    """The function part alone, on 2 sequences of 16 tokens."""
    return normscope.diff(a, b, parts="function", batch_size=2, seq_len=16, reraise=True, **options)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factories of files run here: a process of their own costs seconds."""
    from normscope.compare import sides

    monkeypatch.setattr(sides, "_is_code", lambda given: False)


@contextlib.contextmanager
def counted_forwards(*kinds: type[nn.Module]) -> Iterator[dict[int, int]]:
    """Forwards of each model of these classes, by the model's id."""
    counts: dict[int, int] = {}

    def count(module: nn.Module, *_: Any) -> None:
        if isinstance(module, kinds):
            counts[id(module)] = counts.get(id(module), 0) + 1

    handle = nn.modules.module.register_module_forward_pre_hook(count)
    try:
        yield counts
    finally:
        handle.remove()


@pytest.mark.parametrize("name", PAIRS)
def test_two_implementations_are_the_same_function(name: str) -> None:
    found = compared(*PAIRS[name])
    (part,) = found.parts
    assert part.how == "whole", part.why
    assert found.of(Part.FUNCTION) == (), found.differences
    assert found.weights is not None
    assert found.weights["only_a"] == found.weights["only_b"] == found.weights["guessed"] == []
    assert part.figures["largest"] < 1e-12
    assert part.figures["largest_gradient"] < 1e-12
    assert part.figures["tolerance"] < 1e-11
    ends = [row for row in part.figures["walk"] if row["name"] == "the output of the model"]
    assert [row["relative"] is not None for row in ends] == [True]


def test_the_rounding_of_two_implementations_is_far_under_the_tolerance() -> None:
    """The tolerance is measured, 64 roundings: pairs use at most a few of them."""
    for name in ("gpt2", "llama", "gemma2"):
        (part,) = compared(*PAIRS[name]).parts
        assert part.figures["largest"] < part.figures["tolerance"] / 8, name


def test_rotary_pairs_in_another_order_are_the_one_difference_of_two_llamas() -> None:
    found = compared(LLAMA, f"{OWN}meta")
    names = [each.name for each in found.of(Part.FUNCTION)]
    assert names == ["rotary-layout"]
    (difference,) = found.of(Part.FUNCTION)
    assert difference.confirmed
    assert difference.sites[0] == ("model.layers.0.self_attn", "layers.0.wo")
    assert len(difference.sites) == 2


def test_x_transformers_scale_of_positions_and_its_norm_without_eps_are_found() -> None:
    ours = (
        "nn:decoder,depth=2,width=32,heads=4,hidden=64,norm=rmsnorm,activation=swiglu,bias=false,context=64"
    )
    found = compared(f"{OWN}x_transformer", ours)
    differences = {each.name: each for each in found.of(Part.FUNCTION)}
    assert set(differences) == {"position-scale", "norm-eps", "final-norm-eps"}
    assert all(each.confirmed for each in differences.values())
    assert [each.name for each in found.of(Part.FUNCTION) if each.is_first] == ["position-scale"]
    assert len(differences["norm-eps"].sites) == 4


PLANTED = {
    "eps": ("eps=1e-4", "norm-eps"),
    "activation": ("activation=relu", "activation"),
    "attention scale": ("attention_scale=0.5", "attention-scale"),
    "logit cap": ("softcap=1.0", "logit-cap"),
    "no bias": ("bias=false", "bias"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found_first_and_confirmed(name: str) -> None:
    option, reason = PLANTED[name]
    key = option.partition("=")[0]
    ours = ",".join(each for each in GPT2_OF_OURS.split(",") if not each.startswith(f"{key}="))
    found = compared(GPT2, f"{ours},{option}")
    first = found.of(Part.FUNCTION)[0]
    assert (first.name, first.is_first, first.confirmed) == (reason, True, True)
    where = "mlp" if name == "activation" else "attn"
    assert first.sites[0][0] == f"transformer.h.0.{where}"


def test_at_most_ten_forwards_of_each_model_with_three_reasons() -> None:
    a, b = reimplemented.NanoGPT(), reimplemented.NanoGPT()
    for block in b.h:
        block.ln_1.eps = 1e-3
        block.mlp[1] = nn.ReLU()
    b.ln_f.eps = 1e-2
    ids = torch.randint(0, 256, (2, 16))
    with counted_forwards(reimplemented.NanoGPT) as counts:
        found = compared(a, b, batch=ids)
    assert {each.name for each in found.differences} == {"norm-eps", "activation", "final-norm-eps"}
    figures = found.parts[0].figures
    copies = [count for model, count in counts.items() if model not in (id(a), id(b))]
    assert sorted(copies) == sorted(figures["forwards"].values())
    assert max(copies) <= 10
