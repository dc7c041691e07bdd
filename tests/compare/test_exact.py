"""Ops that PyTorch has in narrow types only, in float64."""

import pytest
import torch
from torch import Tensor

from normscope.compare.exact import exact

ENDS = [2, 2, 7]


def dense(x: Tensor, y: Tensor) -> Tensor:
    """The grouped product by a loop over the groups."""
    parts = list(zip([0, *ENDS], ENDS, strict=False))
    if x.dim() == y.dim() == 2:
        return torch.stack([x[:, i:j] @ y[i:j] for i, j in parts])
    rows = [x[i:j] @ y[g] if x.dim() == 2 else x[g] @ y[:, i:j] for g, (i, j) in enumerate(parts)]
    return torch.cat(rows, 0 if x.dim() == 2 else 1)


@pytest.mark.parametrize(("x", "y"), [((7, 4), (3, 4, 8)), ((3, 4, 8), (8, 7)), ((4, 7), (7, 8))])
def test_grouped_products_are_exact(x: tuple[int, ...], y: tuple[int, ...]) -> None:
    a, b = (torch.randn(shape, dtype=torch.float64) for shape in (x, y))
    with exact():
        found = torch._grouped_mm(a, b, torch.tensor(ENDS, dtype=torch.int32))
    torch.testing.assert_close(found, dense(a, b), rtol=1e-14, atol=1e-14)


def test_rows_after_the_last_group_are_zero() -> None:
    a, b = torch.randn(9, 4, dtype=torch.float64), torch.randn(3, 4, 8, dtype=torch.float64)
    with exact():
        found = torch._grouped_mm(a, b, torch.tensor(ENDS, dtype=torch.int32))
    assert not found[7:].any()
    assert found[:7].any()


def test_narrow_types_are_wide_wherever_an_op_is_asked_for_them() -> None:
    x = torch.randn(3, dtype=torch.float64)
    with exact():
        found = [
            x.to(torch.float32),
            x.to(dtype=torch.bfloat16),
            x.float(),
            x.sum(dtype=torch.float16),
            torch.ones(3, dtype=torch.float32),
            torch.tensor([1.0], dtype=torch.float32),
            torch._foreach_add([x, x], 1.0)[0],
        ]
        whole = x.to(torch.int64)
    assert {each.dtype for each in found} == {torch.float64}
    assert whole.dtype == torch.int64
