"""Padded batches: equal models are the same, another mask and positions by the mask are named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import BASES, tiny
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

import normscope
from normscope.compare.formulas import hide
from normscope.compare.reasons.scene import real_rows
from normscope.compare.types import Difference, Part
from normscope.subjects import make_subject

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
NONE = {"vocab_size": 96, "bos_token_id": None, "eos_token_id": None}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **NONE}
BERT = {**SIZES, **NONE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OPT = {**SIZES, **NONE, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}
KINDS: dict[str, dict[str, Any]] = {"gpt2": GPT2, "llama": {**SIZES, **NONE}, "bert": BERT, "opt": OPT}


def published(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **KINDS[kind])
    config._attn_implementation = "eager"
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    return auto.from_config(config).eval()


class With(nn.Module):
    """A model with another way to use the mask."""

    def __init__(self, inner: nn.Module, use: Callable[[Tensor], dict[str, Tensor]]) -> None:
        super().__init__()
        self.inner, self.use = inner, use

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=input_ids, **self.use(attention_mask)).logits
        return logits


def padded(left: bool) -> dict[str, Tensor]:
    ids = torch.randint(3, 96, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for n, length in enumerate((0, 2, 5, 3)):
        mask[n, : length if left else 0] = 0
        mask[n, 12 if left else 12 - length :] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}


def found(kind: str, left: bool, use: Callable[[Tensor], dict[str, Tensor]]) -> tuple[Difference, ...]:
    sides = (make_subject(each, padded(left)) for each in (published(kind), With(published(kind), use)))
    return normscope.diff(*sides, parts="function", reraise=True).of(Part.FUNCTION)


def by_mask(mask: Tensor) -> dict[str, Tensor]:
    return {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", [True, False])
def test_equal_models_are_the_same_on_padded_batches(kind: str, left: bool) -> None:
    assert found(kind, left, lambda mask: {"attention_mask": mask}) == ()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_a_mask_that_is_not_passed_on_is_named(kind: str) -> None:
    (each,) = found(kind, True, lambda mask: {})
    assert each.name == "padding-mask"
    assert each.confirmed


def test_what_a_causal_model_reads_of_padding_on_the_right_is_no_difference() -> None:
    assert found("llama", False, lambda mask: {}) == ()


def test_a_mask_of_the_wrong_side_is_named() -> None:
    (each,) = found("bert", True, lambda mask: {"attention_mask": mask.flip(1)})
    assert each.name == "padding-mask"
    assert "but not the same ones" in each.message


def test_positions_that_are_counted_from_the_mask_are_named() -> None:
    (each,) = found("gpt2", True, by_mask)
    assert each.name == "position-offset"
    assert each.confirmed
    assert "between -5 and +0, by the sequence" in each.message


def test_rotary_positions_are_relative_on_padding_too() -> None:
    assert found("llama", True, by_mask) == ()


def test_positions_and_mask_of_opt_are_told_apart() -> None:
    names = [each.name for each in found("opt", True, lambda mask: {})]
    assert names == ["position-offset", "padding-mask"]


class Own(nn.Module):
    """A model written by hand whose attention has an additive mask of padding."""

    def __init__(self, masked: bool = True, hidden: float = -1e9, causal: bool = False, **changes: Any):
        super().__init__()
        self.inner, self.masked, self.hidden, self.causal = (
            tiny(BASES["bert"], changes),
            masked,
            hidden,
            causal,
        )
        for block in self.inner.blocks:
            block.attn.attend = self.attend

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.transpose(-1, -2) * 8**-0.5
        if self.masked:
            logits = logits.masked_fill(self.mask[:, None, None] == 0, self.hidden)
        if self.causal:
            logits = logits.masked_fill(torch.ones(12, 12).triu(1) > 0, self.hidden)
        return logits.softmax(-1).nan_to_num(0.0) @ v

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.mask = attention_mask
        return self.inner(ids % 64)


@pytest.mark.parametrize("left", [True, False])
def test_own_models_are_compared_on_padded_batches(left: bool) -> None:
    batch = padded(left)
    inputs = {"ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}

    def names(a: nn.Module, b: nn.Module) -> list[str]:
        sides = (make_subject(each, inputs) for each in (a, b))
        return [e.name for e in normscope.diff(*sides, parts="function", reraise=True).of(Part.FUNCTION)]

    assert names(Own(), Own()) == []
    assert names(Own(), Own(masked=False)) == ["padding-mask"]
    assert names(Own(), Own(masked=False, activation="relu")) == ["padding-mask", "activation"]


def test_what_queries_of_padding_see_is_no_difference() -> None:
    """Queries that see no key, of which one side mixes nothing and the other one all values."""
    inputs = {"ids": padded(True)["input_ids"], "attention_mask": padded(True)["attention_mask"]}
    a, b = Own(causal=True, hidden=-torch.inf), Own(causal=True, activation="relu")
    found = normscope.diff(*(make_subject(each, inputs) for each in (a, b)), parts="function", reraise=True)
    assert [each.name for each in found.of(Part.FUNCTION)] == ["activation"]


REAL = torch.tensor([[True, True, False], [False, True, True]])


def test_rows_of_padding_are_left_out_in_every_layout() -> None:
    by_token = torch.randn(2, 3, 5)
    by_head = torch.randn(2, 4, 3, 5)
    rows = [(b, t) for b in range(2) for t in range(3) if REAL[b, t]]
    tokens = torch.stack([by_token[b, t] for b, t in rows])
    assert torch.equal(real_rows(by_token, REAL), tokens)
    assert torch.equal(real_rows(by_token.flatten(0, 1), REAL), tokens)
    assert torch.equal(real_rows(by_head, REAL), torch.stack([by_head[b, :, t] for b, t in rows]))
    for other in (torch.randn(3, 5), torch.randn(2, 4, 6, 5)):
        assert real_rows(other, REAL) is other
    assert real_rows(by_token, None) is by_token


def test_a_query_that_sees_no_key_mixes_all_values_alike() -> None:
    visible = torch.ones(4, 4, dtype=torch.bool).tril()
    visible[0] = False
    weights = hide(torch.randn(1, 2, 4, 4, dtype=torch.float64), visible=visible).softmax(-1)
    assert torch.equal(weights[:, :, 0], torch.full((1, 2, 4), 0.25, dtype=torch.float64))
    assert not weights[..., 1:, :][..., ~visible[1:]].any()
