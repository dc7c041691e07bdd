"""Tests of hard cases for Jacobians: axis of sequences, state, wrong derivatives, maps with no product."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_probe_jacobian import Block, FeedForward, Model, dense, gpt, ids, reason, value
from torch import Tensor, nn

from benchmarks.broken import TimesBackward
from normscope.anatomy import measuring, read_anatomy
from normscope.demo.examples import CausalEncoder
from normscope.nn import build
from normscope.probes import Budget, Measurements, Spending, measure_jacobian
from normscope.probes.jacobian.derivative import TOLERANCE
from normscope.probes.jacobian.one_sequence import one_sequence
from normscope.probes.precision import measure_precision
from normscope.subjects import Subject


def subject_of(model: nn.Module, batch: Any) -> Subject:
    return Subject(
        model, batch, lambda output, _: output.square().mean(), lambda: iter([batch]), 0, "test", "test"
    )


def measure(model: nn.Module, batch: Any, budget: Budget = Budget.STANDARD) -> Measurements:
    subject = subject_of(model, batch)
    return Measurements(measure_jacobian(subject, read_anatomy(subject), Spending(budget)))


def largest(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    return float(torch.linalg.svdvals(dense(f, x))[0])


class Autocast(Model):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids)


def test_rounding_under_autocast_is_no_wrong_derivative() -> None:
    """Finite differences of a forward in bfloat16 are mostly round-off."""
    torch.manual_seed(0)
    rows = measure(Autocast(8, lambda: Block(8, "pre")), ids(6), Budget.FAST)
    assert "round-off hides" in rows.find("derivative/relative-error", "decoder").how
    assert math.isfinite(value(rows, "contraction", "decoder"))


class Biased(Block):
    """Attention with a bias (T, T) on its logits."""

    bias: Tensor

    def term(self, i: int, x: Tensor) -> Tensor:
        if i:
            return super().term(i, x)
        q, k, v = self.attention.qkv(self.norms[0](x)).chunk(3, -1)
        return self.attention.out(torch.softmax(q @ k.mT / 3 + self.bias, -1) @ v)


class WithBias(Model):
    def forward(self, ids: Tensor, bias: Tensor, padding: Tensor) -> Tensor:
        for block in self.blocks:
            block.bias = bias + padding[:, None]
        return super().forward(ids)


def test_a_bias_as_long_as_the_batch_is_not_cut() -> None:
    """B = T: the first axis of the bias counts queries, that of the padding counts sequences."""
    torch.manual_seed(0)
    model = WithBias(8, lambda: Biased(8, "pre")).double()
    bias, padding = 3 * torch.randn(4, 4).double(), torch.randn(4, 4).double()
    rows = measure(model, (ids(4), bias, padding))
    entry = model.embedding(ids(4)[:1]).detach()
    model(ids(4)[:1], bias, padding[:1])
    assert value(rows, "sigma-max", "encoder") == pytest.approx(largest(model.stack, entry), rel=1e-2)
    assert "; B = 1," in rows.find("jacobian/sigma-max", "encoder").how


class Gated(nn.Module):
    """Experts over flattened tokens; a softmax weighs their outputs in one bmm, as attention does."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.router = nn.Linear(d, 3)
        self.experts = nn.ModuleList(FeedForward(d) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights = self.router(flat).softmax(-1)
        outputs = torch.stack([expert(flat) for expert in self.experts], 1)
        return torch.bmm(weights.unsqueeze(1), outputs).reshape(x.shape)


class Capacity(Gated):
    """Each expert takes the tokens of the whole batch with the highest score for it."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights = self.router(flat).softmax(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            gain, chosen = weights[:, i].topk(max(1, len(flat) // 5))
            out = out.index_add(0, chosen, gain.unsqueeze(-1) * expert(flat[chosen]))
        return out.reshape(x.shape)


def with_experts(kind: type[nn.Module]) -> Model:
    torch.manual_seed(0)
    model = Model(8, lambda: Block(8, "pre"))
    for block in model.blocks:
        block.feed_forward = kind(8)
    return model.double()


def test_a_router_over_flattened_tokens_does_not_defeat_the_cut() -> None:
    model = with_experts(Gated)
    rows = measure(model, ids(6))
    entry = model.embedding(ids(6)[:1]).detach()
    assert value(rows, "dimension", "blocks.0") == 6 * 8
    assert value(rows, "sigma-max", "decoder") == pytest.approx(largest(model.stack, entry), rel=1e-2)


def test_experts_that_sequences_compete_for_are_measured_on_the_whole_batch_and_it_says_so() -> None:
    model = with_experts(Capacity)
    rows = measure(model, ids(6))
    row = rows.find("jacobian/sigma-max", "blocks.0")
    assert (
        "whole batch at once, not one sequence: a sequence alone has other values than in the batch"
        in row.how
    )
    assert value(rows, "dimension", "blocks.0") == 4 * 6 * 8


def test_a_cut_of_tokens_is_not_taken_for_one_of_sequences() -> None:
    """The attention adds nothing yet, so a token alone has the same value as among others."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=False)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for each in model.layers:
        nn.init.zeros_(each.self_attn.out_proj.weight)
    with measuring(model):
        batch = torch.randn(6, 4, 8)
        feed = one_sequence(model, batch, read_anatomy(model, batch))
    assert feed.note == "B = 1"
    assert torch.equal(feed.batch, batch[:, :1])


@pytest.mark.parametrize("error", [AssertionError("four"), KeyError("four"), AttributeError("four")])
def test_whatever_a_forward_raises_for_one_sequence_the_batch_is_measured(error: Exception) -> None:
    class Picky(Model):
        def forward(self, ids: Tensor) -> Tensor:
            if len(ids) != 4:
                raise error
            return super().forward(ids)

    rows = measure(Picky(4, lambda: Block(4, "pre")), ids(3))
    assert value(rows, "dimension", "blocks.0") == 4 * 3 * 4
    assert "not one sequence: " in rows.find("jacobian/sigma-max", "blocks.0").how


class Frozen(Model):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.embedding(ids)
        return self.head(self.final(self.stack(x)))


def test_an_embedding_under_no_grad_loses_no_jacobian() -> None:
    torch.manual_seed(0)
    model = Frozen(8, lambda: Block(8, "pre")).double()
    rows = measure(model, ids(5))
    entry = model.embedding(ids(5)[:1]).detach()
    assert value(rows, "sigma-max", "decoder") == pytest.approx(largest(model.stack, entry), rel=1e-2)


class Remembering(nn.Module):
    """Attention that keeps its keys and values for the next call, as for generation."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.cache: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.cache is not None and self.cache[0].shape[0] == len(x):
            k, v = (torch.cat((old, new), 1) for old, new in zip(self.cache, (k, v), strict=True))
        self.cache = (k, v)
        return self.out(torch.softmax(q @ k.mT / 3, -1) @ v)


def remembering() -> Model:
    torch.manual_seed(0)
    model = Model(8, lambda: Block(8, "pre"))
    for block in model.blocks:
        block.attention = Remembering(8)
    return model


def test_a_cache_of_keys_and_values_does_not_change_what_is_measured() -> None:
    model = remembering().double()
    rows = measure(model, ids(5))
    entry = model.embedding(ids(5)[:1]).detach()

    def stack(x: Tensor) -> Tensor:
        for block in model.blocks:
            block.attention.cache = None
        return model.stack(x)

    assert value(rows, "sigma-max", "encoder") == pytest.approx(largest(stack, entry), rel=1e-2)


def test_both_precisions_begin_with_the_same_cache() -> None:
    subject = subject_of(remembering(), ids(5))
    rows = Measurements(measure_precision(subject, read_anatomy(subject)))
    assert rows.of("precision/bfloat16-cosine")[""] > 0.99


class WrongBetween(Model):
    def stack(self, x: Tensor) -> Tensor:
        return self.blocks[1](TimesBackward.apply(self.blocks[0](x), 0.25))


def test_a_wrong_derivative_between_blocks_spoils_the_stack_alone() -> None:
    torch.manual_seed(0)
    rows = measure(WrongBetween(8, lambda: Block(8, "pre")).double(), ids(5)[:1])
    assert value(rows, "sigma-max", "blocks.1") > 0
    assert "derivative is off by 75%" in reason(rows, "sigma-max", "decoder")
    assert "derivative is off by 75%" in reason(rows, "contraction", "decoder")
    assert rows.of("derivative/relative-error")["decoder"] == pytest.approx(0.75, abs=0.01)
    assert rows.of("derivative/relative-error")["blocks.0"] < 1e-3


class Skipping(Model):
    """The embedding is added again before the last block."""

    def stack(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x) + 3 * x)


def test_a_second_way_of_the_stream_is_part_of_the_jacobian_and_no_wrong_derivative() -> None:
    torch.manual_seed(0)
    model = Skipping(8, lambda: Block(8, "pre")).double()
    rows = measure(model, ids(5)[:1])
    entry = model.embedding(ids(5)[:1]).detach()
    for stack in ("decoder", "blocks.0"):
        f = model.stack if stack == "decoder" else model.blocks[0]
        assert value(rows, "sigma-max", stack) == pytest.approx(largest(f, entry), rel=5e-2)
    assert max(rows.of("derivative/relative-error").values()) < 1e-3
    assert "second way in" in rows.find("derivative/relative-error", "decoder").how


@pytest.mark.parametrize(
    ("factor", "wrong", "kinked"),
    [(0.82, True, False), (0.97, True, True), (1.05, True, True), (0.995, False, False)],
)
def test_a_backward_that_is_a_few_percent_off_is_found(factor: float, wrong: bool, kinked: bool) -> None:
    class Off(Block):
        def term(self, i: int, x: Tensor) -> Tensor:
            term = super().term(i, x.relu() if kinked else x)
            return TimesBackward.apply(term, factor) if i else term

    torch.manual_seed(0)
    rows = measure(Model(8, lambda: Off(8, "pre"), 2).double(), ids(5)[:1], Budget.FAST)
    found = rows.of("derivative/relative-error")
    expected = 1 - min(factor, 1 / factor)
    assert found["blocks.0.feed_forward"] == pytest.approx(expected, abs=2e-3)
    assert found["blocks.0.attention"] < 1e-3
    assert ("derivative is off" in reason(rows, "branch-norm", "blocks.0.feed_forward")) == wrong


def test_kinks_are_no_wrong_derivative() -> None:
    """ReLU under a step: some of its kinks lie within."""

    class Kinked(Block):
        def term(self, i: int, x: Tensor) -> Tensor:
            x = self.norms[i](x)
            return self.attention(x) if i == 0 else self.feed_forward.down(self.feed_forward.up(x).relu())

    for seed in range(2):
        torch.manual_seed(seed)
        rows = measure(Model(16, lambda: Kinked(16, "pre"), 2), ids(8)[:1], Budget.FAST)
        assert max(rows.of("derivative/relative-error").values()) < 0.02


def test_a_stack_that_bends_within_the_step_is_not_called_wrong() -> None:
    """A chaotic stack: its differences do not settle, so blocks are compared one by one."""

    class Steep(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.sin(40 * self.feed_forward(self.norms[0](x)) + x)

    torch.manual_seed(0)
    rows = measure(Model(8, lambda: Steep(8, "pre"), 6).double(), ids(5)[:1])
    assert value(rows, "sigma-max", "encoder") > 1e3
    row = rows.find("derivative/relative-error", "encoder")
    assert row.how == "not measured: the forward bends within the steps of the finite differences"


@pytest.mark.parametrize(
    ("depth", "width", "factor", "seed"), [(8, 64, 12.0, 11), (5, 32, 40.0, 12), (12, 64, 50.0, 0)]
)
def test_a_saturated_attention_is_no_wrong_derivative(
    depth: int, width: int, factor: float, seed: int
) -> None:
    """The softmax bends within the steps of the finite differences, in float32 and in every block."""
    torch.manual_seed(seed)
    model = CausalEncoder(depth, width, norm_first=True, final_norm=True)
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.self_attn.in_proj_weight[: 2 * width] *= factor
    rows = measure(model, torch.randint(256, (2, 48)), Budget.FAST)
    errors = rows.of("derivative/relative-error")
    assert all(error <= TOLERANCE for error in errors.values())
    assert len(errors) > depth


class Rounding(torch.autograd.Function):
    """Rounding to multiples of a step, with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float) -> Tensor:
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Quantised(Block):
    step = 1.0

    def term(self, i: int, x: Tensor) -> Tensor:
        return Rounding.apply(super().term(i, x), self.step)


@pytest.mark.parametrize("step", [1e-4, 1e-3, 1e-2, 0.1, 1.0])
def test_rounding_under_a_straight_through_gradient_is_wrong_at_every_step(step: float) -> None:
    """Its true derivative is zero almost everywhere."""
    torch.manual_seed(0)
    model = gpt(16, "pre")
    model.blocks[1] = Quantised(16, "pre")
    model.blocks[1].step = step
    rows = measure(model.float(), ids(5), Budget.FAST)
    errors = rows.of("derivative/relative-error")
    for branch in ("attention", "feed_forward"):
        assert errors[f"blocks.1.{branch}"] == pytest.approx(1, abs=0.2), errors
    assert "derivative is off" in reason(rows, "contraction", "decoder")


def test_a_model_that_has_no_float64_copy_is_judged_in_float32() -> None:
    class Uncopied(WrongBetween):
        def __deepcopy__(self, memo: dict) -> None:
            raise TypeError("holds a lock")

    torch.manual_seed(0)
    rows = measure(Uncopied(8, lambda: Block(8, "pre")), ids(5)[:1])
    assert rows.of("derivative/relative-error")["decoder"] == pytest.approx(0.75, abs=0.01)


def test_a_hook_that_fails_takes_only_the_figures_with_it() -> None:
    class Hooked(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            x.register_hook(lambda gradient: "nothing")
            return x

    rows = measure(Model(4, lambda: Hooked(4, "pre")), ids(3)[:1])
    assert not any(row.measured for row in rows if row.quantity == "jacobian/sigma-max")
    assert "hook" in reason(rows, "sigma-max", "decoder")


class Louder(Model):
    def stack(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = 1.7 * block(x)
        return x


def test_a_stack_that_is_not_the_product_of_its_blocks_has_no_bounds() -> None:
    torch.manual_seed(0)
    rows = measure(Louder(8, lambda: Block(8, "pre")).double(), ids(5)[:1])
    for quantity in ("log-upper-bound", "log-lower-bound"):
        assert "not the product of its blocks" in reason(rows, quantity, "decoder")


class BetweenBranches(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.join(1, self.join(0, x).relu())


def test_a_block_that_is_not_the_product_of_its_branches_has_no_bound() -> None:
    torch.manual_seed(0)
    model = Model(8, lambda: BetweenBranches(8, "pre")).double()
    for block in model.blocks:
        block.attention.out.weight.data.mul_(0.05)
        block.feed_forward.down.weight.data.mul_(0.05)
    rows = measure(model, ids(5)[:1])
    assert "not the product of its branches" in reason(rows, "lower-bound", "blocks.0")
    assert "needs jacobian/lower-bound of blocks.0" in reason(rows, "log-lower-bound", "decoder")
    assert math.isfinite(value(rows, "log-upper-bound", "decoder"))


def test_bounds_are_there_where_the_stack_is_the_product() -> None:
    torch.manual_seed(0)
    rows = measure(gpt(8, "pre"), ids(5)[:1])
    assert value(rows, "log-upper-bound", "decoder") >= math.log10(value(rows, "sigma-max", "decoder"))


@pytest.mark.parametrize("kind", ["half", "learnt"])
def test_values_of_the_first_block_are_a_second_input_and_no_wrong_derivative(kind: str) -> None:
    """Later attentions read the first one's values too, which the shift of the stack's entry moves."""
    torch.manual_seed(0)
    model = build("decoder", value_residual=kind, depth=2, width=8, heads=2, vocab=11, context=8).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    batch = torch.randint(11, (1, 6))
    rows = measure(model, batch)
    late = rows.find("derivative/relative-error", "blocks.1.attention")
    assert late.value is None
    assert "around its entry" in late.how
    assert rows.find("derivative/relative-error", "blocks.0.attention").value < 1e-3
    assert rows.find("derivative/relative-error", "decoder").value < 1e-3
