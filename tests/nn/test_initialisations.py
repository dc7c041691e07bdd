"""Initial weights: distributions, factors of the schemes, μP, and the output bias."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn import (
    SCHEMES,
    WEIGHTS,
    Block,
    ModelConfig,
    Where,
    build,
    param_groups,
    scheme_named,
    set_output_bias,
)
from normscope.nn.block import sublayer_places
from normscope.nn.initialise import initialise_block
from normscope.nn.models import Model
from normscope.nn.scheme import Initialisation
from normscope.nn.schemes.scaled import depth_mup
from normscope.train import Recipe, build_optimizers

WIDTH = 256
ROLES = ("q", "k", "v", "o", "up", "down")
PLAIN = math.sqrt(2 / (2 * WIDTH))
WIDE = math.sqrt(2 / (5 * WIDTH))


def _stds(model: Model, block: int = 0, prefix: str = "") -> dict[str, float]:
    """Standard deviation of each map of a block."""
    held = model.get_submodule(f"{prefix}blocks.{block}")
    assert isinstance(held, Block)
    maps = {role: getattr(held.attention, role) for role in ROLES[:4]}
    maps |= {role: getattr(held.feed_forward, role) for role in ROLES[4:]}
    return {role: m.weight.detach().std().item() for role, m in maps.items()}


def _close(found: dict[str, float], **expected: float) -> None:
    assert found == {role: pytest.approx(expected[role], rel=0.02) for role in ROLES}


@pytest.mark.parametrize(
    ("init", "square", "tall", "embedding"),
    [
        ("xavier", PLAIN, WIDE, WIDTH**-0.5),
        ("xavier-uniform", PLAIN, WIDE, WIDTH**-0.5),
        ("normal", 0.02, 0.02, 0.02),
        ("small", WIDE, WIDE, WIDTH**-0.5),
        ("mup", 0.02 / 2, 0.02 / 2, 0.02),
    ],
)
def test_what_is_drawn(init: str, square: float, tall: float, embedding: float) -> None:
    model = build("decoder", depth=1, width=WIDTH, init=init, base_width=WIDTH // 4)
    _close(_stds(model), q=square, k=square, v=square, o=square, up=tall, down=tall)
    assert model.embedding.tokens.weight.detach().std().item() == pytest.approx(embedding, rel=0.02)
    assert not model.blocks[0].attention.q.bias.any()


def test_fan_in_gives_units() -> None:
    model = build("decoder", depth=1, width=WIDTH, init="fan-in")
    root = WIDTH**-0.5
    _close(_stds(model), q=root, k=root, v=root, o=root, up=root, down=root / 2)
    assert model.embedding.tokens.weight.detach().std().item() == pytest.approx(1, rel=0.02)
    x = torch.randn(64, WIDTH)
    assert model.blocks[0].attention.v(x).std().item() == pytest.approx(1, rel=0.05)


def test_uniform_weights_are_uniform() -> None:
    weight = build("decoder", depth=1, width=WIDTH, init="xavier-uniform").blocks[0].attention.q.weight
    bound = math.sqrt(6 / (2 * WIDTH))
    assert weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert (weight.detach().abs() < bound / 2).float().mean().item() == pytest.approx(0.5, abs=0.01)


def test_torch_is_what_torch_draws() -> None:
    model = build("decoder", depth=1, width=WIDTH, init="torch")
    up = model.blocks[0].feed_forward.up
    assert up.weight.detach().std().item() == pytest.approx((3 * WIDTH) ** -0.5, rel=0.02)
    assert up.bias.any()


def test_a_tied_head_has_the_embeddings_weights() -> None:
    model = build("decoder", depth=1, width=WIDTH, init="fan-in", tie=True)
    assert model.head.weight is model.embedding.tokens.weight
    assert model.head.weight.detach().std().item() == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("scheme", ["gpt2", "hybridnorm"])
def test_gpt2_scales_what_adds_to_the_stream(scheme: str) -> None:
    model = build("decoder", scheme=scheme, depth=8, width=WIDTH)
    for block in (0, 7):
        _close(_stds(model, block), q=0.02, k=0.02, v=0.02, up=0.02, o=0.02 / 4, down=0.02 / 4)


def test_gpt2_can_be_asked_for_on_any_scheme() -> None:
    model = build("decoder", scheme="deepnorm", depth=8, width=WIDTH, init="gpt2")
    beta = (8 * 8) ** -0.25
    gained = 0.02 * beta
    _close(_stds(model), q=0.02, k=0.02, v=gained, up=gained, o=gained / 4, down=gained / 4)


def test_sub_ln_gains() -> None:
    """One stack √ln 2L; in an encoder-decoder of N and M blocks √(⅓ ln 3M ln 2N) and √ln 3M."""
    gain = math.sqrt(math.log(16))
    found = _stds(build("decoder", scheme="sub-ln", depth=8, width=WIDTH))
    _close(found, q=PLAIN, k=PLAIN, v=gain * PLAIN, o=gain * PLAIN, up=gain * WIDE, down=gain * WIDE)
    model = build("encoder-decoder", scheme="sub-ln", encoder_depth=2, depth=3, width=WIDTH)
    encoder, decoder = math.sqrt(math.log(9) * math.log(4) / 3), math.sqrt(math.log(9))
    assert _stds(model, 0, "encoder.")["v"] == pytest.approx(encoder * PLAIN, rel=0.02)
    assert _stds(model, 0, "decoder.")["v"] == pytest.approx(decoder * PLAIN, rel=0.02)
    cross = model.decoder.blocks[0].cross
    assert cross.v.weight.detach().std().item() == pytest.approx(PLAIN, rel=0.02)


def _relu_of_pair(r: float) -> float:
    """E[relu(a) relu(b)]·2 of unit normals of correlation r, as a mean over angles."""
    angle = torch.arange(0, 2 * math.pi, 2 * math.pi / 20000, dtype=torch.float64)
    a, b = angle.cos(), (angle - math.acos(r)).cos()
    return (2 * 2 * (a.relu() * b.relu()).mean()).item()


def test_dslm_gives_back_what_averaging_takes() -> None:
    depth = 8
    model = build("decoder", scheme="dslm", depth=depth, width=WIDTH)
    root, r = WIDTH**-0.5, 0.221
    for block in range(depth):
        both = r**-0.25 * root
        feed = math.sqrt(math.sqrt(0.5)) * root
        _close(_stds(model, block), q=root, k=root, v=both, o=both, up=feed, down=feed)
        r = (1 - 1 / depth) * r + 1 / depth
        r = (1 - 1 / depth) * r + 1 / depth * _relu_of_pair(r)
    assert model.embedding.tokens.weight.detach().std().item() == pytest.approx(0.5**0.5, rel=0.02)


def test_dslm_at_the_papers_depth() -> None:
    join = scheme_named("dslm").join
    assert join.stream_scale(Where(5, 192)) ** 2 == pytest.approx(0.995, abs=5e-4)
    assert join.branch_scale(Where(5, 192)) ** 2 == pytest.approx(0.005, abs=5e-4)


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - {"sigma-reparam"}))
def test_branches_can_start_as_nothing(name: str) -> None:
    model = build("decoder", scheme=name, depth=2, width=16, vocab=11, init="zero-output")
    x = torch.randn(2, 3, 16)
    for block in model.blocks:
        for branch, _ in block.sublayers().values():
            assert not branch(x).any()
    drawn = model.blocks[1].attention.v.weight.detach().std().item()
    assert drawn > 0


def test_zero_output_keeps_the_rest_of_the_scheme() -> None:
    model = build("decoder", scheme="deepnorm", depth=8, width=WIDTH, init="zero-output")
    found, beta = _stds(model), 64**-0.25
    assert found["q"] == pytest.approx(PLAIN, rel=0.02)
    assert found["v"] == pytest.approx(beta * PLAIN, rel=0.02)
    assert found["up"] == pytest.approx(beta * WIDE, rel=0.02)
    assert found["o"] == found["down"] == 0


def test_zero_output_leaves_no_bias_of_torchs() -> None:
    """With PyTorch's initialisation biases are not zero, so that they must be set to zero."""
    model = build("decoder", depth=1, width=16, vocab=11, init="torch")
    assert model.blocks[0].attention.o.bias.any()
    places = sublayer_places(Where(1, 1), cross=False)
    initialise_block(model.blocks[0].sublayers(), places, Initialisation("torch"), "zero-output")
    assert not model.blocks[0].attention(torch.randn(1, 2, 16)).any()


def test_sigma_reparam_cannot_start_as_nothing() -> None:
    with pytest.raises(UsageError, match=r"σReparam.*σ\(W\) over 0"):
        build("decoder", scheme="sigma-reparam", depth=1, width=16, init="zero-output")


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "rmsnorm-plus-one", "scalenorm", "dyt"])
def test_swin_v2_starts_as_the_identity(norm: str) -> None:
    model = build("encoder", scheme="swin-v2", depth=3, width=16, vocab=11, norm=norm)
    x = torch.randn(2, 5, 16)
    for block in model.blocks:
        assert torch.equal(block(x), x)
    untouched = build("encoder", scheme="pre", depth=1, width=16, vocab=11, norm=norm).final_norm
    assert torch.equal(model.final_norm.weight, untouched.weight)


MUP: dict[str, Any] = {"base_width": 32, "heads": 4, "depth": 2, "vocab": 64, "context": 16}


def _one_step(model: Model, optimizer: str, lr: float) -> float:
    """RMS change of the logits by one step."""
    ids, labels = torch.randint(64, (8, 16)), torch.randint(64, (8, 16))
    optimizers = build_optimizers(model, Recipe(optimizer=optimizer, lr=lr, weight_decay=0.0))
    before = model(ids).logits.detach()
    model(ids, labels).loss.backward()
    for each in optimizers:
        each.step()
    return float((model(ids).logits.detach() - before).square().mean().sqrt())


def _slope(xs: tuple[int, ...], ys: list[float]) -> float:
    x, y = torch.tensor(xs).double().log2(), torch.tensor(ys).double().log2()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize("scheme", ["pre", "post"])
@pytest.mark.parametrize(("init", "low", "high"), [("mup", -0.4, 0.1), ("normal", 0.7, 1.5)])
def test_one_step_moves_the_logits_as_far_at_any_width_in_mup_alone(
    optimizer: str, scheme: str, init: str, low: float, high: float
) -> None:
    widths = (32, 64, 128)

    def change(width: int) -> float:
        torch.manual_seed(0)
        model = build("decoder", scheme=scheme, init=init, width=width, **MUP).double()
        return _one_step(model, optimizer, 3e-3)

    slope = _slope(widths, [change(width) for width in widths])
    assert low < slope < high


@pytest.mark.parametrize("optimizer", ["adam", "muon", "sgd"])
@pytest.mark.parametrize(("scheme", "low", "high"), [("depth-mup", -0.2, 0.2), ("pre", 0.8, 1.4)])
def test_one_step_of_the_blocks_moves_the_logits_as_far_at_any_depth_in_completep_alone(
    optimizer: str, scheme: str, low: float, high: float
) -> None:
    depths = (2, 4, 8)

    def change(depth: int, seed: int) -> float:
        torch.manual_seed(seed)
        options = {**MUP, "depth": depth}
        model = build("decoder", scheme=scheme, init="fan-in", width=32, **options).double()
        for module in (model.embedding, model.head):
            module.requires_grad_(False)
        return _one_step(model, optimizer, 1e-3)

    slope = _slope(depths, [sum(change(depth, seed) for seed in range(3)) for depth in depths])
    assert low < slope < high


def _group_of(groups: list[dict[str, Any]], parameter: nn.Parameter) -> dict[str, Any]:
    (group,) = (g for g in groups if any(p is parameter for p in g["params"]))
    return group


def test_param_groups_are_the_authors() -> None:
    """m_N = 4, m_L = 3, a = 1: hidden matrices at lr/4, ε/12, decay × 4."""
    model = build("decoder", scheme="depth-mup", init="mup", depth=6, width=128, base_width=32, heads=4)
    groups = param_groups(model, 0.1, eps=1e-6, weight_decay=0.01)
    block = model.blocks[0]
    expected = {
        model.embedding.tokens.weight: (0.1, 0.01),
        model.head.weight: (0.1, 0.01),
        model.final_norm.weight: (0.1, 0.0),
        block.feed_forward.down.weight: (0.1 / 4, 0.04),
        block.attention.q.weight: (0.1 / 4, 0.04),
        block.attention.q.bias: (0.1, 0.0),
        block.attention_residual.norms["branch_in"].weight: (0.1, 0.0),
    }
    for parameter, (rate, decay) in expected.items():
        group = _group_of(groups, parameter)
        assert (group["lr"], group["weight_decay"]) == pytest.approx((rate, decay))
        assert group["eps"] == pytest.approx(1e-6 / 12)


@pytest.mark.parametrize(("exponent", "rate", "eps"), [(1.0, 1.0, 1 / 4), (0.5, 0.5, 1 / 2)])
def test_param_groups_by_exponent(
    exponent: float, rate: float, eps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """m_L = 4: the rate × m_L^(a−1), ε × m_L^-a, the branches × m_L^-a."""
    scheme = depth_mup(exponent)
    monkeypatch.setattr("normscope.nn.rates.scheme_named", lambda name: scheme)
    model = build("decoder", scheme="depth-mup", depth=8, width=16, vocab=11)
    groups = param_groups(model, 0.1, eps=1e-6)
    for parameter in (model.blocks[0].attention.q.weight, model.blocks[0].attention.q.bias):
        assert _group_of(groups, parameter)["lr"] == pytest.approx(0.1 * rate)
    assert _group_of(groups, model.head.weight)["lr"] == pytest.approx(0.1)
    assert [group["eps"] for group in groups] == [pytest.approx(1e-6 * eps)] * len(groups)


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder", "vision"])
@pytest.mark.parametrize("name", ["pre", "ngpt", "sigma-reparam", "highway"])
def test_param_groups_hold_every_parameter_once(kind: str, name: str) -> None:
    model = build(kind, scheme=name, depth=2, width=16)
    groups = param_groups(model, 1.0)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    assert {(group["lr"], group["eps"]) for group in groups} == {(1.0, 1e-8)}


def test_param_groups_of_another_model() -> None:
    with pytest.raises(UsageError, match="param_groups of a Linear"):
        param_groups(nn.Linear(2, 2), 1.0)


def test_mup_scales_logits_and_attention() -> None:
    """The logits are W x·32/128 for base width 32 and width 128; the attention's scale is 1/K."""
    model = build("decoder", init="mup", width=128, **MUP)
    assert model.blocks[0].attention.scale == 1 / 32
    x = torch.randn(2, 128)
    torch.testing.assert_close(model.head(x), F.linear(x, model.head.weight) / 4)
    asked = build("decoder", init="mup", width=128, attention_scale=0.3, **MUP)
    assert asked.blocks[0].attention.scale == 0.3


COUNTS = torch.tensor([900.0, 50, 0, 40, 10, 0, 300, 1, 2, 3, 4])


def _entropy() -> float:
    frequency = (COUNTS + 1).double() / (COUNTS + 1).sum()
    return float(-(frequency * frequency.log()).sum())


def _loss_on_text(model: Model) -> float:
    """Loss on a text in which the ids have the frequencies of the smoothed counts."""
    ids = torch.repeat_interleave(torch.arange(11), (COUNTS + 1).long())
    labels = ids[torch.randperm(len(ids))][None]
    with torch.no_grad():
        model.head.weight.zero_()
        return float(model(labels[:, :1].expand_as(labels), labels).loss)


@pytest.mark.parametrize("options", [{}, {"output_softcap": 4.0}, {"scheme": "ngpt"}, {"output_bias": True}])
def test_with_log_frequencies_the_first_loss_is_the_unigram_entropy(options: dict[str, Any]) -> None:
    model = build("encoder", depth=1, width=16, vocab=11, context=2048, **options)
    before = _loss_on_text(model)
    set_output_bias(model, COUNTS)
    assert _loss_on_text(model) == pytest.approx(_entropy(), abs=1e-4)
    assert before == pytest.approx(math.log(11), abs=1e-4)
    assert isinstance(model.head.bias, nn.Parameter)


def test_unigram_by_its_name() -> None:
    model = build("encoder", depth=1, width=16, vocab=11, output_bias="unigram", counts=COUNTS, context=2048)
    assert _loss_on_text(model) == pytest.approx(_entropy(), abs=1e-4)
    assert model.config.output_bias is True
    again = type(model)(model.config)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.head.bias, model.head.bias)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"output_bias": "unigram"}, ("without counts", "counts=")),
        ({"counts": COUNTS}, ("counts", "output_bias")),
        ({"output_bias": "unigram", "counts": COUNTS[:5]}, ("(5,)", "11 numbers", "bincount")),
        ({"output_bias": "unigram", "counts": -COUNTS}, ("numbers from 0",)),
        ({"output_bias": "unigram", "counts": COUNTS, "output_softcap": 2.0}, ("output_softcap=2", "spread")),
        ({"output_bias": "unigrm"}, ("output_bias 'unigrm'", "unigram")),
        ({"init": "zero-outptu"}, ("zero-output",)),
    ],
)
def test_bad_options(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        build("encoder", depth=1, width=16, vocab=11, **options)
    assert all(word in str(caught.value) for word in words)


def test_a_model_without_a_head() -> None:
    with pytest.raises(UsageError, match="Linear without a head"):
        set_output_bias(nn.Linear(2, 2), [1.0, 2.0])


@pytest.mark.parametrize("init", sorted(WEIGHTS))
def test_every_way_trains_a_step(init: str) -> None:
    model = build("decoder", depth=2, width=16, vocab=11, init=init)
    ids = torch.randint(11, (2, 7))
    optimizer = torch.optim.Adam(param_groups(model, 1e-2))
    losses: list[Tensor] = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(ids, ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert losses[-1] < losses[0]


def test_a_block_on_its_own_starts_as_its_scheme_says() -> None:
    """DeepNorm's β and GPT-2's 1/√(2L) also apply to a single block."""
    config = ModelConfig(scheme="deepnorm", width=WIDTH)
    block = Block(config, Where(3, depth=8), causal=True)
    assert block.attention.q.weight.detach().std() == pytest.approx(PLAIN, rel=0.02)
    assert block.attention.v.weight.detach().std() == pytest.approx(64**-0.25 * PLAIN, rel=0.02)
    gpt2 = Block(ModelConfig(scheme="gpt2", width=WIDTH), Where(3, depth=8), causal=True)
    assert gpt2.feed_forward.down.weight.detach().std() == pytest.approx(0.02 / 4, rel=0.02)


@pytest.mark.parametrize("name", ["deepnorm", "gpt2", "sub-ln", "t-fixup"])
def test_a_block_on_its_own_asks_for_the_depth_that_it_depends_on(name: str) -> None:
    with pytest.raises(UsageError, match=f'scheme "{name}" without depth'):
        Block(ModelConfig(scheme=name, width=16, heads=2), Where(3), causal=True)
