"""Batches of products by copies of x: k products are one VJP of f on a batch of k copies.

A product with a small map is mostly the overhead of hundreds of small kernels. vmap over a held graph splits
the backward of LayerNorm and GELU into elementwise ops and saves little; f's own kernels on k copies save the
whole overhead. This pays while x is small. The graph of the copies is held.
"""

import torch
from torch import Tensor

from normscope.linalg.function import MeasuredFunction
from normscope.linalg.graph import KeptGraph, TangentError

MOST_ELEMENTS = 2**15  # elements of all copies together: bounds their memory; more copies save no time


class Copies:
    """The held graph of f on copies of x, made at the first product.

    Args:
        f: the function, which must treat a leading axis row by row; that is checked.
        x: the point.
        y: f(x).
    """

    def __init__(self, f: MeasuredFunction, x: Tensor, y: Tensor) -> None:
        self._f, self._x, self._y = f, x.detach(), y.detach()
        self._graph: KeptGraph | None = None
        self._num = 0
        self._joined: bool | None = None
        self.usable = 2 * x.numel() <= MOST_ELEMENTS

    def pull_rows(self, cotangents: Tensor) -> Tensor:
        """Rows Jᵀu (k, *x.shape) for rows u (k, *y.shape)."""
        graph = self._held(len(cotangents))
        parts = [graph.pull(self._whole(some, graph.outputs)) for some in cotangents.split(self._num)]
        return self._rows(parts, len(cotangents), self._x)

    def push_rows(self, tangents: Tensor) -> Tensor:
        """Rows Jv (k, *y.shape) for rows v (k, *x.shape)."""
        graph = self._held(len(tangents))
        parts = [graph.push(self._whole(some, graph.inputs)) for some in tangents.split(self._num)]
        return self._rows(parts, len(tangents), self._y)

    def _whole(self, rows: Tensor, like: Tensor) -> Tensor:
        """Rows in the shape of the batch, filled up with zeros."""
        whole = rows.new_zeros(self._num, *rows.shape[1:])
        whole[: len(rows)] = rows
        return whole.reshape(like.shape).to(like)

    @staticmethod
    def _rows(parts: list[Tensor], num_rows: int, one: Tensor) -> Tensor:
        return torch.cat([part.reshape(-1, *one.shape) for part in parts])[:num_rows]

    def _held(self, num_rows: int) -> KeptGraph:
        num = min(num_rows, MOST_ELEMENTS // self._x.numel())
        if self._graph is None or num > self._num:
            self._graph, self._num = None, num  # free the old graph first
            outputs, inputs = self._f.with_graph(self._batch([self._x] * num))
            self._require_rows(outputs, [self._y] * num)
            self._graph = KeptGraph(outputs, inputs, inputs, lean=True)
        return self._graph

    def _batch(self, rows: list[Tensor]) -> Tensor:
        """The rows along the leading axis that x has, or along a new one."""
        if self._joined is None:
            self._joined = self._joins()
        return torch.cat(rows) if self._joined else torch.stack(rows)

    def _joins(self) -> bool:
        """Whether rows can be joined along x's own leading axis: f then treats each row alone.

        Raises:
            TangentError: a new axis is not possible either.
        """
        generator = torch.Generator().manual_seed(0)
        other = torch.randn(self._x.shape, generator=generator, dtype=torch.float64).to(self._x)
        other *= self._x.square().mean().sqrt()
        with torch.no_grad():
            expected = [self._f(other), self._y]
            for join in (torch.cat, torch.stack) if self._x.dim() > 1 else (torch.stack,):
                try:
                    self._require_rows(self._f(join([other, self._x])), expected)
                except (RuntimeError, ValueError, IndexError, AssertionError):  # a shape that f does not take
                    continue
                return join is torch.cat
        raise TangentError("f does not treat a leading axis row by row")

    @staticmethod
    def _require_rows(y: Tensor, expected: list[Tensor]) -> None:
        size = len(expected)
        if y.numel() != size * expected[0].numel() or (y.dim() and len(y) % size):
            raise TangentError(f"f of a batch of {size} has shape {tuple(y.shape)}")
        for row, alone in zip(y.detach().reshape(size, -1), expected, strict=True):
            gap, scale = float((row - alone.reshape(-1)).norm()), float(alone.norm())
            if not gap <= torch.finfo(alone.dtype).eps ** 0.5 * scale:
                raise TangentError(f"f of a row in a batch differs by {gap:.2g} at size {scale:.2g}")
