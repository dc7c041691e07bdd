"""Subjects of the laws: operators and spectra of every kind, and real blocks of every scheme.

Each subject comes with its dense float64 matrix, which is made without the operator. A new operator is one
entry of OPERATORS, a new spectrum one of `spectra_of`; a new scheme of `normscope.nn` joins by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from drawn_maps import drawn
from drawn_maps import orthogonal as new_orthogonal
from jacobian_cases import dense_jacobian
from torch import Tensor

from normscope.linalg import (
    Composition,
    Deflated,
    JacobianOperator,
    Layer,
    LinearMap,
    Matrix,
    Projected,
    Restriction,
    Shifted,
    Transposed,
)
from normscope.nn import Decoder, build

F64 = torch.float64
orthogonal = cache(new_orthogonal)

N = 28
"""Singular values inside a projection."""

SMALL = 1e-12
"""Share of σ_max up to which the dense reference counts a value as zero."""


@dataclass(frozen=True)
class Factor:
    """An operator and its expected matrix, with the kernels of that matrix."""

    op: LinearMap
    dense: Tensor
    left_kernel: Tensor = field(init=False)
    kernel: Tensor = field(init=False)

    def __post_init__(self) -> None:
        u, s, vh = torch.linalg.svd(self.dense)
        rank = int((s > SMALL * s[0]).sum())
        object.__setattr__(self, "left_kernel", u[:, rank:])
        object.__setattr__(self, "kernel", vh[rank:].T)

    @property
    def layer(self) -> Layer:
        """The subject as a factor of a stack, with its kernels."""
        left = self.left_kernel if self.left_kernel.shape[1] else None
        return Layer(self.op, left_kernel=left, kernel=self.kernel if self.kernel.shape[1] else None)


@dataclass(frozen=True)
class Subject:
    """A stack of maps, J_1 first."""

    name: str
    factors: Sequence[Factor]

    @property
    def whole(self) -> Factor:
        """The first map, used by the algorithms for one map."""
        return self.factors[0]

    @property
    def product(self) -> Tensor:
        """The dense product of all."""
        matrix = self.factors[0].dense
        for factor in self.factors[1:]:
            matrix = factor.dense @ matrix
        return matrix


def spectra_of(n: int) -> dict[str, Tensor]:
    """Singular values (n,) by name; the number after "condition" is σ_max/σ_min."""
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(5), dtype=F64)
    conditions = {
        f"condition {k:g}": torch.logspace(0, -torch.tensor(k).log10(), n, dtype=F64)
        for k in (35, 1e3, 1e6, 1e9)
    }
    return {
        "condition 1": torch.full((n,), 3.0, dtype=F64),
        "random": 0.2 + uniform,
        "clustered": torch.cat((1 + 1e-7 * uniform[: n // 2], 0.3 + 1e-3 * uniform[n // 2 :])),
        "rank deficient": torch.where(torch.arange(n) < n // 4, 0.0, 0.3 + uniform),
        **conditions,
    }


def _shifted(matrix: Tensor, junk: Tensor) -> LinearMap:
    eye = torch.eye(len(matrix), dtype=F64)
    return Shifted(Matrix((matrix - 0.75 * eye) / -2), alpha=0.75, beta=-2.0)


def _restriction(matrix: Tensor, junk: Tensor) -> LinearMap:
    m, n = matrix.shape
    rows, columns = (
        torch.randperm(size + 9, generator=torch.Generator().manual_seed(7))[:size] for size in (m, n)
    )
    large = junk[: m + 9, : n + 9].clone()
    large[rows.unsqueeze(1), columns] = matrix
    return Restriction(Matrix(large), rows=rows, columns=columns)


def _between(matrix: Tensor, junk: Tensor) -> tuple[Tensor, Tensor]:
    """A larger matrix [m + 5, n + 5] that equals `matrix` on a subspace; and its part outside."""
    m, n = matrix.shape
    left, right = orthogonal(m + 5, seed=21), orthogonal(n + 5, seed=22)
    inside = left[:, :m] @ matrix @ right[:, :n].T
    outside = left[:, m:] @ junk[:5, :5] @ right[:, n:].T
    return inside, inside + outside


def _projected(matrix: Tensor, junk: Tensor) -> LinearMap:
    m, n = matrix.shape
    left, right = orthogonal(m + 5, seed=21)[:, :m], orthogonal(n + 5, seed=22)[:, :n]
    return Projected(Matrix(_between(matrix, junk)[1]), left=left, right=right)


def _deflated(matrix: Tensor, junk: Tensor) -> LinearMap:
    m, n = matrix.shape
    left, right = orthogonal(m + 5, seed=21)[:, m:], orthogonal(n + 5, seed=22)[:, n:]
    return Deflated(Matrix(_between(matrix, junk)[1]), kernel=right, left_kernel=left)


def _composition(matrix: Tensor, junk: Tensor) -> LinearMap:
    turn = orthogonal(len(matrix), seed=23)
    return Composition(Matrix(turn), Matrix(turn.T @ matrix))


def _jacobian(matrix: Tensor, junk: Tensor) -> LinearMap:
    return JacobianOperator(
        lambda x: torch.tanh(matrix @ torch.sin(x)),
        torch.zeros(matrix.shape[1], dtype=F64, device=matrix.device),
    )


def _on_graph(matrix: Tensor, junk: Tensor) -> LinearMap:
    x = torch.zeros(matrix.shape[1], dtype=F64, requires_grad=True)
    return JacobianOperator.on_graph(matrix @ torch.sinh(x), x)


OPERATORS: dict[str, Callable[[Tensor, Tensor], LinearMap]] = {
    "matrix": lambda matrix, junk: Matrix(matrix),
    "transposed": lambda matrix, junk: Transposed(Matrix(matrix.T)),
    "composition": _composition,
    "restriction": _restriction,
    "shifted": _shifted,
    "projected": _projected,
    "deflated": _deflated,
    "jacobian": _jacobian,
    "jacobian transposed": lambda matrix, junk: _jacobian(matrix.T, junk).T,
    "jacobian on a graph": _on_graph,
}
"""Name → (matrix, junk that must not be seen) → an operator with the singular values of the matrix."""

if torch.cuda.is_available():
    OPERATORS |= {
        "matrix on cuda": lambda matrix, junk: Matrix(matrix.cuda()),
        "jacobian on cuda": lambda matrix, junk: _jacobian(matrix.cuda(), junk),
    }

LARGER = ("projected", "deflated")
"""Operators with five more dimensions, which are kernels."""


def synthetic(operator: str, spectrum: str, *, depth: int = 3) -> Subject:
    """Three maps of one operator; the spectrum is that of the first. Left vectors of one are right vectors of
    the next, so that their logs add."""
    values = spectra_of(N)[spectrum]
    turns = [orthogonal(N, seed=10 + i) for i in range(depth + 1)]
    junk = 50 * drawn(N + 9, N + 9, seed=9)
    factors = []
    for i in range(depth):
        root = values if i == 0 else torch.where(values > 0, values ** (1 / 8), 0.0)
        matrix = turns[i + 1] @ torch.diag(root) @ turns[i].T
        dense = _between(matrix, junk)[0] if operator in LARGER else matrix
        factors.append(Factor(OPERATORS[operator](matrix, junk), dense))
    return Subject(f"{operator}, {spectrum}", factors)


def real_blocks(scheme: str, *, depth: int = 3, eps: float = 1e-15) -> Subject:
    """The blocks of a small decoder with changed weights; several streams count as one."""
    torch.manual_seed(1)
    model = build(
        "decoder", scheme=scheme, depth=depth, width=8, heads=2, hidden=16, context=4, vocab=16, eps=eps
    )
    assert isinstance(model, Decoder)
    model = model.double().eval()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter += 0.1 * drawn(*parameter.shape, seed=i)
        state = model.scheme.join.enter(drawn(1, 2, 8, seed=5), lambda x: x)
    shapes = [each.shape for each in state] if isinstance(state, tuple) else None
    point, factors = _flat(state), []
    for block in model.blocks:

        def f(x: Tensor, block: torch.nn.Module = block, whole: bool = shapes is None) -> Tensor:
            return _flat(block(x.reshape(state.shape) if whole else _parted(x, shapes)))

        factors.append(Factor(JacobianOperator(f, point), dense_jacobian(f, point)))
        with torch.no_grad():
            point = f(point)
    return Subject(f"blocks of {scheme}", factors)


def _flat(state: Tensor | tuple[Tensor, ...]) -> Tensor:
    parts = state if isinstance(state, tuple) else (state,)
    return torch.cat([part.reshape(-1) for part in parts])


def _parted(x: Tensor, shapes: list[torch.Size]) -> tuple[Tensor, ...]:
    parts = x.split([shape.numel() for shape in shapes])
    return tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
