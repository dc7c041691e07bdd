"""The whole Jacobian of an f that treats a leading batch row by row: all its rows at once.

B copies of x go through f in one forward; one VJP whose cotangent is another basis vector in every copy then
gives B rows of J. An operator's `dense` gives the same by batched VJPs of one x; here the products of f
themselves are batched, and no op needs a batching rule.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from normscope.linalg.differences import require_tangent
from normscope.linalg.function import require_output, require_point, untouched
from normscope.linalg.graph import NoPath, vjp


def rowwise_jacobian(f: Callable[[Tensor], Tensor], x: Tensor, *, chunk: int | None = None) -> Tensor:
    """J = ∂f/∂x [m, n] of one row, from copies of it in a batch.

    Cost, in forwards of one row, with B = min(chunk, m) copies: B for the forward, 2·⌈m/B⌉·B for the VJPs,
    and 4 to check f (6 or 8 where it has kinks); for B = m about 3m in one go.

    Args:
        f: (B, *row) → (B, …), row b of the result a function of row b alone, the same for all rows.
        x: the point, one row without the batch axis; n elements.
        chunk: copies at once, default all m; memory grows with it.

    Raises:
        TypeError: x is no tensor.
        ValueError: x not floating or empty; f(x) no floating-point tensor; chunk under 1; f writes into x;
            where f of a batch is not f of its rows: no leading axis of the same size, or rows that depend on
            each other.
        TangentError: where no path leads from x to f(x), and where J is not that of finite differences.

    Warns:
        RuntimeWarning: where the round-off of f hides J from finite differences.

    Example:
        >>> weight = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
        >>> rowwise_jacobian(lambda x: x @ weight.T, torch.ones(2))
        tensor([[1., 2.],
                [0., 3.]])
    """
    require_point("x", x)
    x = x.detach()
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}: expected at least 1")
    row = _require_rows_alike(f, x)
    m, n = row.numel(), x.numel()
    num_copies = min(chunk or m, m)
    with torch.enable_grad():
        copies = x.expand(num_copies, *x.shape).clone().requires_grad_()
        with untouched():
            y = f(copies)
    if not y.requires_grad:
        raise NoPath
    _require_close(y.detach().reshape(num_copies, -1)[-1], row, f"a batch of {num_copies} copies")
    parts = [_rows(y, copies, some) for some in torch.arange(m, device=x.device).split(num_copies)]
    jacobian = torch.cat(parts).reshape(m, n)
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x)
    hidden = require_tangent(lambda z: f(z.unsqueeze(0)), x, v, jacobian @ v.reshape(-1), row)
    if hidden:
        warnings.warn(hidden, RuntimeWarning, stacklevel=2)
    return jacobian


def _rows(y: Tensor, copies: Tensor, indices: Tensor) -> Tensor:
    cotangents = torch.zeros_like(y).reshape(len(y), -1)
    cotangents[torch.arange(len(indices), device=y.device), indices] = 1
    return vjp(y, copies, cotangents.reshape(y.shape))[: len(indices)]


def _require_rows_alike(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f of x alone, flat; beside another row it must be the same."""
    other = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x)
    other = other * x.double().square().mean().sqrt().clamp_min(1e-3).to(x)
    with torch.no_grad():
        alone, beside = f(x.unsqueeze(0).clone()), f(torch.stack([other, x]))
    for y, size in ((alone, 1), (beside, 2)):
        require_output(y)
        if y.dim() == 0 or len(y) != size:
            raise ValueError(f"f of a batch of {size} has shape {tuple(y.shape)}: expected {size} rows")
    _require_close(beside[1].reshape(-1), alone.reshape(-1), "a batch with another row")
    return alone.reshape(-1)


def _require_close(row: Tensor, alone: Tensor, where: str) -> None:
    gap, size = float((row - alone).double().norm()), float(alone.double().norm())
    if not gap <= torch.finfo(alone.dtype).eps ** 0.5 * size:
        raise ValueError(
            f"rows are not treated alike: f of the row in {where} differs from f of the row alone by "
            f"{gap:.2g} at size {size:.2g}; expected a function of each row alone"
        )
