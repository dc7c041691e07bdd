"""Norms against their formulas in float64, padding, and half precision."""

import copy
import math

import pytest
import torch
from laws import padding_changes_nothing
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn import NORMS, build
from normscope.nn.norms import OVER_TOKENS

WIDTH, EPS = 32, 1e-3
kinds = pytest.mark.parametrize("kind", sorted(NORMS))
REAL = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [False] + [True] * 5])


def _norm(kind: str, width: int = WIDTH) -> nn.Module:
    """Every parameter changed from its initial value."""
    norm = NORMS[kind](width, EPS).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return norm


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.sum() / x.numel()
    return mean, ((x - mean) ** 2).sum() / x.numel()


def _reference(kind: str, norm: nn.Module, x: Tensor, real: Tensor) -> Tensor:
    """Reference by token and feature; outputs at padding are arbitrary."""
    gain = getattr(norm, "weight", torch.ones(()))
    shift = getattr(norm, "bias", torch.zeros(()))
    out = x.clone()
    if kind == "batchnorm":
        for d in range(WIDTH):
            mean, var = _moments(x[..., d][real])
            out[..., d] = (x[..., d] - mean) / (var + EPS).sqrt() * gain[d] + shift[d]
        return out
    if kind == "groupnorm":
        for b in range(len(x)):
            for first in range(0, WIDTH, 16):
                at = slice(first, first + 16)
                mean, var = _moments(x[b, real[b], at])
                out[b, :, at] = (x[b, :, at] - mean) / (var + EPS).sqrt() * gain[at] + shift[at]
        return out
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            v = x[b, t]
            mean, var = _moments(v)
            length, square = (v * v).sum().sqrt(), (v * v).sum() / WIDTH
            out[b, t] = {
                "layernorm": lambda v=v, mean=mean, var=var: (v - mean) / (var + EPS).sqrt() * gain + shift,
                "rmsnorm": lambda v=v, square=square: v / (square + EPS).sqrt() * gain,
                "rmsnorm-plus-one": lambda v=v, square=square: v / (square + EPS).sqrt() * (1 + gain),
                "scalenorm": lambda v=v, length=length: gain * v / length,
                "unit": lambda v=v, length=length: v / length,
                "dyt": lambda v=v: gain * torch.tanh(norm.scale * v) + shift,
                "derf": lambda v=v: gain * torch.erf(norm.scale * v + norm.shift) + shift,
                "seednorm": lambda v=v, square=square: (
                    (gain + norm.scale * torch.tanh((norm.direction * v).sum())) * v / (square + EPS).sqrt()
                ),
                "bhyt": lambda v=v, square=square: (
                    gain * torch.tanh(norm.scale * v / (10 * (square + EPS).sqrt()))
                ),
                "none": lambda v=v: v,
            }[kind]()
    return out


@kinds
def test_a_norm_is_its_formula(kind: str) -> None:
    norm = _norm(kind)
    x = 2 * torch.randn(3, 6, WIDTH, dtype=torch.float64) + 1
    expected = _reference(kind, norm, x, REAL)
    torch.testing.assert_close(norm(x, REAL)[REAL], expected[REAL], rtol=1e-10, atol=1e-10)


@kinds
def test_padding_has_no_part(kind: str) -> None:
    """Padding affects neither outputs of real tokens, nor gradients, nor running statistics."""
    norm = _norm(kind)
    other = copy.deepcopy(norm)
    x = torch.randn(3, 6, WIDTH, dtype=torch.float64)
    y = torch.where(REAL[..., None], x, 1e3 * torch.randn_like(x))
    x.requires_grad_()
    y.requires_grad_()
    out_x, out_y = norm(x, REAL)[REAL], other(y, REAL)[REAL]
    torch.testing.assert_close(out_x, out_y, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(out_x)
    (out_x * weight).sum().backward()
    (out_y * weight).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-8, atol=1e-8)
    assert not x.grad[~REAL].any()
    for ours, theirs in zip(norm.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("mean", "std"), [(1000.0, 30.0), (0.0, 3e-4), (0.0, 15000.0)])
def test_half_precision_keeps_its_statistics_in_float32(
    kind: str, dtype: torch.dtype, mean: float, std: float
) -> None:
    """Large means cancel, lengths and squares of 15000 overflow float16, squares of 3e-4 underflow."""
    norm = NORMS[kind](WIDTH, 1e-5).to(dtype)
    x = (mean + std * torch.randn(4, 8, WIDTH)).to(dtype)
    expected = copy.deepcopy(norm).double()(x.double())
    out = norm(x)
    assert out.dtype == dtype
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=4 * unit, atol=4 * unit)


def test_a_small_gamma_over_one_is_not_lost_in_half_precision() -> None:
    """1.003 is not among bfloat16's numbers, but the mean of many rounded products shows it."""
    norm = NORMS["rmsnorm-plus-one"](WIDTH, 1e-5).bfloat16().requires_grad_(False)
    x = torch.randn(1, 1000, WIDTH).bfloat16()
    plain = norm(x).double()
    nn.init.constant_(norm.weight, 0.003)
    ratio = (norm(x).double() * plain).sum() / plain.square().sum()
    assert float(ratio) == pytest.approx(1.003, abs=2e-4)


def test_starts() -> None:
    assert NORMS["scalenorm"](64, 1e-5).weight.item() == 8.0
    for kind in ("dyt", "derf"):
        assert NORMS[kind](64, 1e-5).scale.item() == 0.5
    assert NORMS["bhyt"](64, 1e-5).scale.item() == 2.0
    x = torch.randn(3, 64)
    assert torch.equal(NORMS["seednorm"](64, 1e-5)(x), NORMS["rmsnorm"](64, 1e-5)(x))
    assert not any(NORMS["unit"](64, 1e-5).parameters())


@pytest.mark.parametrize("kind", ["unit", "scalenorm", "rmsnorm", "layernorm"])
def test_zero_stays_finite(kind: str) -> None:
    x = torch.zeros(1, 2, WIDTH, requires_grad=True)
    out = NORMS[kind](WIDTH, 1e-5)(x)
    out.sum().backward()
    assert not out.any()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("tokens", [1, 7])
def test_batchnorm_is_torchs_without_padding(tokens: int) -> None:
    ours, theirs = NORMS["batchnorm"](WIDTH, EPS).double(), nn.BatchNorm1d(WIDTH, eps=EPS).double()
    for _ in range(3):
        x = 2 * torch.randn(3, tokens, WIDTH, dtype=torch.float64) + 1
        torch.testing.assert_close(ours(x), theirs(x.flatten(0, 1)).view_as(x), rtol=1e-10, atol=1e-10)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-10, atol=1e-10)
    x = torch.randn(3, tokens, WIDTH, dtype=torch.float64)
    expected = theirs.eval()(x.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(ours.eval()(x), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours(x[:1]), expected[:1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", sorted(OVER_TOKENS))
def test_no_padding_is_the_same_as_a_mask_without_padding(
    kind: str, training: bool, dtype: torch.dtype
) -> None:
    """Torch's kernels and the masked moments: values, gradients and running statistics."""
    one = _norm(kind).to(dtype).train(training)
    other = copy.deepcopy(one)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    for _ in range(3):
        x = (2 * torch.randn(3, 6, WIDTH, dtype=torch.float64) + 1).to(dtype)
        y = x.clone()
        outs = one(x.requires_grad_()), other(y.requires_grad_(), torch.ones(3, 6, dtype=torch.bool))
        torch.testing.assert_close(*outs, **tolerance)
        weight = torch.randn_like(x)
        for out in outs:
            out.backward(weight)
        torch.testing.assert_close(x.grad, y.grad, **tolerance)
    for ours, theirs in zip(one.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=tolerance["rtol"], atol=30 * tolerance["atol"]
        )


def test_groupnorm_is_torchs_without_padding() -> None:
    ours, theirs = _norm("groupnorm"), nn.GroupNorm(2, WIDTH, eps=EPS).double()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x.mT).mT, rtol=1e-10, atol=1e-10)
    assert NORMS["groupnorm"](40, EPS).groups == 1


@pytest.mark.parametrize("kind", sorted(OVER_TOKENS))
@pytest.mark.parametrize("scheme", ["pre", "post", "peri", "deepnorm", "parallel", "b2t"])
def test_padding_changes_nothing_in_an_encoder(kind: str, scheme: str) -> None:
    padding_changes_nothing(scheme, "encoder", left=False, norm=kind, width=32)


def test_padding_changes_nothing_in_training_with_batchnorm() -> None:
    model = build("encoder", norm="batchnorm", depth=2, width=16, vocab=11).double().train()
    other = copy.deepcopy(model)
    ids = torch.randint(11, (2, 5))
    padded = torch.cat([ids, torch.randint(11, (2, 3))], dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 3] * 2)
    torch.testing.assert_close(other(padded, attention_mask=mask).logits[:, :5], model(ids).logits)
    moved = 0
    for (name, ours), theirs in zip(model.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        moved += name.endswith("running_mean") and bool(ours.any())
    assert moved == 5


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("decoder", {"norm": "groupnorm"}, ('norm="groupnorm" in a causal stack', "encoder")),
        ("encoder-decoder", {"norm": "groupnorm"}, ("causal stack",)),
        ("encoder", {"norm": "batchnorm", "scheme": "olmo2"}, ('"olmo2"', "inside branches")),
        ("encoder", {"norm": "groupnorm", "qk_norm": "head"}, ("inside branches",)),
        ("encoder", {"norm": "batchnorm", "scheme": "siamesenorm"}, ("joins",)),
    ],
)
def test_a_norm_that_cannot_stand_there_is_refused(
    kind: str, options: dict[str, str], words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        build(kind, depth=1, width=16, vocab=11, **options)
    assert all(word in str(caught.value) for word in words)


def test_batchnorm_looks_ahead_in_training_alone() -> None:
    model = build("decoder", norm="batchnorm", depth=2, width=16, vocab=11).double()
    ids = torch.randint(11, (2, 6))
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 11
    assert not torch.equal(copy.deepcopy(model)(ids).logits[:, 0], copy.deepcopy(model)(other).logits[:, 0])
    model.eval()
    assert torch.equal(model(ids).logits[:, 0], model(other).logits[:, 0])


def test_the_group_of_a_long_sequence_is_compiled_whole() -> None:
    for kind in sorted(OVER_TOKENS):
        torch._dynamo.reset()
        norm = _norm(kind)
        x = torch.randn(3, 6, WIDTH, dtype=torch.float64)
        compiled = torch.compile(copy.deepcopy(norm), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, REAL), norm(x, REAL), rtol=1e-10, atol=1e-10)


def test_scalenorms_gain_is_the_length_it_gives() -> None:
    x = torch.randn(2, 3, 25, dtype=torch.float64)
    lengths = NORMS["scalenorm"](25, 1e-5).double()(x).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, math.sqrt(25)))
