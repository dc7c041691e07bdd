"""Verdicts of drawn claims of groups B and C, confirmed in plain torch without normscope."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from plain_decoder import B, Lane, T, blocks, stacked
from torch import Tensor, nn

F64 = torch.float64
every_seed = pytest.mark.parametrize("seed", [31, 32, 33])


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def end_gradients(placement: str, depth: int, seed: int, init: str) -> tuple[Tensor, Tensor]:
    """Gradient norms of a random functional of the end: at the entry of the stack, and at its end."""
    w = stacked(depth, init, [Lane(seed)])
    x = torch.randn(1, B * T, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    streams = blocks(x, w, placement, depth)
    g = torch.randn(streams[-1].shape, generator=torch.Generator().manual_seed(seed + 1))
    return torch.autograd.grad((streams[-1] * g).sum(), x)[0].norm(), g.norm()


@pytest.mark.parametrize("seed", [31])
def test_c17_post_lns_gradients_need_not_decay_exponentially(seed: int) -> None:
    for init in ("xavier", "normal"):
        entry, end = end_gradients("post", 64, seed, init)
        assert entry > end / 10, "the sentence asks for a tenfold fall in 64 blocks: refuted"
        entry, end = end_gradients("pre", 64, seed, init)
        assert entry >= end / 64, "part pre"


@pytest.mark.parametrize("seed", [31, 32])
@pytest.mark.parametrize("depth", [6, 12])
def test_b3_without_a_memory_the_last_gradient_is_not_the_large_one(depth: int, seed: int) -> None:
    w = stacked(depth, "xavier", [Lane(seed)])
    x = torch.randn(1, B * T, 32, generator=torch.Generator().manual_seed(seed))
    end = blocks(x, w, "post", depth)[-1]
    g = torch.randn(end.shape, generator=torch.Generator().manual_seed(seed + 1))
    maps = [name for name, value in w.items() if name.startswith("0.") and value.shape[-2:] == (128, 32)]
    (name,) = maps
    first, last = (w[f"{b}{name[1:]}"] for b in (0, depth - 1))
    at_first, at_last = torch.autograd.grad((end * g).sum(), [first, last])
    assert at_last.norm() < 2 * at_first.norm(), "refuted as stated"


class Count:
    """A number that counts the operations done with it and with its results."""

    operations = 0

    def _one(self, other: object = None) -> "Count":
        Count.operations += 1
        return self

    __add__ = __sub__ = __mul__ = __truediv__ = __radd__ = _one
    root = _one


def added(numbers: list[Count]) -> Count:
    total = numbers[0]
    for number in numbers[1:]:
        total = total + number
    return total


def passes(d: int, *, centred: bool) -> tuple[int, int]:
    """Operations of a norm on one token of width d, with γ (and β where it is centred): forward, backward."""
    x, one = [Count() for _ in range(d)], Count()
    Count.operations = 0
    if centred:
        mean = added(x) / d
        x = [each - mean for each in x]
    scale = (added([each * each for each in x]) / d + one).root()
    normal = [each * scale for each in x]
    out = [each * one for each in normal]
    if centred:
        out = [each + one for each in out]
    forward, Count.operations = Count.operations, 0
    g = [each * one for each in out]
    share = added([each * other for each, other in zip(g, normal, strict=True)]) / d
    inner = [each - other * share for each, other in zip(g, normal, strict=True)]
    if centred:
        mean = added(g) / d
        inner = [each - mean for each in inner]
    _ = [each * scale for each in inner]
    _ = [one + each * other for each, other in zip(out, normal, strict=True)]  # γ's gradient, added up
    if centred:
        _ = [one + each for each in out]  # β's
    return forward, Count.operations


def test_b13_rms_norm_saves_between_27_and_43_percent() -> None:
    layer, rms = passes(512, centred=True), passes(512, centred=False)
    saved = [100 * (1 - few / many) for few, many in zip(rms, layer, strict=True)]
    assert saved == pytest.approx([100 * 3 / 7, 100 * 3 / 11], abs=0.3)
    assert min(saved) - 7 > 10, "7 % is not reached: refuted"
    assert 64 - max(saved) > 10, "64 % is not reached"


class From003(nn.Module):
    """The template of 003, §4."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model, eps=1e-6)
        self.mha = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.norm2 = nn.LayerNorm(d_model, eps=1e-6)
        self.ffn = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mha(self.norm1(x), self.norm1(x), self.norm1(x))[0]
        return x + self.ffn(self.norm2(x))


class From004(From003):
    """The template of 004, §4.3: its attention is not told that the batch comes first."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.mha = nn.MultiheadAttention(d_model, n_heads)


@pytest.mark.parametrize("template", [From003, From004])
def test_b18_the_templates_are_pre_ln(template: type[From003]) -> None:
    torch.manual_seed(0)
    block, x = template(16, 2), 3 * torch.randn(2, 5, 16)
    seen: list[Tensor] = []
    block.mha.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    block.ffn.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    out = block(x)
    for given in seen:
        assert given.mean(-1).abs().max() < 1e-5
        assert (given.var(-1, correction=0) - 1).abs().max() < 1e-3
    other = x.clone()
    other[1] = 0.0
    mixes = bool((block(other)[0] - out[0]).abs().max() > 1e-3)
    assert mixes == (template is From004), "part batch: 004's block lets sequences see one another"
    for last in (block.mha.out_proj, block.ffn[2]):
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    assert torch.equal(block(x), x), "no norm stands on the stream"


@every_seed
def test_c4_batch_norm_depends_on_its_batch_and_layer_norm_does_not(seed: int) -> None:
    x = noise(512, 32, seed=seed)
    whole = F.batch_norm(x, None, None, training=True), F.layer_norm(x, (32,))
    for size in (2, 4, 16, 64, 256):
        part = x[:size]
        batch = F.batch_norm(part, None, None, training=True)
        assert (batch - whole[0][:size]).norm() > 1e-3 * whole[0][:size].norm()
        assert (F.layer_norm(part, (32,)) - whole[1][:size]).abs().max() < 1e-12
        off = float((batch - whole[0][:size]).norm() / whole[0][:size].norm())
        assert size > 4 or off >= 0.1, "part vectors"
    assert (F.layer_norm(x[:1], (32,)) - whole[1][:1]).abs().max() < 1e-12


@every_seed
@pytest.mark.parametrize("times", [1.25, 2.0, 4.0])
def test_c5_padding_disturbs_batch_norm(times: float, seed: int) -> None:
    x, pad = noise(64, 32, seed=seed), noise(1, 32, seed=seed + 50)
    padded = torch.cat((x, pad.expand(int(64 * (times - 1)), 32)))
    alone, beside = (F.batch_norm(each, None, None, training=True)[:64] for each in (x, padded))
    assert (alone - beside).norm() > 0.1 * alone.norm()
    assert torch.equal(F.layer_norm(padded, (32,))[:64], F.layer_norm(x, (32,)))


def test_c7_two_of_ten_printed_as_post_ln_are() -> None:
    norm = lambda x: F.layer_norm(x, x.shape[-1:], eps=0.0)  # noqa: E731
    f = lambda x: torch.tanh(x)  # noqa: E731
    pre, res_post, post = (lambda x: x + f(norm(x))), (lambda x: x + norm(f(x))), (lambda x: norm(x + f(x)))
    printed: dict[str, Callable[[Tensor], Tensor]] = {
        "§3.1 SublayerWrapper": post,
        "§3.2 SublayerWrapper": pre,
        "§3.3 SublayerConnection": pre,
        "§4.2 SublayerConnection": pre,
        "§4.3 SublayerConnection": pre,
        "§4.2 plan one": pre,
        "§3.4 Input -> SubLayer -> LN -> Add": res_post,
        "§5.1.1 LayerNorm(x + Sublayer(x))": post,
        "§5.2.1 x + F(LayerNorm(x))": pre,
        "§8.3 x + Dropout(LayerNorm(SubLayer(x)))": res_post,
    }
    x = 3 * noise(7, 16, seed=1) + 1
    is_post = [abs(float(each(x).var(-1, correction=0).mean()) - 1) < 1e-9 for each in printed.values()]
    assert (sum(is_post), len(is_post)) == (2, 10)


@every_seed
def test_c8_the_variance_stays_where_each_block_ends_in_a_norm(seed: int) -> None:
    for placement, stays in (("post", True), ("pre", False)):
        w = stacked(12, "xavier", [Lane(seed)])
        x = torch.randn(1, B * T, 32, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            found = [float(each.var(-1).mean()) for each in blocks(x, w, placement, 12)]
        ratios = [after / before for before, after in itertools.pairwise(found[1:])]
        assert all(abs(ratio - 1) < 0.05 for ratio in ratios) == stays, placement


def test_c19_gamma_zero_is_the_identity_behind_the_branch_only() -> None:
    x, weight, bias = noise(5, 16, seed=3), noise(16, 16, seed=4), noise(16, seed=5)
    zero, f = torch.zeros(16, dtype=F64), lambda x: torch.relu(x @ weight + bias)
    off = lambda x: F.layer_norm(x, (16,), zero)  # noqa: E731
    assert torch.equal(x + off(f(x)), x), "the last step of the branch"
    assert not torch.equal(x + f(off(x)), x), "before the branch its biases are left"
    assert off(x + f(x)).abs().max() == 0, "on the stream nothing is left"


def test_c33_a_dead_branch_and_a_lost_mask_pass_both_checks() -> None:
    def block(x: Tensor, *, dead: bool, masked: bool) -> Tensor:
        scores = x @ x.T / 4 + torch.full((6, 6), -torch.inf, dtype=F64).triu(1) * (1 if masked else 0.0)
        scores = torch.where(scores.isnan(), x @ x.T / 4, scores)
        return x + (0.0 if dead else 0.05) * (scores.softmax(-1) @ x)

    x = noise(6, 16, seed=8)
    for dead, masked in ((False, True), (True, True), (False, False)):
        out = block(x, dead=dead, masked=masked)
        assert out.isfinite().all()
        jacobian = torch.autograd.functional.jacobian(lambda x: block(x, dead=dead, masked=masked), x)  # noqa: B023
        trace = float(torch.einsum("tdtd->", jacobian)) / x.numel()
        assert abs(trace - 1) < 0.1, "the sound one and both faults look the same: refuted"
