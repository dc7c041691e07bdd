"""QK-clip: weights of q and k are scaled after a step, head by head, where a logit was over the limit."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normscope.errors import UsageError
from normscope.nn import Context, build, load_model, save_model
from normscope.nn.attention import Attention
from normscope.nn.language_model import LanguageModel
from normscope.nn.qk_clip import clip_queries_and_keys
from normscope.train.recipe import Recipe
from normscope.train.trial import Trial

SMALL: dict[str, Any] = {"depth": 2, "width": 16, "heads": 4, "vocab": 11, "context": 16}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def logits_by_hand(attention: Attention, x: Tensor, visible: Tensor) -> Tensor:
    """(H,), the largest visible logit of each head, pair by pair."""
    heads, groups, width = (
        attention.heads,
        attention.k.out_features // attention.head_width,
        attention.head_width,
    )
    q, k = (m(x).unflatten(-1, (-1, width)) for m in (attention.q, attention.k))
    largest = torch.zeros(heads, dtype=x.dtype)
    for h in range(heads):
        for b in range(x.shape[0]):
            for t in range(x.shape[1]):
                for s in range(x.shape[1]):
                    if visible[b, t, s]:
                        logit = q[b, t, h] @ k[b, s, h // (heads // groups)] / math.sqrt(width)
                        largest[h] = torch.maximum(largest[h], logit)
    return largest


def large(causal: bool, kv_heads: int) -> Attention:
    """Float64, with logits of about 30 and of different sizes in each head."""
    attention = Attention(16, 4, causal=causal, kv_heads=kv_heads, keeps_largest=True).double()
    with torch.no_grad():
        attention.q.weight.mul_(12)
        attention.k.weight.mul_(6)
        attention.q.weight.unflatten(0, (4, 4)).mul_(torch.tensor([0.1, 1, 2, 0.5])[:, None, None])
    return attention


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_it_is_the_papers_rule(padded: bool, causal: bool, kv_heads: int) -> None:
    """γ_h = min(1, τ/S_h), √γ_h on q and on k; in a group, S is the largest of its heads."""
    attention, x = large(causal, kv_heads), torch.randn(2, 5, 16, dtype=torch.float64)
    real = torch.tensor([[True] * 5, [True, True, True, not padded, not padded]])
    visible = real[:, None, :].expand(2, 5, 5)
    visible = visible & torch.ones(5, 5, dtype=torch.bool).tril() if causal else visible
    before = copy.deepcopy(attention)
    expected = logits_by_hand(attention, x, visible)
    attention(x, Context(mask=real[:, None, None, :] if padded else None))
    torch.testing.assert_close(attention.largest_logit.double(), expected, rtol=1e-6, atol=1e-9)

    clip_queries_and_keys(attention, 20.0)
    sizes = expected.unflatten(0, (kv_heads, -1)).amax(1)
    gamma = (20.0 / sizes).clamp(max=1)
    assert 1 in gamma or kv_heads < 4
    assert (gamma < 1).any()
    for role in ("q", "k"):
        ours, theirs = getattr(attention, role), getattr(before, role)
        factor = gamma.sqrt().repeat_interleave(len(theirs.weight) // kv_heads)
        torch.testing.assert_close(ours.weight, factor[:, None] * theirs.weight, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(ours.bias, factor * theirs.bias, rtol=1e-6, atol=1e-12)
    assert torch.equal(attention.v.weight, before.v.weight)
    assert logits_by_hand(attention, x, visible).max() <= 20.0 * (1 + 1e-6)
    assert not attention.largest_logit.any()


def test_the_largest_logit_is_that_of_all_batches_since_the_last_step() -> None:
    attention = large(True, 4)
    one, other = torch.randn(2, 1, 5, 16, dtype=torch.float64)
    earlier = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    attention(one)
    attention(other)
    expected = torch.maximum(*(logits_by_hand(attention, x, earlier) for x in (one, other)))
    torch.testing.assert_close(attention.largest_logit.double(), expected, rtol=1e-6, atol=0)
    attention.eval()(100 * one)
    torch.testing.assert_close(attention.largest_logit.double(), expected, rtol=1e-6, atol=0)


def _trained(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    model = build("decoder", **{**SMALL, **options}, attention_scale=4.0).double().train()
    batch = (torch.randint(11, (2, 6)), torch.randint(11, (2, 6)))
    config = Recipe(optimizer="sgd", lr=1e-9)
    trial = Trial(model, iter([batch] * 4), lambda model, batch: model(*batch).loss, config)
    for _ in range(4):
        trial.advance()
    model(batch[0])
    return model


def test_training_keeps_the_logits_at_the_limit() -> None:
    free = _trained(init="xavier", qk_clip=1e6)
    largest = max(block.attention.largest_logit.max() for block in free.blocks)
    limit = float(largest) / 3
    clipped = _trained(init="xavier", qk_clip=limit)
    assert max(block.attention.largest_logit.max() for block in clipped.blocks) <= limit * (1 + 1e-5)
    without = _trained(init="xavier")
    assert torch.equal(without.blocks[0].attention.q.weight, free.blocks[0].attention.q.weight)


@pytest.mark.parametrize("kind", ["encoder-decoder", "encoder"])
def test_every_attention_is_watched_and_checkpointing_changes_nothing(kind: str) -> None:
    found = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        model = build(kind, **SMALL, qk_clip=1e-3, checkpoint=checkpoint).train()
        ids, labels = torch.randint(11, (2, 5)), torch.randint(11, (2, 5))
        model(ids, labels).loss.backward()
        watched = [m for m in model.modules() if isinstance(m, Attention)]
        assert all(m.largest_logit is not None and m.largest_logit.all() for m in watched)
        model.after_step()
        found.append(model.state_dict())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name])


def test_files_hold_the_option_and_no_state_of_it(tmp_path: Any) -> None:
    model = build("decoder", **SMALL, qk_clip=50.0)
    assert not [name for name in model.state_dict() if "largest" in name]
    save_model(model, tmp_path / "model.safetensors")
    assert load_model(tmp_path / "model.safetensors").config.qk_clip == 50.0


@pytest.mark.parametrize("options", [{"qk_norm": "head"}, {"scheme": "ngpt"}, {"scheme": "sigma-reparam"}])
def test_it_is_refused_where_the_logits_do_not_hang_on_the_weights(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="qk_clip with"):
        build("decoder", **SMALL, **options, qk_clip=100)
