"""Merging of the ranks' statistics against exact fractions, for any number of ranks, in one process."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normscope.errors import UsageError
from normscope.kernels import sharded_layer_norm
from normscope.kernels.row_blocks import NUMBERS, row_blocks
from normscope.kernels.sharded_layout import shard_sizes
from normscope.kernels.sharded_step import Moments, merged, slots


def moments_over_ranks(x: Tensor, ranks: int) -> Moments:
    """Moments of rows (rows, d), as `ranks` ranks get them."""
    sizes = shard_sizes(x.shape[-1], ranks)
    tables = [slots(shard, sizes, rank) for rank, shard in enumerate(x.split(sizes, -1))]
    return merged(torch.stack(tables).sum(0), sizes)


def exact_moments(row: Tensor) -> tuple[Fraction, Fraction]:
    values = [Fraction(value) for value in row.tolist()]
    mean = sum(values, Fraction()) / len(values)
    return mean, sum(((value - mean) ** 2 for value in values), Fraction()) / len(values)


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 40),
    ranks=st.integers(1, 9),
    offset=st.sampled_from([0.0, 1.0, 1e3, -1e5, 1e7]),
    spread=st.sampled_from([0.0, 10.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 100),
)
def test_moments_are_right_to_the_last_digits_at_every_offset(
    width: int, ranks: int, offset: float, spread: float, dtype: torch.dtype, seed: int
) -> None:
    x = torch.randn(1, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = (x + offset + spread * torch.arange(width)).to(dtype)
    pivot, shift, variance = (Fraction(float(each)) for each in moments_over_ranks(x, ranks))
    mean, exact = exact_moments(x[0])
    eps, std = torch.finfo(dtype).eps, float(exact) ** 0.5
    assert abs(float(pivot + shift - mean)) <= 4 * eps * std + 1e-300
    assert abs(float(variance - exact)) <= 16 * eps * float(exact)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_shards_are_those_of_torch_chunk(ranks: int) -> None:
    for width in range(1, 30):
        chunks = [len(each) for each in torch.ones(width).chunk(ranks)]
        assert shard_sizes(width, ranks) == (*chunks, *[0] * (ranks - len(chunks)))


def test_the_naive_sums_have_no_digit_where_these_have_all() -> None:
    """The law above can fail: float32's E[x²] − E[x]² is off by more than the variance at mean/std 1e4."""
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)) + 1e4
    exact = float(exact_moments(x[0])[1])
    naive = float((x.square().mean(-1) - x.mean(-1).square()).item())
    assert abs(naive - exact) > exact
    assert abs(float(moments_over_ranks(x, 4).variance) - exact) < 1e-6 * exact


def test_rows_are_one_block_while_a_graph_is_recorded() -> None:
    """A graph of blocks would have an operation for each block."""
    x = torch.ones(NUMBERS // 64 + 1, 64)
    assert len(list(row_blocks(x, x))) == 1
    with torch.no_grad():
        blocks = [first for first, _ in row_blocks(x, x)]
    assert [len(block) for block in blocks] == [NUMBERS // 64, 1]


@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf")])
def test_an_infinite_epsilon_is_refused(eps: float) -> None:
    with pytest.raises(UsageError, match="eps="):
        sharded_layer_norm(torch.ones(2, 4), eps=eps)
