"""Models: each scheme against five lines in float64, masks without leaks, initial weights."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import normscope
from normscope.errors import UsageError
from normscope.nn import (
    SCHEMES,
    Attention,
    Decoder,
    Encoder,
    ModelConfig,
    Residual,
    Slot,
    Where,
    build,
    scheme_named,
)
from normscope.nn.embedding import rotate, rotation
from normscope.nn.output import z_loss

SMALL = {"depth": 3, "width": 16, "heads": 2, "vocab": 11, "context": 32}
names = pytest.mark.parametrize("name", ["deepnorm", "peri", "post", "pre", "pre-no-final", "res-post"])


@names
def test_norms_stand_where_the_placement_says_and_nowhere_else(name: str) -> None:
    model = build("decoder", scheme=name, **SMALL)
    slots = scheme_named(name).placement_at(Where(1, 3)).slots
    for block in model.blocks:
        for norms in (block.attention_residual.norms, block.feed_forward_residual.norms):
            held = {Slot(key) for key, norm in norms.items() if isinstance(norm, nn.LayerNorm)}
            assert held == slots - {Slot.ENTRY, Slot.FINAL}
    assert isinstance(model.entry_norm, nn.LayerNorm) == (Slot.ENTRY in slots)
    assert isinstance(model.final_norm, nn.LayerNorm) == (Slot.FINAL in slots)


def test_the_encoder_sees_later_tokens() -> None:
    model = build("encoder", **SMALL).double().eval()
    ids = torch.randint(11, (1, 9))
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % 11
    assert not torch.equal(model(ids).logits[0, 0], model(other).logits[0, 0])


@pytest.mark.parametrize("causal", [True, False])
def test_attention_against_loops(causal: bool) -> None:
    attention = Attention(6, 3, causal=causal).double()
    x = torch.randn(1, 4, 6, dtype=torch.float64)
    q, k, v = (p(x)[0] for p in (attention.q, attention.k, attention.v))
    rows = []
    for t in range(4):
        seen = t + 1 if causal else 4
        heads = []
        for h in range(3):
            at = slice(2 * h, 2 * h + 2)
            weights = torch.softmax(q[t, at] @ k[:seen, at].T / math.sqrt(2), dim=0)
            heads.append(weights @ v[:seen, at])
        rows.append(attention.o(torch.cat(heads)))
    torch.testing.assert_close(attention(x)[0], torch.stack(rows), rtol=1e-12, atol=1e-12)


def test_rotary_positions_against_complex_numbers() -> None:
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    angles = torch.arange(5.0)[:, None] * 10_000.0 ** (-torch.arange(4.0) / 4)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(5, 4), angles).to(
        torch.complex128
    )
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(
        rotate(x, rotation(torch.arange(5)[None], 8, 10_000.0, x.dtype)), expected, rtol=1e-6, atol=1e-6
    )


@given(st.integers(0, 6), st.integers(0, 6))
@settings(max_examples=20, deadline=None)
def test_rotary_products_depend_on_the_distance_alone(shift: int, distance: int) -> None:
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    turn = rotation(torch.arange(14)[None], 8, 10_000.0, torch.float64)
    q_at, k_at = (rotate(t.expand(1, 1, 14, 8), turn)[0, 0] for t in (q, k))
    torch.testing.assert_close(q_at[distance] @ k_at[0], q_at[distance + shift] @ k_at[shift])


def test_the_loss_counts_labelled_positions_alone() -> None:
    model = build("encoder", **SMALL).double()
    ids, labels = torch.randint(11, (2, 9)), torch.full((2, 9), -100)
    labels[0, 3], labels[1, 7] = 4, 9
    output = model(ids, labels)
    logs = output.logits.log_softmax(-1)
    expected = -(logs[0, 3, 4] + logs[1, 7, 9]) / 2
    torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize("kind", ["encoder", "decoder", "encoder-decoder", "vision"])
def test_z_loss_is_the_mean_of_log_z_squared_in_train_mode_alone(kind: str) -> None:
    vision = kind == "vision"
    options = {"width": 16, "image": 8, "classes": 5} if vision else SMALL
    model = build(kind, z_loss=0.3, **options).double()
    batch = torch.randn(2, 3, 8, 8, dtype=torch.float64) if vision else torch.randint(11, (2, 9))
    labels = torch.tensor([4, 0]) if vision else torch.full((2, 9), -100)
    if not vision:
        labels[0, 3], labels[1, 7] = 4, 9
    output, plain = model.train()(batch, labels), model.eval()(batch, labels)
    log_z = output.logits.exp().sum(-1).log()
    counted = log_z if vision else torch.stack([log_z[0, 3], log_z[1, 7]])
    torch.testing.assert_close(output.loss, plain.loss + 0.3 * (counted**2).mean(), rtol=1e-12, atol=0)


def test_z_loss_pulls_the_logits_to_a_sum_of_one() -> None:
    """Cross-entropy does not see a constant added to all logits; z-loss does, and its gradient leads to 0."""
    logits = torch.full((1, 11), 3.0, dtype=torch.float64, requires_grad=True)
    z_loss(logits, torch.tensor([2])).backward()
    log_z = 3 + math.log(11)
    torch.testing.assert_close(logits.grad, torch.full((1, 11), 2 * log_z / 11, dtype=torch.float64))


def test_z_loss_of_half_precision_is_computed_in_float32() -> None:
    logits = (20 + torch.randn(4, 300)).bfloat16()
    expected = z_loss(logits.double(), torch.zeros(4, dtype=torch.long))
    assert float(z_loss(logits, torch.zeros(4, dtype=torch.long))) == pytest.approx(float(expected), rel=1e-6)


def test_the_feed_forward() -> None:
    block = build("decoder", **SMALL).double().blocks[0]
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    feed = block.feed_forward
    hidden = x @ feed.up.weight.T + feed.up.bias
    expected = (0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))) @ feed.down.weight.T + feed.down.bias
    torch.testing.assert_close(feed(x), expected)


def _std(weight: Tensor) -> float:
    return float(weight.detach().std())


def test_deepnorm_starts_with_its_beta() -> None:
    """Xavier, with β = (8L)^-¼ on v, o and the feed-forward, and not on q and k."""
    model = build("decoder", scheme="deepnorm", depth=8, width=256)
    beta, square = (8 * 8) ** -0.25, math.sqrt(2 / 512)
    attention, feed = model.blocks[3].attention, model.blocks[3].feed_forward
    for projection in (attention.q, attention.k):
        assert _std(projection.weight) == pytest.approx(square, rel=0.02)
    for projection in (attention.v, attention.o):
        assert _std(projection.weight) == pytest.approx(beta * square, rel=0.02)
    for projection in (feed.up, feed.down):
        assert _std(projection.weight) == pytest.approx(beta * math.sqrt(2 / 1280), rel=0.02)
    assert model.blocks[0].attention_residual.join.stream_scale == (2 * 8) ** 0.25


def test_pre_starts_normal_and_post_xavier() -> None:
    pre = build("decoder", scheme="pre", depth=1, width=256).blocks[0].attention.q.weight
    post = build("decoder", scheme="post", depth=1, width=256).blocks[0].attention.q.weight
    assert _std(pre) == pytest.approx(0.02, rel=0.02)
    assert _std(post) == pytest.approx(math.sqrt(2 / 512), rel=0.02)


def test_init_overrides_the_weights_and_keeps_the_gains() -> None:
    attention = build("decoder", scheme="deepnorm", depth=2, width=256, init="normal").blocks[0].attention
    assert _std(attention.q.weight) == pytest.approx(0.02, rel=0.02)
    assert _std(attention.v.weight) == pytest.approx(0.02 * 16**-0.25, rel=0.02)


def test_the_seed_decides_the_weights() -> None:
    def weights() -> Tensor:
        torch.manual_seed(3)
        return build("decoder", **SMALL).blocks[2].feed_forward.up.weight

    assert torch.equal(weights(), weights())


@pytest.mark.parametrize(("scheme", "final"), [("pre", False), ("post", True), ("pre-no-final", True)])
def test_final_norm_can_be_asked_for(scheme: str, final: bool) -> None:
    model = build("decoder", scheme=scheme, final_norm=final, **SMALL)
    assert isinstance(model.final_norm, nn.LayerNorm) == final


def test_rmsnorm_and_dropout() -> None:
    model = build("decoder", norm="rmsnorm", dropout=0.5, bias=False, **SMALL)
    assert isinstance(model.blocks[0].attention_residual.norms["branch_in"], nn.RMSNorm)
    ids = torch.randint(11, (1, 5))
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


@names
def test_gradients_reach_every_parameter(name: str) -> None:
    model = Decoder(ModelConfig(scheme=name, **SMALL))  # type: ignore[arg-type]
    ids = torch.randint(11, (2, 9))
    F.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten()).backward()
    # A bias of all keys shifts every logit of a query alike: softmax does not see it.
    silent = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0}
    assert all(n.endswith("attention.k.bias") for n in silent)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheme": "prenorm"}, ('scheme "prenorm"', 'nearest name is "pre"')),
        ({"heads": 3}, ("heads=3 for width=16", "divide")),
        ({"positions": "rotary", "heads": 16}, ("rotary", "even")),
        ({"positions": "sinusoidal", "width": 15, "heads": 1}, ("sinusoidal", "width=15", "even")),
        ({"norm": "layernrm"}, ("norm 'layernrm'", "layernorm")),
        ({"eps": -1.0}, ("eps -1.0", "from 0")),
        ({"dropout": 1.0}, ("dropout 1.0", "under 1")),
        ({"final_norm": "yes"}, ("final_norm 'yes'", "true or false")),
        ({"vocab": True}, ("vocab True", "whole number")),
    ],
)
def test_bad_options(options: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        build("encoder", **{**SMALL, **options})
    assert isinstance(caught.value, ValueError)
    assert all(word in str(caught.value) for word in words)


def test_ids_without_a_batch() -> None:
    ids = torch.zeros(3, dtype=torch.long)
    decoder, pair = (build(name, **SMALL) for name in ("decoder", "encoder-decoder"))
    for call in (
        lambda: decoder(ids),
        lambda: decoder.generate(ids, 2),
        lambda: pair(ids, decoder_ids=ids[None]),
        lambda: pair.generate(ids[None], 2, decoder_ids=ids),
    ):
        with pytest.raises(UsageError, match=r"shape \(3,\): expected \(B, T\)"):
            call()


def test_too_long_a_sequence() -> None:
    with pytest.raises(UsageError, match=r"33 tokens.*context=32"):
        build("decoder", **SMALL)(torch.zeros(1, 33, dtype=torch.long))
    build("decoder", positions="rotary", **SMALL)(torch.zeros(1, 33, dtype=torch.long))


def test_encoder_and_decoder_differ_in_the_mask_alone() -> None:
    torch.manual_seed(0)
    encoder = Encoder(ModelConfig(**SMALL))  # type: ignore[arg-type]
    decoder = Decoder(ModelConfig(**SMALL))  # type: ignore[arg-type]
    decoder.load_state_dict(encoder.state_dict())
    ids = torch.randint(11, (1, 1))
    torch.testing.assert_close(encoder(ids).logits, decoder(ids).logits)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Where(0, depth=4), "block 0: expected a whole number from 1 to 4"),
        (lambda: Where(5, depth=4), "block 5: expected a whole number from 1 to 4"),
        (lambda: Where(1.5), "block 1.5: expected a whole number"),  # type: ignore[arg-type]
        (lambda: Residual("prenorm", Where(1), 8), 'the nearest name is "pre"'),
        (lambda: Residual("pre", Where(1), 8, norm="layernrm"), 'the nearest name is "layernorm"'),
    ],
)
def test_places_and_residuals_that_cannot_be(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


def test_a_residual_takes_a_scheme_by_its_name() -> None:
    torch.manual_seed(0)
    by_name, by_scheme = (Residual(scheme, Where(1), 8) for scheme in ("peri", SCHEMES["peri"]))
    x = torch.randn(1, 2, 8)
    assert torch.equal(by_name(x, torch.sin), by_scheme(x, torch.sin))


def test_default_heads_divide_the_width() -> None:
    assert ModelConfig(width=200).num_heads == 2
    assert ModelConfig(width=192).num_heads == 3
    assert ModelConfig(width=7).num_heads == 1


def test_nn_is_there_after_import_normscope() -> None:
    assert normscope.nn.build is build
