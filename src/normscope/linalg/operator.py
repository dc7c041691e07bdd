"""The Jacobian of a map as a linear operator on a held graph.

    Jᵀu  [m] → [n]   one VJP over the graph of y = f(x)
    Jv   [n] → [m]   one VJP over the graph of u ↦ Jᵀu ("double backward"); that graph is built once and held

Each costs about one forward of f; setting up costs about two more. Source: Townsend 2017, "A new trick for
calculating Jacobian vector products"; Pearlmutter 1994.

Attention must have *run* under the math backend (`torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`) with the
fast path of `torch.backends.mha` off: the fused kernels have no double backward. That is the caller's duty.

A hand-written backward may be wrong, or be constant for autograd, and then Jv comes out wrong or zero
without a word. So each Jv is held against Jᵀu of one random u (it costs two dot products), and where f
itself is known, the first tangent is held against central finite differences. What fails raises
`TangentError`: no figure is better than a wrong one.
"""

from collections.abc import Callable

import scipy.sparse.linalg
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from normscope.linalg.graph import NO_PATH, TangentError
from normscope.linalg.maps import as_scipy


class JacobianOperator:
    """J = ∂f/∂x [m, n] of a function at a point; vectors go in and come out flat.

    Args:
        f: the function; it is run once with a graph, and twice without for the tangent check.
        x: the point, a tensor of any shape, n elements.
        seed: of the random vectors that the checks use.

    Attributes:
        shape: (m, n).
        products: Jv and Jᵀu spent so far, by this operator and its transpose; set-up is not in it.

    Raises:
        TangentError: where Jv is not that of finite differences to 2 % (a backward that is not the derivative
            of its forward, a straight-through estimator, a part without gradient), where the graph has no
            second derivative (fused attention, `torch.compile`), and where Jv contradicts Jᵀu.

    Example:
        >>> op = JacobianOperator(lambda x: x**2, torch.tensor([1.0, 2.0]))
        >>> op @ torch.tensor([1.0, 1.0])
        tensor([2., 4.])
    """

    def __init__(self, f: Callable[[Tensor], Tensor], x: Tensor, *, seed: int = 0) -> None:
        with torch.enable_grad():
            inputs = x.detach().clone().requires_grad_()
            self._hold(f(inputs), inputs, inputs, seed)
        self._compare_with_differences(f)

    @classmethod
    def on_graph(
        cls, outputs: Tensor, inputs: Tensor, *, edge: GradientEdge | None = None, seed: int = 0
    ) -> "JacobianOperator":
        """J = ∂y/∂x [m, n] of tensors that are already in a graph.

        Args:
            outputs: y, of m elements, computed from `inputs`.
            inputs: x, of n elements; a leaf or any intermediate tensor that requires grad.
            edge: where x is in the graph, where that is not `inputs` itself: the tensor as it was before an
                in-place op.
            seed: of the random cotangent that every Jv is checked with.

        Raises:
            TangentError: at the first product, where no path leads from `inputs` to `outputs`, where the
                graph has no second derivative, and where Jv contradicts Jᵀu.

        Example:
            >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
            >>> op = JacobianOperator.on_graph(x**2, x)
            >>> op @ torch.tensor([1.0, 1.0])
            tensor([2., 4.])
        """
        op = cls.__new__(cls)
        op._hold(outputs, inputs, inputs if edge is None else edge, seed)
        return op

    def _hold(self, outputs: Tensor, inputs: Tensor, source: Tensor | GradientEdge, seed: int) -> None:
        for name, tensor in (("outputs", outputs), ("inputs", inputs)):
            if not tensor.is_floating_point():
                raise ValueError(f"{name} of dtype {tensor.dtype}: expected a floating-point tensor")
        self.shape = (outputs.numel(), inputs.numel())
        self.dtype, self.device = inputs.dtype, inputs.device
        self.products = 0
        self._outputs, self._inputs = outputs, inputs
        self._source: Tensor | GradientEdge = source
        self._generator = torch.Generator().manual_seed(seed)
        self._held: tuple[Tensor, Tensor] | None = None

    @property
    def T(self) -> "TransposedOperator":
        """Jᵀ [n, m], sharing graph and count."""
        return TransposedOperator(self)

    def connected(self) -> bool:
        """Whether a path leads from the inputs to the outputs; walks the graph, costs no product."""
        if not (self._outputs.requires_grad and self._inputs.requires_grad):
            return False
        source = self._source
        goal = get_gradient_edge(source) if isinstance(source, Tensor) else source
        start = get_gradient_edge(self._outputs)
        waiting, seen = [(start.node, start.output_nr)], set()
        while waiting:
            node, number = waiting.pop()
            if node == goal.node and number == goal.output_nr:
                return True
            if node not in seen:
                seen.add(node)
                waiting += [(after, nr) for after, nr in node.next_functions if after is not None]
        return False

    def matvec(self, v: Tensor) -> Tensor:
        """Jv [m]. About one forward; the first also builds the graph of u ↦ Jᵀu."""
        cotangent, pulled = self._double_graph()
        v = self._as(v, self._inputs, "Jv")
        (jv,) = self._grad(pulled, cotangent, v)
        self.products += 1
        jv = torch.zeros_like(self._outputs) if jv is None else jv
        self._hold_against_adjoint(v, jv)
        return jv.detach().reshape(-1)

    def rmatvec(self, u: Tensor) -> Tensor:
        """Jᵀu [n]. About one forward."""
        self._require_path()
        (gradient,) = self._grad(self._outputs, self._source, self._as(u, self._outputs, "Jᵀu"))
        self.products += 1
        if gradient is None:
            raise TangentError(NO_PATH)
        return gradient.detach().reshape(-1)

    def rmatmat(self, cotangents: Tensor) -> Tensor:
        """Rows uᵀJ [r, n] for the rows of `cotangents` [r, m], batched; one by one where an op cannot
        be batched."""
        self._require_path()
        stacked = cotangents.to(self._outputs.device, self._outputs.dtype)
        try:
            (rows,) = self._grad(
                self._outputs, self._source, stacked.reshape(-1, *self._outputs.shape), batched=True
            )
        except TangentError:  # vmap knows no rule for custom functions; a real fault shows itself in rmatvec
            return torch.stack([self.rmatvec(row) for row in stacked])
        self.products += len(stacked)
        if rows is None:
            raise TangentError(NO_PATH)
        return rows.detach().reshape(len(stacked), -1)

    def __matmul__(self, other: Tensor) -> Tensor:
        """J @ v for v [n], or column by column for V [n, k]."""
        if other.dim() == 1:
            return self.matvec(other)
        return torch.stack([self.matvec(column) for column in other.T], 1)

    def to_scipy(self) -> scipy.sparse.linalg.LinearOperator:
        """The same map for `scipy.sparse.linalg`, on NumPy arrays."""
        return as_scipy(self)

    def draw(self, size: int) -> Tensor:
        """A standard normal vector from the operator's own generator, on its device."""
        vector = torch.randn(size, generator=self._generator, dtype=torch.float64)
        return vector.to(self.device, self.dtype)

    def _double_graph(self) -> tuple[Tensor, Tensor]:
        """(u, Jᵀu) with the graph between them; u is random, so that it serves the adjoint test too."""
        if self._held is None:
            self._require_path()
            with torch.enable_grad():
                u = self.draw(self.shape[0]).to(self._outputs.dtype).reshape(self._outputs.shape)
                u.requires_grad_()
                (pulled,) = self._grad(self._outputs, self._source, u, create_graph=True)
            if pulled is None:
                raise TangentError(NO_PATH)
            self._held = (u, pulled)
        return self._held

    def _require_path(self) -> None:
        for name, tensor in (("outputs", self._outputs), ("inputs", self._inputs)):
            if not tensor.requires_grad:
                raise TangentError(f"the {name} are not in a graph (computed under no_grad, or detached)")

    @staticmethod
    def _grad(
        y: Tensor,
        x: Tensor | GradientEdge,
        cotangent: Tensor,
        create_graph: bool = False,
        batched: bool = False,
    ) -> tuple[Tensor | None]:
        """One VJP; autograd's refusals (no second derivative, freed or reentrant graph) in our words."""
        if not y.requires_grad:
            return (None,)
        try:
            (gradient,) = torch.autograd.grad(
                y,
                x,
                cotangent,
                retain_graph=True,
                create_graph=create_graph,
                allow_unused=True,
                is_grads_batched=batched,
            )
        except RuntimeError as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            raise TangentError(f"autograd refuses: {first_line}") from error
        return (gradient,)

    def _hold_against_adjoint(self, v: Tensor, jv: Tensor) -> None:
        """⟨u, Jv⟩ = ⟨Jᵀu, v⟩ up to round-off, for the random u of the held graph."""
        assert self._held is not None
        u, pulled = (t.detach().double().reshape(-1) for t in self._held)
        v, jv = v.double().reshape(-1), jv.detach().double().reshape(-1)
        gap = float((u @ jv - pulled @ v).abs())
        size = float(jv.norm() + (pulled @ v).abs())
        round_off = 1e3 * torch.finfo(self.dtype).eps * float(pulled.norm() * v.norm())
        if gap > 1e-2 * size + round_off:
            raise TangentError(
                f"Jv contradicts Jᵀu: ⟨u, Jv⟩ and ⟨Jᵀu, v⟩ differ by {gap:.2g} at size {size:.2g}; a "
                "backward on the way is not differentiable (autograd.Function, custom op, compiled region)"
            )

    def _compare_with_differences(self, f: Callable[[Tensor], Tensor]) -> None:
        """Jv against (f(x + hv) − f(x − hv)) / 2h along one random v."""
        v = self.draw(self.shape[1])
        jv = self.matvec(v).double()
        self.products -= 1  # the check is part of the set-up
        x = self._inputs.detach()
        direction = v.reshape(x.shape)
        h = torch.finfo(self.dtype).eps ** (1 / 3) * max(float(x.double().square().mean().sqrt()), 1e-3)
        with torch.no_grad():
            difference = f(x + h * direction).double() - f(x - h * direction).double()
        expected = difference.reshape(-1) / (2 * h)
        round_off = torch.finfo(self.dtype).eps / h * float(self._outputs.detach().double().norm())
        gap = float((jv - expected).norm())
        if not gap <= 2e-2 * float(expected.norm()) + round_off:
            raise TangentError(
                f"the tangent is not that of the function: Jv and finite differences differ by {gap:.2g} at "
                f"size {float(expected.norm()):.2g}; a backward on the way is not the derivative "
                "of its forward"
            )

    @staticmethod
    def _as(vector: Tensor, like: Tensor, product: str) -> Tensor:
        if vector.numel() != like.numel():
            raise ValueError(f"{product}: a vector of {vector.numel()} elements; expected {like.numel()}")
        return vector.to(like.device, like.dtype).reshape(like.shape)


class TransposedOperator:
    """Jᵀ [n, m] of a `JacobianOperator`; `.T` gives it back."""

    def __init__(self, of: JacobianOperator) -> None:
        self.T = of
        self.shape = of.shape[::-1]
        self.dtype, self.device = of.dtype, of.device

    @property
    def products(self) -> int:
        """Products spent, shared with the operator it is the transpose of."""
        return self.T.products

    def matvec(self, u: Tensor) -> Tensor:
        """Jᵀu [n]."""
        return self.T.rmatvec(u)

    def rmatvec(self, v: Tensor) -> Tensor:
        """Jv [m]."""
        return self.T.matvec(v)

    def __matmul__(self, other: Tensor) -> Tensor:
        """Jᵀ @ u for u [m], or column by column for U [m, k]."""
        if other.dim() == 1:
            return self.matvec(other)
        return torch.stack([self.matvec(column) for column in other.T], 1)

    def to_scipy(self) -> scipy.sparse.linalg.LinearOperator:
        """The same map for `scipy.sparse.linalg`, on NumPy arrays."""
        return as_scipy(self)
