"""Tests of the precision probe: casts, dense cosines, ε by hand, and NaNs put into known places."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hand_read import EPS, PLACEMENTS, WIDTH, norm_of, subject_of, toy
from torch import Tensor, nn

from normscope.anatomy import Anatomy, Norm, Site, read_anatomy
from normscope.nn import build
from normscope.probes import Measurements
from normscope.probes.norms import guarded, normalised
from normscope.probes.precision import measure_precision
from normscope.probes.sums import FLOAT16_FLUSHED, flushed
from normscope.subjects import Subject, make_subject


def measured(subject: Subject, anatomy: Anatomy) -> Measurements:
    return Measurements(measure_precision(subject, anatomy))


def test_flushed_is_what_a_cast_to_float16_loses() -> None:
    edge = torch.tensor(FLOAT16_FLUSHED)
    around = torch.stack(
        [torch.nextafter(edge, edge * 0), edge, torch.nextafter(edge, edge + 1), -edge, edge * 0]
    )
    assert flushed(around) == (3, 4)
    values = torch.cat([around, torch.exp(torch.empty(400_000).uniform_(-40, 5))])
    lost = (values.half() == 0) & (values != 0)
    assert flushed(values) == (int(lost.sum()), int((values != 0).sum()))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_headroom_flushed_and_cosine_against_plain_torch(placement: str) -> None:
    subject, anatomy = toy(placement, torch.float32)
    subject.loss_fn = lambda output, batch, inner=subject.loss_fn: 1e-5 * inner(output, batch)
    rows, model = measured(subject, anatomy), subject.model.eval()
    seen: list[float] = []
    for module in model.modules():
        module.register_forward_hook(
            lambda m, inputs, output: seen.append(float(output.detach().abs().max()))
        )
    plain = torch.autograd.grad(subject.loss(), list(model.parameters()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = subject.loss()
    half = torch.autograd.grad(loss, list(model.parameters()))
    largest = max(seen[:-2])  # without the head's, which is outside of the stack, and the model's
    for dtype in (torch.float16, torch.bfloat16):
        headroom = rows.of(f"precision/{str(dtype).removeprefix('torch.')}-headroom")
        assert headroom[""] >= math.log2(torch.finfo(dtype).max / max(largest, 20.0))
        assert headroom[""] == pytest.approx(math.log2(torch.finfo(dtype).max / largest), abs=2.0)
        assert len(headroom) == 2
        assert len(set(headroom.values())) == 1
    names = [name for name, _ in model.named_parameters()]
    for site, prefix in (("", ""), ("blocks.0", "blocks.0."), ("blocks.1", "blocks.1.")):
        a, b = (
            torch.cat(
                [g.flatten() for name, g in zip(names, found, strict=True) if name.startswith(prefix)]
            ).double()
            for found in (plain, half)
        )
        cosine = float(a @ b / (a.norm() * b.norm()))
        assert cosine < 1 - 1e-7, "the two precisions differ"
        assert rows.of("precision/bfloat16-cosine")[site] == pytest.approx(cosine, rel=1e-9)
        lost = float(((a.float().half() == 0) & (a != 0)).sum() / (a != 0).sum())
        assert 0 < lost < 1
        assert rows.of("precision/float16-flushed")[site] == pytest.approx(lost)
    assert not rows.of("precision/non-finite")


def test_headroom_is_the_largest_activation_and_says_where() -> None:
    subject, anatomy = toy("pre", torch.float32)
    with torch.no_grad():
        subject.model.blocks[0][1].f.up.weight.mul_(1e4)
    rows = measured(subject, anatomy)
    seen: list[Tensor] = []
    subject.model.blocks[0][1].f.up.register_forward_hook(
        lambda m, inputs, output: seen.append(output.detach())
    )
    subject.forward()
    row = rows.find("precision/float16-headroom")
    assert row is not None
    assert row.value == pytest.approx(math.log2(65504 / float(seen[0].abs().max())))
    assert "output of blocks.0.1.f.up.weight of blocks.0.1.f" in row.how
    assert rows.of("precision/float16-headroom").keys() == {"", "blocks.0.1.f"}


def test_a_mask_is_no_activation() -> None:
    subject, anatomy = toy("pre", torch.float32)  # masks with -inf
    assert 0 < measured(subject, anatomy).of("precision/float16-headroom")[""] < 16


def test_a_bfloat16_model_is_compared_with_its_float32_copy() -> None:
    subject, anatomy = toy("pre", torch.bfloat16)
    rows = measured(subject, anatomy)
    model = subject.model.eval()
    half = torch.autograd.grad(subject.loss(), list(model.parameters()))
    plain = torch.autograd.grad(subject.loss(model=model.float()), list(model.parameters()))
    a, b = (torch.cat([g.flatten() for g in found]).double() for found in (plain, half))
    assert rows.of("precision/bfloat16-cosine")[""] == pytest.approx(
        float(a @ b / (a.norm() * b.norm())), rel=1e-6
    )


def test_a_float64_model_is_compared_in_float32() -> None:
    (double, anatomy), (single, _) = toy("pre", torch.float64), toy("pre", torch.float32)
    single.model.load_state_dict(double.model.state_dict())
    single.batch = double.batch
    expected = measured(single, anatomy).of("precision/bfloat16-cosine")
    assert measured(double, anatomy).of("precision/bfloat16-cosine") == pytest.approx(expected, rel=1e-6)
    assert next(double.model.parameters()).dtype == torch.float64


def test_a_model_that_does_not_run_under_bfloat16_has_a_reason() -> None:
    subject, anatomy = toy("pre", torch.float32)

    def fussy(output: Tensor, batch: Any) -> Tensor:
        return (output @ torch.ones(output.shape[-1], 1, dtype=output.dtype)).pow(2).sum() + _only_float32(
            output
        )

    subject.loss_fn = fussy
    row = measured(subject, anatomy).find("precision/bfloat16-cosine")
    assert row is not None
    assert row.how == "not measured: the model does not run in both precisions: float32 only"


def _only_float32(output: Tensor) -> float:
    if output.dtype != torch.float32:
        raise TypeError("float32 only")
    return 0.0


X = torch.tensor([[1.0, -1.0, 3.0, -3.0], [0.5, 0.5, 0.5, -1.5], [4.0, 4.0, -4.0, -4.0]], dtype=torch.float64)
MEAN_SQUARES = [5.0, 0.75, 16.0]


@pytest.mark.parametrize(("kind", "factor"), [("layernorm", 1.0), ("rmsnorm", 1.0), ("l2norm", 4.0)])
def test_what_eps_guards(kind: str, factor: float) -> None:
    site = Site("", 0, "", 0)
    norm = Norm(kind, "n", site, site, 1e-3, None)
    shift = 7.0 if kind == "layernorm" else 0.0
    assert guarded(norm, X + shift).tolist() == pytest.approx([factor * v for v in MEAN_SQUARES])
    expected = torch.tensor([v * factor / (v * factor + 1e-3) for v in MEAN_SQUARES]).double()
    assert torch.allclose(normalised(norm, X + shift).square().mean(-1), expected, rtol=1e-6)


def test_eps_against_the_variances_it_guards() -> None:
    subject, anatomy = toy()
    rows = measured(subject, anatomy)
    seen: list[Tensor] = []
    subject.model.blocks[1][0].branch_in.register_forward_hook(
        lambda m, inputs, output: seen.append(inputs[0].detach())
    )
    subject.forward()
    variance = seen[0].var(-1, correction=0)
    site = "blocks.1.0.branch_in"
    assert rows.of("precision/eps")[site] == EPS
    assert rows.of("precision/eps-ratio")[site] == pytest.approx(EPS / float(variance.min()))
    assert rows.of("precision/eps-ratio-median")[site] == pytest.approx(EPS / float(variance.median()))
    constant = torch.zeros_like(subject.model.embed.weight)
    subject.model.embed.weight.data = constant
    assert measured(subject, anatomy).of("precision/eps-ratio")["blocks.0.0.branch_in"] == math.inf


@pytest.mark.parametrize(
    ("eps", "kind", "reason"), [(None, "layernorm", "no ε"), (EPS, "groupnorm", "groupnorm")]
)
def test_eps_that_cannot_be_set_against_anything(eps: float | None, kind: str, reason: str) -> None:
    subject, anatomy = toy()
    stack = dataclasses.replace(anatomy.stacks[0], final_norm=norm_of("final", kind, eps))
    row = measured(subject, Anatomy((stack,))).find("precision/eps-ratio", "final")
    assert row is not None
    assert reason in row.how


def test_the_eps_of_a_norm_whose_gamma_is_zero_outweighs_nothing() -> None:
    subject, anatomy = toy()
    nn.init.zeros_(subject.model.blocks[1][0].branch_in.weight)
    rows = measured(subject, anatomy)
    row = rows.find("precision/eps-ratio-median", "blocks.1.0.branch_in")
    assert row is not None
    assert not row.measured
    assert "γ is zero" in row.how
    assert rows.of("precision/eps")["blocks.1.0.branch_in"] == EPS


@pytest.mark.parametrize("scheme", ["ngpt", "scalenorm"])
def test_a_floor_is_no_eps(scheme: str) -> None:
    """max(‖x‖, 1e-12) adds nothing to what it guards."""
    model = build("decoder", scheme=scheme, depth=2, width=16, heads=2, vocab=11, context=8)
    subject = make_subject(model, torch.randint(11, (2, 8)))
    rows = measured(subject, read_anatomy(subject))
    units = [row for row in rows if row.quantity == "precision/eps"]
    assert units
    assert not any(row.measured for row in units)


class Wrap(nn.Module):
    """Applies `change` to the output of a module."""

    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.inner(x))


def poison_parameter(subject: Subject) -> None:
    with torch.no_grad():
        subject.model.blocks[1][1].f.down.weight[0, 0] = torch.nan


def poison_overflow(subject: Subject) -> None:
    subject.model.blocks[1] = Wrap(subject.model.blocks[1], lambda x: (1000 * x.abs()).exp())


def poison_product(subject: Subject) -> None:
    nn.init.constant_(subject.model.blocks[0][1].f.up.weight, 1e38)


def poison_logarithm(subject: Subject) -> None:
    subject.model.blocks[1] = Wrap(subject.model.blocks[1], lambda x: (0 * x).log() * 0)


def poison_masked_row(subject: Subject) -> None:
    subject.model.blocks[1] = Wrap(
        subject.model.blocks[1], lambda x: x.masked_fill(x == x, -torch.inf).softmax(-1)
    )


def poison_loss(subject: Subject) -> None:
    subject.loss_fn = lambda output, batch: (output.sum() * 0) / (output.sum() * 0)


def poison_backward(subject: Subject) -> None:
    subject.model.blocks[1] = Wrap(subject.model.blocks[1], lambda x: x + (0 * x).sqrt())


def poison_constant(subject: Subject) -> None:
    constant = torch.tensor([torch.inf])
    subject.model.blocks[1] = Wrap(subject.model.blocks[1], lambda x: x * constant)


def poison_memory(subject: Subject) -> None:
    def change(x: Tensor) -> Tensor:
        memory = torch.empty(1)
        memory.numpy().fill(float("nan"))
        return x * memory

    subject.model.blocks[1] = Wrap(subject.model.blocks[1], change)


def poison_constant_of_the_backward(subject: Subject) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * constant

    constant = torch.tensor([torch.nan])
    subject.model.blocks[1] = Wrap(subject.model.blocks[1], Scaled.apply)


@pytest.mark.parametrize(
    ("poison", "site", "words"),
    [
        (poison_parameter, "blocks.1.1.f.down.weight", "1 of its 128 values are NaN or infinite as given"),
        (poison_overflow, "blocks.1", "infinity born in aten.exp.default"),
        (poison_product, "blocks.0.1.f.up", "infinity born in aten.mm.default"),
        (poison_logarithm, "blocks.1", "infinity born in aten.log.default"),
        (poison_masked_row, "blocks.1", "NaN born in aten._softmax.default"),
        (poison_constant, "blocks.1", "exact; infinity met as an input of aten.mul.Tensor"),
        (poison_memory, "blocks.1", "exact; read from uninitialised memory of aten.empty.memory_format"),
        (
            poison_constant_of_the_backward,
            "blocks.1.inner.1.branch_in.bias",
            "NaN met as an input of aten.mul.Tensor of the backward",
        ),
        (poison_loss, "", "NaN born in aten.div.Tensor, outside of every module"),
        (poison_backward, "blocks.1.inner.1.branch_in.bias", "born in aten.div.Tensor of the backward"),
    ],
)
def test_a_nan_is_traced_to_where_it_was_born(
    poison: Callable[[Subject], None], site: str, words: str
) -> None:
    subject, anatomy = toy("pre", torch.float32)
    assert not measured(subject, anatomy).of("precision/non-finite")
    poison(subject)
    rows = measured(subject, anatomy)
    assert rows.of("precision/non-finite") == {site: 1.0}
    assert words in rows.find("precision/non-finite", site).how
    for quantity in ("precision/float16-flushed", "precision/bfloat16-cosine"):
        assert "not finite" in rows.find(quantity).how


def test_a_batch_with_a_nan_is_named() -> None:
    from test_probe_gradient import Deep, deep_anatomy, summed

    batch = torch.randn(2, 3, WIDTH)
    batch[0, 0, 0] = torch.nan
    rows = measured(subject_of(Deep(), batch, summed), deep_anatomy())
    assert rows.of("precision/non-finite") == {"batch": 1.0}
    assert not batch.requires_grad


def test_the_model_comes_back() -> None:
    subject, anatomy = toy("peri", torch.bfloat16)
    model = subject.model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measured(subject, anatomy)
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    after = model.state_dict()
    assert all(
        torch.equal(value, after[name]) and value.dtype == after[name].dtype for name, value in before.items()
    )
