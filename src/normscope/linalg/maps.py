"""Maps made of maps: dense matrices, compositions, restrictions, shifts, projections, deflations.

Each takes a `LinearMap` and is one. Batches are rows: matmat maps [k, n] to [k, m], rmatmat [k, m] to [k, n].
Every map counts its own products, one per vector; its parts count theirs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from normscope.linalg.golub_kahan import LinearMap, round_off_of
from normscope.linalg.subspaces import Kernel, Projector, projector

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


class BaseMap(ABC):
    """Base of the maps: checks, counts, batches, `.T`, `@`, `.to_scipy()`.

    Attributes:
        shape: (m, n).
        products: Jv and Jᵀu spent on this map itself.
        round_off: error of a product relative to the sizes of the parts: the sum of theirs, else ε of the
            dtype. Where parts cancel, it is larger relative to ‖J‖; `sigma_max` detects that.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        parts: Sequence[LinearMap] = (),
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.products = 0
        self._parts = parts

    @property
    def round_off(self) -> float:
        """Error of a product relative to the sizes of the parts."""
        return sum(map(round_off_of, self._parts)) if self._parts else torch.finfo(self.dtype).eps

    @abstractmethod
    def _forward(self, rows: Tensor) -> Tensor:
        """[k, n] → [k, m]."""

    @abstractmethod
    def _backward(self, rows: Tensor) -> Tensor:
        """[k, m] → [k, n]."""

    def matvec(self, v: Tensor) -> Tensor:
        """Jv [m] of v [n]."""
        return self._forward(self._checked(v, 1, 1, "Jv").unsqueeze(0)).squeeze(0)

    def rmatvec(self, u: Tensor) -> Tensor:
        """Jᵀu [n] of u [m]."""
        return self._backward(self._checked(u, 1, 0, "Jᵀu").unsqueeze(0)).squeeze(0)

    def matmat(self, vectors: Tensor) -> Tensor:
        """Rows Jv [k, m] for the rows of `vectors` [k, n]."""
        return self._forward(self._checked(vectors, 2, 1, "Jv"))

    def rmatmat(self, cotangents: Tensor) -> Tensor:
        """Rows Jᵀu [k, n] for the rows of `cotangents` [k, m]."""
        return self._backward(self._checked(cotangents, 2, 0, "Jᵀu"))

    @property
    def T(self) -> "Transposed":
        """Jᵀ [n, m]."""
        return Transposed(self)

    def __matmul__(self, other: Any) -> Any:
        """J @ v [n], J @ V [n, k] column by column, or the composition with another map."""
        if not isinstance(other, Tensor):
            return Composition(self, other)
        return self.matvec(other) if other.dim() == 1 else self.matmat(other.T).T

    def to_scipy(self) -> "LinearOperator":
        """The same map for `scipy.sparse.linalg`, on NumPy arrays."""
        from scipy.sparse.linalg import LinearOperator

        def on_arrays(product: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], np.ndarray]:
            return lambda a: product(torch.tensor(a, dtype=self.dtype).reshape(-1)).cpu().numpy()

        dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        return LinearOperator(
            self.shape, matvec=on_arrays(self.matvec), rmatvec=on_arrays(self.rmatvec), dtype=dtype
        )

    def _checked(self, vectors: Tensor, num_axes: int, side: int, product: str) -> Tensor:
        size = self.shape[side]
        if vectors.dim() != num_axes or vectors.shape[-1] != size:
            expected = f"({size},)" if num_axes == 1 else f"(k, {size})"
            raise ValueError(
                f"{product}: a tensor of shape {tuple(vectors.shape)} for a map of shape {self.shape}; "
                f"expected {expected}"
            )
        self.products += 1 if num_axes == 1 else len(vectors)
        return vectors.to(self.device, self.dtype)


class Matrix(BaseMap):
    """A dense matrix as a map. A product costs O(m n).

    Args:
        matrix: J (m, n).

    Examples:
        >>> Matrix(torch.tensor([[1.0, 2.0], [0.0, 3.0]])).matvec(torch.tensor([1.0, 1.0]))
        tensor([3., 3.])
    """

    def __init__(self, matrix: Tensor) -> None:
        if not isinstance(matrix, Tensor):
            raise ValueError(f"a {type(matrix).__name__}: expected a tensor (m, n); see torch.as_tensor")
        if matrix.dim() != 2 or not matrix.numel():
            raise ValueError(f"a tensor of shape {tuple(matrix.shape)}: expected a matrix (m, n), not empty")
        if not matrix.is_floating_point():
            raise ValueError(f"a matrix of {matrix.dtype}: expected a floating-point one; see .double()")
        super().__init__((matrix.shape[0], matrix.shape[1]), matrix.dtype, matrix.device)
        self.matrix = matrix

    def _forward(self, rows: Tensor) -> Tensor:
        return rows @ self.matrix.T

    def _backward(self, rows: Tensor) -> Tensor:
        return rows @ self.matrix


class Transposed(BaseMap):
    """Jᵀ of any map J [m, n]. A product costs one product of that map.

    Args:
        of: the map.

    Examples:
        >>> Transposed(Matrix(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))).matvec(torch.tensor([1.0, 1.0]))
        tensor([1., 5.])
    """

    def __init__(self, of: LinearMap) -> None:
        super().__init__((of.shape[1], of.shape[0]), of.dtype, of.device, parts=[of])
        self.of = of

    @property
    def T(self) -> Any:
        """The map itself, where it is one of ours."""
        return self.of if isinstance(self.of, BaseMap) else super().T

    def _forward(self, rows: Tensor) -> Tensor:
        return backward(self.of, rows)

    def _backward(self, rows: Tensor) -> Tensor:
        return forward(self.of, rows)


class Composition(BaseMap):
    """J = maps[0] @ maps[1] @ …: the last one acts first. A product costs one product of each map.

    Args:
        maps: maps of matching shapes, (m, k), (k, n), …

    Raises:
        ValueError: the shapes of two neighbours do not match.

    Examples:
        >>> twice = Matrix(2 * torch.eye(2))
        >>> Composition(twice, twice).matvec(torch.ones(2))
        tensor([4., 4.])
    """

    def __init__(self, *maps: LinearMap) -> None:
        if not maps:
            raise ValueError("a composition of no maps: expected at least one")
        for outer, inner in pairwise(maps):
            if outer.shape[1] != inner.shape[0]:
                raise ValueError(
                    f"a map of shape {outer.shape} after one of shape {inner.shape}: expected "
                    f"{inner.shape[0]} columns in the first"
                )
        super().__init__((maps[0].shape[0], maps[-1].shape[1]), maps[-1].dtype, maps[-1].device, parts=maps)
        self.maps = maps

    def _forward(self, rows: Tensor) -> Tensor:
        for each in reversed(self.maps):
            rows = forward(each, rows)
        return rows

    def _backward(self, rows: Tensor) -> Tensor:
        for each in self.maps:
            rows = backward(each, rows)
        return rows


class Restriction(BaseMap):
    """Some rows and columns of a map: ∂(some outputs)/∂(some inputs), the other inputs fixed.

    A product costs one product of the whole map.

    Args:
        of: the map [m, n].
        rows: indices of outputs (r,), default all.
        columns: indices of inputs (c,), default all.

    Raises:
        ValueError: indices that the map does not have, or that occur twice.

    Examples:
        >>> Restriction(Matrix(torch.eye(6)), rows=token_indices(1, width=3)).matvec(torch.arange(6.0))
        tensor([3., 4., 5.])
    """

    def __init__(self, of: LinearMap, *, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
        self._rows = _indices(rows, of.shape[0], "rows", of)
        self._columns = _indices(columns, of.shape[1], "columns", of)
        super().__init__((len(self._rows), len(self._columns)), of.dtype, of.device, parts=[of])
        self.of = of

    def _forward(self, rows: Tensor) -> Tensor:
        return forward(self.of, self._spread(rows, self._columns, self.of.shape[1]))[:, self._rows]

    def _backward(self, rows: Tensor) -> Tensor:
        return backward(self.of, self._spread(rows, self._rows, self.of.shape[0]))[:, self._columns]

    @staticmethod
    def _spread(rows: Tensor, indices: Tensor, size: int) -> Tensor:
        whole = rows.new_zeros(len(rows), size)
        whole[:, indices] = rows
        return whole


class Shifted(BaseMap):
    """αI + βA of a square map A: stream scale α, branch scale β; J − I for α = −1.

    A product costs one product of A.

    Args:
        of: A [n, n].
        alpha, beta: α and β.

    Raises:
        ValueError: a map that is not square.

    Examples:
        >>> Shifted(Matrix(torch.eye(2)), alpha=1.0, beta=0.5).matvec(torch.ones(2))
        tensor([1.5000, 1.5000])
    """

    def __init__(self, of: LinearMap, *, alpha: float = 1.0, beta: float = 1.0) -> None:
        if of.shape[0] != of.shape[1]:
            raise ValueError(f"αI + βA for A of shape {of.shape}: expected a square map")
        super().__init__(of.shape, of.dtype, of.device, parts=[of])
        self.of, self.alpha, self.beta = of, alpha, beta

    def _forward(self, rows: Tensor) -> Tensor:
        return self.alpha * rows + self.beta * forward(self.of, rows)

    def _backward(self, rows: Tensor) -> Tensor:
        return self.alpha * rows + self.beta * backward(self.of, rows)


class Projected(BaseMap):
    """P J Q with orthogonal projectors P and Q: J between two subspaces.

    A product costs one product of J and two projections, O(n r) for bases.

    Args:
        of: the map J [m, n].
        left: the kept subspace of outputs: an orthonormal basis (m, r), or a callable that projects the last
            axis of (…, m) onto it; default all.
        right: the same for inputs.

    Attributes:
        keep_left, keep_right: P and Q.

    Raises:
        ValueError: a basis of another size, or whose columns are not orthonormal.

    Examples:
        >>> first = torch.tensor([[1.0], [0.0]])
        >>> Projected(Matrix(torch.ones(2, 2)), left=first).matvec(torch.tensor([1.0, 2.0]))
        tensor([3., 0.])
    """

    def __init__(self, of: LinearMap, *, left: Kernel | None = None, right: Kernel | None = None) -> None:
        super().__init__(of.shape, of.dtype, of.device, parts=[of])
        self.of = of
        self.keep_left = projector(left, of.shape[0], of.dtype, of.device) or _identity
        self.keep_right = projector(right, of.shape[1], of.dtype, of.device) or _identity

    def _forward(self, rows: Tensor) -> Tensor:
        return self.keep_left(forward(self.of, self.keep_right(rows)))

    def _backward(self, rows: Tensor) -> Tensor:
        return self.keep_right(backward(self.of, self.keep_left(rows)))


class Deflated(Projected):
    """(I − P_left) J (I − P_right): J without its known kernels, projected at every product.

    A kernel that is projected out only once returns through round-off. A product costs one product of J and
    two projections, O(n r) for bases.

    Args:
        of: the map J [m, n].
        kernel: the right kernel {v : Jv = 0}: an orthonormal basis (n, r) (columns of zeros count as absent),
            or a callable that projects the last axis of (…, n) onto it.
        left_kernel: the same for {u : Jᵀu = 0}.

    Attributes:
        keep_left, keep_right: I − P_left and I − P_right.

    Raises:
        ValueError: a basis of another size, or whose columns are not orthonormal.

    Examples:
        >>> one = torch.ones(2, 1) / 2**0.5
        >>> Deflated(Matrix(torch.eye(2)), kernel=one).matvec(torch.tensor([2.0, 0.0]))
        tensor([ 1.0000, -1.0000])
    """

    def __init__(
        self, of: LinearMap, *, kernel: Kernel | None = None, left_kernel: Kernel | None = None
    ) -> None:
        super().__init__(of)
        self.keep_left = _complement(projector(left_kernel, of.shape[0], of.dtype, of.device))
        self.keep_right = _complement(projector(kernel, of.shape[1], of.dtype, of.device))


def _identity(vector: Tensor) -> Tensor:
    return vector


def _complement(onto: Projector | None) -> Projector:
    return _identity if onto is None else lambda vector: vector - onto(vector)


def token_indices(token: int, *, width: int) -> Tensor:
    """Coordinates (d,) of one token in a flattened (T, d), for `Restriction`. Costs no product.

    Args:
        token: its number, from 0.
        width: d.

    Examples:
        >>> token_indices(2, width=3)
        tensor([6, 7, 8])
    """
    return torch.arange(token * width, (token + 1) * width)


def forward(op: LinearMap, rows: Tensor) -> Tensor:
    """Rows Jv [k, m] of [k, n] by any map: batched where it can."""
    return _batched(op, "matmat", op.matvec, rows)


def backward(op: LinearMap, rows: Tensor) -> Tensor:
    """Rows Jᵀu [k, n] of [k, m] by any map: batched where it can."""
    return _batched(op, "rmatmat", op.rmatvec, rows)


def _batched(op: LinearMap, name: str, one: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    batch = getattr(op, name, None)
    together: Tensor = (
        torch.stack([one(row) for row in rows]) if len(rows) == 1 or batch is None else batch(rows)
    )
    return together


def _indices(given: Tensor | None, size: int, name: str, of: LinearMap) -> Tensor:
    if given is None:
        return torch.arange(size, device=of.device)
    if given.dtype is torch.bool or given.is_floating_point():
        raise ValueError(f"{name} of {given.dtype}: expected indices, whole numbers; see torch.nonzero")
    indices = given.reshape(-1).to(of.device)
    inside = bool(((indices >= 0) & (indices < size)).all())
    if not inside or len(indices.unique()) != len(indices):
        raise ValueError(
            f"{name} of a map of shape {of.shape}: expected different indices from 0 to {size - 1}, "
            f"got {given.tolist()}"
        )
    return indices
