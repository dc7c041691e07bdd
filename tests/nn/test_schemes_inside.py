"""Changes of schemes inside branches and by depth: QK-norms, inner norms, σReparam, nGPT's sphere, scales."""

import copy
import itertools
import math
from typing import Any

import dense
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn import Attention, Block, Inside, ModelConfig, Slot, Where, build, scheme_named
from normscope.nn.linear import SigmaLinear
from normscope.nn.schemes.by_block import num_post
from normscope.nn.schemes.scaled import tau
from normscope.train.recipe import Recipe
from normscope.train.trial import Trial

SMALL: dict[str, Any] = {"depth": 3, "width": 16, "heads": 2, "vocab": 11, "context": 32}


def _shaken(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module.double()


INSIDES = [
    Inside(qk_norm="head"),
    Inside(qk_norm="full"),
    Inside(qk_norm="cosine"),
    Inside(qk_norm="unit"),
    Inside(qk_norm="head", v_norm=True),
    Inside(before_o=True),
    Inside(head_gain=True),
    Inside(attention_gate="head"),
    Inside(attention_gate="element"),
    Inside(linear="sigma"),
]


@pytest.mark.parametrize("inside", INSIDES, ids=lambda inside: str(inside)[7:40])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_with_insides_against_loops(inside: Inside, causal: bool) -> None:
    attention = _shaken(Attention(12, 3, causal=causal, inside=inside)).eval()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(
        attention(x), dense.attention(attention, x, causal=causal), rtol=1e-9, atol=1e-9
    )


def test_a_gate_of_each_feature_is_not_one_of_each_head() -> None:
    head, element = (
        Attention(12, 3, causal=True, inside=Inside(attention_gate=gate)).output_gate
        for gate in ("head", "element")
    )
    assert (head.out_features, element.out_features) == (3, 12)


# Value residual


def _with_value_residual(kind: Any, **options: Any) -> Any:
    config = {"value_residual": kind, **SMALL, **options}
    return _shaken(build("decoder", scheme="pre", **config)).eval()


@pytest.mark.parametrize("kind", ["half", "learnt"])
def test_values_of_block_1_are_part_of_later_ones(kind: Any) -> None:
    """ResFormer's loops: v of block l ≥ 2 is ½v + ½v₁, or (1 − λ)v + λv₁."""
    model = _with_value_residual(kind)
    ids = torch.randint(11, (1, 4))
    x = model.embedding(ids, torch.arange(4)[None])
    first = None
    for block in model.blocks:
        residuals, branch = (block.attention_residual, block.feed_forward_residual), block.attention
        normed = dense.norm(residuals[0].norms["branch_in"], x)
        x = x + dense.attention(branch, normed, first=first)
        if first is None:
            first = dense.linear(branch.v, normed).unflatten(-1, (branch.heads, -1))
        x = x + dense.feed_forward(block.feed_forward, dense.norm(residuals[1].norms["branch_in"], x))
    logits = model.head(dense.norm(model.final_norm, x))
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-9, atol=1e-9)


def test_a_learnt_value_residual_starts_at_one_half_in_later_blocks() -> None:
    half, learnt = (build("decoder", value_residual=kind, **SMALL) for kind in ("half", "learnt"))
    mixes = [block.attention.value_mix for block in learnt.blocks]
    assert mixes[0] is None
    assert all(torch.equal(mix, torch.tensor([0.5])) for mix in mixes[1:])
    learnt.load_state_dict(half.state_dict(), strict=False)
    ids = torch.randint(11, (2, 5))
    assert torch.equal(learnt(ids).logits, half(ids).logits)


def test_cross_attention_has_no_value_residual() -> None:
    model = build("encoder-decoder", value_residual="learnt", **SMALL)
    mixes = {m.cross: 0 for m in model.modules() if isinstance(m, Attention)}
    for module in model.modules():
        if isinstance(module, Attention):
            mixes[module.cross] += module.value_mix is not None
    assert mixes[True] == 0
    assert mixes[False] == 2 * (model.config.depth - 1)


@pytest.mark.parametrize("options", [{"value_residual": "learnt"}, {"attention_gate": "head"}])
@pytest.mark.parametrize("model_kind", ["decoder", "encoder-decoder"])
def test_options_of_attention_train_under_checkpointing_as_without(
    model_kind: str, options: dict[str, Any]
) -> None:
    ids, labels = torch.randint(11, (2, 5)), torch.randint(11, (2, 5))
    found = []
    for checkpoint in (False, True):
        torch.manual_seed(1)
        model = build(model_kind, **SMALL, **options, checkpoint=checkpoint).double().train()
        loss = model(ids, labels).loss
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(plain, again, rtol=1e-12, atol=1e-14)


def test_a_temperature_is_at_most_100() -> None:
    attention = Attention(8, 2, causal=False, inside=Inside(qk_norm="cosine")).double()
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    warm = attention(x)
    nn.init.constant_(attention.logit_scale.log_temperature, math.log(100))
    at_most = attention(x)
    nn.init.constant_(attention.logit_scale.log_temperature, math.log(1e4))
    assert torch.equal(attention(x), at_most)
    assert not torch.allclose(warm, at_most)


@pytest.mark.parametrize("kind", ["cosine", "unit"])
def test_unit_queries_do_not_see_the_size_of_their_map(kind: Any) -> None:
    attention = Attention(8, 2, causal=False, bias=False, inside=Inside(qk_norm=kind)).double()
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    before = attention(x)
    with torch.no_grad():
        attention.q.weight.mul_(7)
        attention.k.weight.mul_(0.1)
    torch.testing.assert_close(attention(x), before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["head", "cosine", "unit"])
def test_shared_keys_are_repeated_keys(kind: Any) -> None:
    """Grouped heads equal ungrouped ones whose key maps and gains are repeated."""
    inside = Inside(qk_norm=kind)
    grouped = _shaken(Attention(12, 4, kv_heads=2, causal=True, inside=inside))
    whole = Attention(12, 4, causal=True, inside=inside).double()
    state = dict(grouped.state_dict())
    for name in ("k.weight", "k.bias", "v.weight", "v.bias"):
        state[name] = state[name].unflatten(0, (2, 3)).repeat_interleave(2, dim=0).flatten(0, 1)
    if kind == "unit":
        state["logit_scale.gain.weight"] = state["logit_scale.gain.weight"].repeat_interleave(2, dim=0)
    whole.load_state_dict(state)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(grouped(x), whole(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scheme", ["ngpt", "swin-v2", "olmo2", "hybridnorm", "sub-ln", "normformer"])
@pytest.mark.parametrize("positions", ["learnt", "rotary"])
def test_token_by_token_is_all_at_once(scheme: str, positions: str) -> None:
    _assert_written_as_read(_shaken(build("decoder", scheme=scheme, positions=positions, **SMALL)).eval())


@pytest.mark.parametrize("options", [{"value_residual": "half"}, {"attention_gate": "element"}])
def test_options_of_attention_are_the_same_token_by_token(options: dict[str, Any]) -> None:
    _assert_written_as_read(_shaken(build("decoder", **SMALL, **options)).eval())


def _assert_written_as_read(model: Any) -> None:
    prompt = torch.randint(11, (2, 4))
    written = model.generate(prompt, 3, temperature=0)
    for length in range(4, 7):
        likeliest = model(written[:, :length]).logits[:, -1].argmax(-1)
        assert torch.equal(likeliest, written[:, length])


def test_only_self_attention_of_sub_ln_has_the_inner_norm() -> None:
    block = Block(ModelConfig(scheme="sub-ln", width=16), Where(1, depth=4), causal=True, cross=True)
    assert isinstance(block.attention.inner_norm, nn.LayerNorm)
    assert block.cross is not None
    assert not isinstance(block.cross.inner_norm, nn.LayerNorm)


def test_normformer_norms_what_attention_says_and_what_the_feed_forward_hides() -> None:
    block = build("decoder", scheme="normformer", **SMALL).blocks[0]
    assert isinstance(block.attention_residual.norms["branch_out"], nn.LayerNorm)
    assert not isinstance(block.feed_forward_residual.norms["branch_out"], nn.LayerNorm)
    assert block.feed_forward.inner_norm.weight.shape == (64,)
    assert torch.equal(block.attention.head_gain, torch.ones(2, 1, 1))


# σReparam


def _sigma(weight: Tensor) -> float:
    return float(torch.linalg.matrix_norm(weight.detach().double(), ord=2))


def _effective(linear: SigmaLinear) -> Tensor:
    """Ŵ, read off by feeding unit vectors."""
    with torch.no_grad():
        eye = torch.eye(linear.in_features, dtype=linear.weight.dtype)
        return (linear(eye) - (0 if linear.bias is None else linear.bias)).mT


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16)])
def test_sigma_is_exact_from_the_start(shape: tuple[int, int]) -> None:
    linear = SigmaLinear(*shape).double()
    nn.init.constant_(linear.gain, 1.7)
    linear.settle()
    assert _sigma(_effective(linear)) == pytest.approx(1.7, rel=1e-9)
    torch.testing.assert_close(
        _effective(linear) * _sigma(linear.weight) / 1.7, linear.weight.detach(), rtol=1e-9, atol=1e-9
    )


def test_a_model_starts_with_sigma_one() -> None:
    model = build("decoder", scheme="sigma-reparam", **SMALL)
    found = [m for m in model.modules() if isinstance(m, SigmaLinear)]
    assert len(found) == 3 * 6
    for linear in found:
        assert _sigma(_effective(linear)) == pytest.approx(1, rel=1e-4)


def test_sigma_follows_the_weights_in_training_and_rests_in_eval() -> None:
    linear = SigmaLinear(10, 14).double()
    with torch.no_grad():
        linear.weight.add_(0.05 * torch.randn_like(linear.weight))
    stale = abs(_sigma(_effective(linear.eval())) - 1)
    kept = linear.u.clone()
    x = torch.randn(3, 10, dtype=torch.float64)
    linear(x)
    assert torch.equal(linear.u, kept)
    linear.train()
    for _ in range(60):
        linear(x)
    assert not torch.equal(linear.u, kept)
    fresh = abs(_sigma(_effective(linear.eval())) - 1)
    assert fresh < 1e-6 < stale


def test_sigmas_gradient_is_that_of_the_division() -> None:
    """d/dW of (γ/σ)Wx with dσ/dW = u vᵀ."""
    linear = SigmaLinear(5, 4, bias=False).double().eval()
    linear.settle()
    x, up = torch.randn(5, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    (linear(x) @ up).backward()
    u, s, vt = torch.linalg.svd(linear.weight.detach())
    direct = torch.outer(up, x) / s[0]
    through = -(up @ linear.weight.detach() @ x) / s[0] ** 2 * torch.outer(u[:, 0], vt[0])
    torch.testing.assert_close(linear.weight.grad, direct + through, rtol=1e-9, atol=1e-9)
    assert linear.weight.grad is not None
    # The size of W does not matter: no gradient along W.
    assert (linear.weight.grad * linear.weight).sum().item() == pytest.approx(0, abs=1e-9)


def test_two_forwards_before_one_backward_with_sigma_reparam() -> None:
    linear = SigmaLinear(5, 4).double()
    linear.settle()
    one, other = torch.randn(2, 3, 5, dtype=torch.float64)
    (linear(one).square().sum() + linear(other).square().sum()).backward()
    together, linear.weight.grad = linear.weight.grad, None
    for x in (one, other):
        linear(x).square().sum().backward()
    torch.testing.assert_close(together, linear.weight.grad, rtol=1e-9, atol=1e-9)


def test_norms_can_be_left_out_with_sigma_reparam() -> None:
    model = build("encoder", scheme="sigma-reparam", norm="none", **SMALL)
    assert not any(isinstance(m, nn.LayerNorm) for m in model.modules())
    ids = torch.randint(11, (2, 5))
    assert model(ids, ids).loss.isfinite()


# nGPT


def _rows(model: nn.Module) -> dict[str, Tensor]:
    """Every vector along the width: rows of what reads the stream, columns of what writes to it."""
    held = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("o.weight", "down.weight")):
            held[name] = parameter.mT
        elif name.endswith(("tokens.weight", "head.weight")) or (
            name.startswith("blocks") and parameter.dim() == 2
        ):
            held[name] = parameter
    return held


def _on_sphere(model: nn.Module) -> bool:
    return all(torch.allclose(rows.norm(dim=-1), torch.ones(())) for rows in _rows(model).values())


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_ngpt_starts_on_the_sphere_and_a_trial_keeps_it_there(activation: str) -> None:
    model = build("decoder", scheme="ngpt", activation=activation, **SMALL)
    assert len(_rows(model)) == 2 + 3 * (7 if activation == "swiglu" else 6)
    assert _on_sphere(model)
    ids = torch.randint(11, (4, 9))
    config = Recipe(lr=1e-2)
    trial = Trial(model, itertools.repeat(ids), lambda m, b: m(b, b).loss, config)
    losses = [trial.advance() for _ in range(8)]
    assert losses[-1] < losses[0]
    assert _on_sphere(model)
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert not _on_sphere(model)
    model.after_step()
    assert _on_sphere(model)


@pytest.mark.parametrize("kind", ["encoder-decoder", "vision"])
def test_other_models_keep_to_the_sphere_too(kind: str) -> None:
    model = build(kind, scheme="ngpt", depth=2, width=16)
    weight = next(m for m in model.modules() if isinstance(m, Attention)).q.weight
    nn.init.normal_(weight)
    model.after_step()
    torch.testing.assert_close(weight.norm(dim=-1), torch.ones(16))


def test_after_a_step_other_schemes_stay_as_they_are() -> None:
    model = build("decoder", scheme="pre", **SMALL)
    before = copy.deepcopy(model.state_dict())
    model.after_step()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def _unit(x: Tensor) -> Tensor:
    return x / (x * x).sum(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_ngpt_from_ids_to_logits(activation: str) -> None:
    """The paper's equations with the effective gains, in the order of the authors' code."""
    model = _shaken(build("decoder", scheme="ngpt", activation=activation, **SMALL)).eval()
    ids = torch.randint(11, (1, 4))
    root = math.sqrt(16)
    h = _unit(model.embedding(ids, torch.arange(4)[None]))
    for block in model.blocks:
        for branch, residual in (
            (lambda x, block=block: dense.attention(block.attention, x), block.attention_residual),
            (lambda x, block=block: _gained(block.feed_forward, x, activation), block.feed_forward_residual),
        ):
            alpha = (residual.join.alpha.weight * 0.05 * root).abs()
            h = _unit(h + alpha * (_unit(branch(h)) - h))
    logits = root * model.head.gain.weight * (h @ model.head.weight.mT)
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-9, atol=1e-9)


def _gained(feed: nn.Module, x: Tensor, activation: str) -> Tensor:
    up = (x @ feed.up.weight.mT + feed.up.bias) * feed.gains[0].weight * 4
    if activation == "swiglu":
        gate = (x @ feed.gate.weight.mT + feed.gate.bias) * feed.gains[1].weight * 4
        hidden = up * gate / (1 + (-gate).exp())
    else:
        hidden = F.gelu(up)
    return hidden @ feed.down.weight.mT + feed.down.bias


def test_ngpts_gains_start_at_their_values() -> None:
    model = build("decoder", scheme="ngpt", **SMALL)
    attention, residual = model.blocks[0].attention, model.blocks[0].attention_residual
    torch.testing.assert_close(residual.join.alpha(), torch.full((16,), 0.05))
    torch.testing.assert_close(attention.logit_scale.gain(), torch.ones(2, 1, 8))
    torch.testing.assert_close(model.head.gain(), torch.ones(11))
    for gain in (residual.join.alpha, attention.logit_scale.gain, model.head.gain):
        torch.testing.assert_close(gain.weight.mean().detach(), torch.tensor(0.25))


# Scales by depth


def test_mix_lns_quarter() -> None:
    assert [num_post(depth) for depth in (1, 2, 3, 4, 7, 8, 12, 24)] == [1, 1, 1, 1, 1, 2, 3, 6]
    slots = [
        Slot.STREAM in scheme_named("mix-ln").placement_at(Where(block, depth=12)) for block in range(1, 13)
    ]
    assert slots == [True] * 3 + [False] * 9


def test_keels_first_block_is_pre() -> None:
    scheme = scheme_named("keel")
    first, second = (scheme.placement_at(Where(block, depth=5)) for block in (1, 2))
    assert Slot.STREAM not in first
    assert {Slot.STREAM, Slot.BRANCH_IN} <= second.slots
    assert [scheme.join.stream_scale(Where(block, depth=5)) for block in (1, 2, 5)] == [1, 10, 10]


def test_the_share_of_a_stream_in_unit_scaling() -> None:
    """Embedding, attentions and feed-forwards each have a third of the final variance of 1."""
    depth = 6
    shares = [1.0]
    for block in range(1, depth + 1):
        for index in range(2):
            t = tau(Where(block, depth, index=index))
            shares = [share / (1 + t * t) for share in shares] + [t * t / (1 + t * t)]
    assert shares[0] == pytest.approx(1 / 3)
    assert sum(shares[1::2]) == pytest.approx(1 / 3)
    assert sum(shares[2::2]) == pytest.approx(1 / 3)
    assert max(shares[1:]) == pytest.approx(min(shares[1:]))


def _stream_variances(scheme: str, **options: Any) -> list[float]:
    """Mean square of the stream after each block."""
    model = build("encoder", scheme=scheme, width=64, heads=2, vocab=500, **options).eval()
    found: list[float] = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, args, out: found.append(float(out.square().mean())))
    with torch.no_grad():
        model(torch.randint(500, (2, 32)))
    return found


def test_dslm_keeps_the_variance_of_the_stream() -> None:
    """λ² + β² = 1 and branches of unit variance. Tokens here are less alike than words, which costs a little;
    without λ the variance would be over 16."""
    found = _stream_variances("dslm", depth=16, activation="relu")
    assert all(0.5 < value < 1.5 for value in found)


def test_unit_scaling_keeps_the_variance_at_one_or_below() -> None:
    found = _stream_variances("unit-scaling", depth=16)
    assert found[-1] < found[0] < 2.1


def test_layernorm_scaling_grows_by_a_logarithm_where_pre_grows_by_the_depth() -> None:
    def growth(scheme: str) -> float:
        late = early = 0.0
        for seed in range(4):
            torch.manual_seed(seed)
            found = _stream_variances(scheme, depth=16, init="xavier")
            late, early = late + found[-1] - found[3], early + found[3] - found[0]
        return late / early

    # Linear: 12/3. Logarithmic: ln(16/4)/ln 4. Both are more where tokens become alike.
    assert growth("pre") > 4
    assert growth("layernorm-scaling") < 2.5


@pytest.mark.parametrize("name", ["mix-ln", "keel", "dslm", "unit-scaling", "depth-mup"])
def test_a_block_on_its_own_says_that_it_needs_the_depth(name: str) -> None:
    with pytest.raises(UsageError, match=f'scheme "{name}" without depth'):
        Block(ModelConfig(scheme=name, width=16), Where(2), causal=True)
