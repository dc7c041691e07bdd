"""Tests of the Jacobian probe's parts on maps with known figures."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_probe_jacobian import Block, Model, gpt, ids, measure, value
from torch import Tensor, nn

from normscope.anatomy import Block as BlockRead
from normscope.anatomy import Site, Stack, measuring, read_anatomy
from normscope.linalg import Estimate, Status, TokenProjector
from normscope.linalg.maps import Matrix
from normscope.probes import Budget, Spending
from normscope.probes.jacobian import deep
from normscope.probes.jacobian.budget import OverBudget
from normscope.probes.jacobian.derivative import compare, is_wrong, same_gap, settled
from normscope.probes.jacobian.ends import contraction_error
from normscope.probes.jacobian.held_graph import hold
from normscope.probes.jacobian.layers import kernel_of
from normscope.probes.jacobian.one_sequence import (
    OtherValues,
    _require_same,
    _shares,
    fed_alike,
    one_sequence,
    same_sites,
)
from normscope.probes.jacobian.workspace import Workspace, is_product

TOKENS, WIDTH = 9, 4


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compared(long: Tensor, short: Tensor, *, gain: float = 1.0, size: float = 1.0) -> float | str:
    """`compare` of gain · I with a forward that moves by `long` and `short` when the source moves by ones."""
    ones = torch.ones(TOKENS, WIDTH, dtype=torch.float64)
    op = Matrix(gain * torch.eye(TOKENS * WIDTH, dtype=torch.float64))
    return compare(op, (ones, ones), (long, short), size * ones)


ONES = torch.ones(TOKENS, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize(("off", "wrong"), [(0.03, True), (0.015, False), (-0.1, True), (0.0, False)])
def test_a_derivative_is_wrong_from_two_percent_on(off: float, wrong: bool) -> None:
    found = compared((1 + off) * ONES, (1 + off) * ONES)
    assert found == pytest.approx(abs(off) / max(1, 1 + off), abs=1e-6)
    assert is_wrong(found) == wrong


def test_the_error_of_the_differences_is_taken_off() -> None:
    """Kinks halve the gap at a quarter of the step."""
    noise = drawn(TOKENS, WIDTH)
    noise *= 0.05 * 2 / noise.norm(dim=-1, keepdim=True)
    found = compared(ONES + 2 * noise, ONES + noise)
    assert found == pytest.approx(0, abs=1e-6)


def test_one_token_that_flips_is_no_wrong_derivative() -> None:
    moved = ONES.clone()
    moved[3] = -5
    assert compared(moved, moved) == pytest.approx(0, abs=1e-6)


def test_a_difference_hidden_by_round_off_is_not_judged() -> None:
    found = compared(ONES, ONES, size=1e12)
    assert isinstance(found, str)
    assert "round-off" in found
    assert not is_wrong(found)


def test_differences_that_grow_towards_a_larger_derivative_do_not_settle() -> None:
    found = compared(ONES, 4 * ONES, gain=1e3)
    assert isinstance(found, str)
    assert "bends" in found


def test_a_jump_that_only_the_long_step_meets_excuses_no_gap() -> None:
    """A straight-through quantiser: no token moves at the short step, although the derivative is not zero."""
    jump = drawn(TOKENS, WIDTH)
    found = compared(ONES + 6 * jump / jump.norm(dim=-1, keepdim=True), 0.76 * ONES)
    assert isinstance(found, str)
    assert "jumps" in found


def test_a_coarser_precision_in_the_forward_hides_the_differences() -> None:
    op = Matrix(torch.eye(TOKENS * WIDTH, dtype=torch.float64))
    moved = (ONES, 0.5 * ONES)
    assert is_wrong(compare(op, (ONES, ONES), moved, ONES))
    found = compare(op, (ONES, ONES), moved, ONES, torch.finfo(torch.bfloat16).eps)
    assert isinstance(found, str)
    assert "round-off" in found


def test_differences_that_settle_far_from_the_derivative_tell_that_it_is_wrong() -> None:
    assert compared(ONES, 1.01 * ONES, gain=4.0) == pytest.approx(0.75, abs=0.01)


def test_steps_of_the_forward_tell_that_the_derivative_is_wrong() -> None:
    """Rounding under a straight-through gradient: jumps grow as the step shrinks, beyond the derivative."""
    assert compared(45 * ONES, 90 * ONES) > 0.9


@pytest.mark.parametrize(
    ("off", "size", "same"),
    [(0.03, 1e-9, True), (0.04, 1e-9, True), (0.05, 1e-9, False), (0.05, 1.0, False), (0.05, 4e9, True)],
)
def test_a_gap_that_changes_at_finer_steps_is_no_wrong_derivative(
    off: float, size: float, same: bool
) -> None:
    """The gap is 0.03 at the short step; at a finer one it may change by half of itself, and by round-off."""
    op = Matrix(torch.eye(TOKENS * WIDTH, dtype=torch.float64))
    steps = (ONES, 0.97 * ONES), (0.97 * ONES, (1 - off) * ONES)
    ends, finer = ((ONES, ONES), steps[0]), ((ONES, ONES), steps[1])
    assert same_gap(op, ends, finer, size * ONES, 0.0) == same


@pytest.mark.parametrize(
    ("far", "near", "error"),
    [
        (1.0, 1.0, 0.0),
        (0.8, 0.8, 0.2),
        (0.0, 0.0, 1.0),
        (0.9, 0.8, 0.2),
        (1.005, 0.995, 0.005),
        (0.6, 0.8, None),
    ],
)
def test_an_error_is_settled_where_both_steps_agree_on_the_gap(
    far: float, near: float, error: float | None
) -> None:
    op = Matrix(torch.eye(TOKENS * WIDTH, dtype=torch.float64))
    found = settled(op, (ONES, ONES), (far * ONES, near * ONES))
    assert found == (error if error is None else pytest.approx(error))


@pytest.mark.parametrize("index", [0, -1])
def test_every_end_of_the_batch_must_come_out_alike(index: int) -> None:
    class Odd(Model):
        def stack(self, x: Tensor) -> Tensor:
            if len(x) > 1:
                x = x.index_add(0, torch.tensor([index % len(x)]), torch.ones(1, *x.shape[1:]))
            return super().stack(x)

    model = Odd(4, lambda: Block(4, "pre"), 1)
    with measuring(model):
        feed = one_sequence(model, ids(3), read_anatomy(model, ids(3)))
    assert "other values than in the batch" in feed.note
    assert torch.equal(feed.batch, ids(3))


@pytest.mark.parametrize(
    ("gaps", "same"), [((1e-4, 5e-3, 0.3), True), ((1e-6, 0.05), False), ((0.0, 2e-3), False)]
)
def test_rounding_may_grow_from_block_to_block_but_not_jump(gaps: tuple[float, ...], same: bool) -> None:
    whole = {str(i): drawn(4, 3, 2, seed=i) for i in range(len(gaps))}
    alone = {str(i): whole[str(i)][:1] * (1 + gap) for i, gap in enumerate(gaps)}
    try:
        _require_same(whole, alone, 0, 4)
    except OtherValues:
        assert not same
    else:
        assert same


@pytest.mark.parametrize("index", [0, -1])
def test_where_a_sequence_lies_in_a_folded_axis(index: int) -> None:
    sequences = drawn(4, 3, 2)  # B, T, d
    for folded in (sequences.flatten(0, 1), sequences.transpose(0, 1).flatten(0, 1)):
        shares = list(_shares(folded, sequences[index], index, 4))
        assert any(torch.equal(share, sequences[index]) for share in shares)
    assert not list(_shares(torch.zeros(6, 3), torch.zeros(2, 3), index, 4))


class Parallel(Block):
    """x + Ax + Ax: both branches read the same stream."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x) + self.feed_forward(x)


@pytest.mark.parametrize(("scale", "least"), [(0.3, 0.4), (1.5, 0.0)])
def test_the_bound_of_branches_side_by_side_takes_the_sum_of_their_norms(scale: float, least: float) -> None:
    model = Model(4, lambda: Parallel(4, "none"), 2).double()
    signs = torch.diag(torch.tensor([-1.0, 1.0, -0.5, 0.2])).double()
    for block in model.blocks:
        block.attention, block.feed_forward = (nn.Linear(4, 4, bias=False).double() for _ in range(2))
        for branch in (block.attention, block.feed_forward):
            branch.weight.data = scale * signs
    bound = value(measure(model, ids(3)[:1]), "lower-bound", "blocks.0")
    assert bound <= least
    assert bound == pytest.approx(least, abs=0.05)


def test_the_bound_of_a_norm_on_the_stream_is_zero() -> None:
    assert value(measure(gpt(4, "post"), ids(3)[:1]), "lower-bound", "blocks.0") == 0.0


def test_a_product_is_told_from_what_is_none() -> None:
    a, b = drawn(6, 6), drawn(6, 6, seed=1)
    first, second = Matrix(a), Matrix(b)
    pullbacks = [first.rmatvec, second.rmatvec]
    assert is_product(Matrix(b @ a), pullbacks)
    assert not is_product(Matrix(a @ b), pullbacks)
    assert not is_product(Matrix(1.01 * b @ a), pullbacks)


def test_the_set_up_of_a_map_is_booked_once() -> None:
    workspace = Workspace(nn.Identity(), None, None, None, "", Spending())
    op = SimpleNamespace(products=0)
    for spent in (4, 2):
        with workspace.booked("part", op, 0.5):
            op.products += spent
    assert workspace.spending.parts["part"].forwards == 0.5 * (4 + 1) + 0.5 * 2


def test_what_is_left_decides_and_not_the_limit() -> None:
    spending = Spending(Budget.FAST)
    spending.add("first", 150)
    spending.require("small", 10)
    with pytest.raises(OverBudget, match="20 forwards, and 10 of the 160"):
        spending.require("large", 20)
    Spending(Budget.STANDARD).require("part", 1, Budget.STANDARD)
    with pytest.raises(OverBudget, match="needs --budget deep"):
        Spending(Budget.STANDARD).require("part", 1, Budget.DEEP)


def test_the_contractions_interval_holds_for_rank_one() -> None:
    """Rank one has the widest interval: Σ⟨v, u⟩² of four directions is χ² with four degrees of freedom."""
    low, high = contraction_error()
    assert (low, high) == pytest.approx((-0.2225, 0.4585), abs=1e-3)
    means = np.random.default_rng(0).chisquare(4, 4000) / 4
    truth_less_estimate = -0.5 * np.log10(means)
    assert np.mean((low <= truth_less_estimate) & (truth_less_estimate <= high)) == pytest.approx(
        0.95, abs=0.012
    )


def small_rows(largest: float, kernel: TokenProjector | None = None) -> dict[str, object]:
    found = SimpleNamespace(
        status=Status.CONVERGED, error=0.2, residual=0.01, products=10, value=0.5, note=""
    )
    found.kernel_gain = 1e-9
    workspace = Workspace(
        nn.Identity(), None, None, None, "", Spending(), largest={"s": largest}, errors={"s": 0.1}
    )
    workspace.ends = lambda part: SimpleNamespace(shape=(12, 12))
    stack = Stack("s", (), None, None)
    rows = deep._small_rows(workspace, stack, kernel, found, "method")
    return {row.quantity.removeprefix("jacobian/"): row for row in rows}


def test_the_small_end_in_rows() -> None:
    rows = small_rows(4.0)
    assert (rows["sigma-min"].value, rows["condition"].value, rows["rank"].value) == (0.5, 8.0, 12.0)
    assert "relative error ≤ 0.4: σ_max and σ_min (80% confidence)" in rows["condition"].how
    assert "relative error ≤ 0.2 (99.9% confidence)" in rows["sigma-min-nonzero"].how
    assert deep.condition_error(0.1, 0.2) == pytest.approx(1.1 / 0.8 - 1)
    assert deep.condition_error(0.1, 1.0) == math.inf


def test_the_small_end_outside_of_a_kernel() -> None:
    rows = small_rows(4.0, TokenProjector(torch.eye(4)[None, :, :2].repeat(3, 1, 1)))
    assert (rows["sigma-min"].value, rows["sigma-min-nonzero"].value, rows["rank"].value) == (0.0, 0.5, 6.0)


def test_a_condition_beyond_the_ranks_tolerance_leaves_no_rank() -> None:
    assert small_rows(1e6)["rank"].value is None


def test_an_estimate_whose_error_is_larger_is_none() -> None:
    assert deep._estimated("q", "s", Estimate(2.0, 2.5, 0.0), "").value is None
    assert deep._estimated("q", "s", Estimate(2.0, 1.0, 0.5), "").value == 2.0


def test_a_stacks_entry_is_shifted_by_noise_of_its_size_at_both_steps() -> None:
    model, batch = gpt(4, "pre"), ids(3)[:1]
    anatomy = read_anatomy(model, batch)
    with measuring(model):
        held = hold(model, anatomy, one_sequence(model, batch, anatomy))
    entry = anatomy.stacks[0].blocks[0].entry
    long, short = held.shifted[entry]
    torch.testing.assert_close(long, short)
    noise = torch.randn(long.shape, generator=torch.Generator().manual_seed(7919)).to(long)
    size = held.tensors[entry].detach().square().mean().sqrt()
    torch.testing.assert_close(long, size * noise)


@pytest.mark.parametrize(("eps", "lost"), [(1e-5, 2), (1.0, 1)])
def test_a_norms_kernel_has_the_direction_of_z_only_where_it_is_erased(eps: float, lost: int) -> None:
    model, batch = gpt(4, "post"), ids(3)[:1]
    for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
        norm.eps = eps
    anatomy = read_anatomy(model, batch)
    with measuring(model):
        feed = one_sequence(model, batch, anatomy)
        workspace = Workspace(model, anatomy, feed, hold(model, anatomy, feed), "", Spending())
        block: BlockRead = anatomy.blocks[0]
        assert kernel_of(workspace, block).dimension == lost * 3


def test_one_sequence_with_the_same_ops_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Model(8, lambda: Block(8, "pre")), ids(3)
    anatomy = read_anatomy(model, batch)
    read = sys.modules["normscope.probes.jacobian.one_sequence"]
    with measuring(model):
        again = fed_alike(model, anatomy, batch[:1], "B = 1")
        monkeypatch.setattr(read, "read_anatomy", pytest.fail)
        feed = one_sequence(model, batch, anatomy)
    assert feed.note == "B = 1"
    assert feed.names == again.names


VIEW, ADD = "aten.view.default", "aten.add.Tensor"
OPS = [("a", 0, VIEW, 0), ("a", 0, ADD, 0), ("b", 0, ADD, 0)]


@pytest.mark.parametrize(
    ("site", "others", "same"),
    [
        (("a", ADD), OPS, True),
        (("a", ADD), OPS[1:], True),
        (("b", VIEW), OPS[1:], True),
        (("a", VIEW), OPS[1:], False),
        (("b", ADD), [OPS[0], OPS[2]], False),
        (("b", ADD), [OPS[0], OPS[2], OPS[1]], False),
    ],
)
def test_other_views_count_only_beside_a_site_at_a_view(
    site: tuple[str, str], others: list[tuple[str, int, str, int]], same: bool
) -> None:
    module, op = site
    assert same_sites([Site(module=module, call=0, op=op, nth=0, output=0)], OPS, others) == same
