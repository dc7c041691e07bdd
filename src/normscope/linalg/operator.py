"""The Jacobian of a function as a linear operator on a held graph.

    Jᵀu  [m] → [n]   one VJP over the graph of y = f(x)
    Jv   [n] → [m]   one VJP over the graph of u ↦ Jᵀu ("double backward"); that graph is built once and held

Each costs about one forward of f; set-up costs about two more, and the check of the tangent one. Without a
double backward, Jv uses forward mode or central differences: see `tangents`.

Without parameters, both graphs together hold no more than the forward of a training step with the same
kernels: see `function` and `KeptGraph`. The T×T probabilities of attention are held here; a training step
with fused attention does not hold them.

A hand-written backward may be wrong, or constant for autograd, and Jv is then silently wrong or zero. So each
Jv is compared with Jᵀu of one random u (two dot products), and where f is known, the first tangent with
finite differences. A backward may also be a non-linear function of its gradient (guided backpropagation),
which one u does not show. So each Jᵀu is compared with the first Jv; before there is one, a batch is compared
with a random sum of its rows (one VJP). A failed check raises `TangentError`.

Source: Townsend 2017, "A new trick for calculating Jacobian vector products"; Pearlmutter 1994.
"""

import difflib
from collections.abc import Callable
from math import inf

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from normscope.linalg.copies import Copies
from normscope.linalg.differences import require_tangent
from normscope.linalg.function import MeasuredFunction, require_point
from normscope.linalg.graph import KeptGraph, Refused, TangentError, connected
from normscope.linalg.maps import BaseMap
from normscope.linalg.tangents import (
    NUM_COTANGENTS,
    CentralDifferences,
    ForwardMode,
    Method,
    require_adjoint,
)

LINEAR = 1e-2  # relative gap from which Jᵀ of a sum is not the sum of Jᵀ


class JacobianOperator(BaseMap):
    """J = ∂f/∂x [m, n] of a function at a point; vectors go in and come out flat.

    f may be random: it starts from one state of the generators each time, so dropout has one mask. Attention
    runs under the math backend, which has a double backward; the fused kernels have none.

    A product costs about one forward of f, less in batches of small maps (`matmat`, `rmatmat`; these hold a
    copy of the activations per row, up to 2¹⁵ elements of x). Set-up costs about two products and two or
    three forwards, one more where f closes over parameters that require grad.

    Args:
        f: the function of one tensor; a module, or anything callable. A module in half precision is measured
            in a float32 copy.
        x: the point, a tensor of any shape, n elements.
        method: of Jv: "double backward", "forward mode" or "central differences"; by default the first that
            PyTorch does not refuse. Jᵀu is always a VJP.
        seed: of the random vectors for the checks.

    Attributes:
        shape: (m, n).
        products: Jv and Jᵀu spent so far, without set-up.
        method: the `Method` in use.
        round_off: error of a product relative to ‖J‖: ε of the precision; for central differences the largest
            error measured so far. The algorithms resolve nothing below it.
        note: changes made to measure f, refused methods, and whether f's round-off hides the tangent from
            finite differences, as under a large offset. Jv is then only compared with Jᵀu, a check that a
            wrong backward may pass. Else "".

    Raises:
        TypeError: x is not a tensor.
        ValueError: unknown method; x or f(x) is empty or not floating-point; half precision in a function
            that is not a module; f writes into x.
        TangentError: Jv differs from finite differences by over 2 % (a backward that is not the derivative of
            its forward or is no function of its gradient, a straight-through estimator, a part without
            gradient), Jv contradicts Jᵀu, or PyTorch refuses every method.

    Examples:
        >>> op = JacobianOperator(lambda x: x**2, torch.tensor([1.0, 2.0]))
        >>> op @ torch.tensor([1.0, 1.0])
        tensor([2., 4.])
        >>> str(op.method)
        'double backward'
    """

    note: str

    def __init__(
        self, f: Callable[[Tensor], Tensor], x: Tensor, *, method: str | None = None, seed: int = 0
    ) -> None:
        chosen = tuple(Method) if method is None else (_known(method),)
        function = MeasuredFunction(f, x)
        outputs, inputs = function.with_graph(function.x)
        self._set_up(KeptGraph(outputs, inputs, inputs, lean=True), Copies(function, inputs, outputs), seed)
        refusals: list[str] = []
        for each in chosen:
            try:
                self._use(each, function)
                break
            except Refused as refusal:
                refusals.append(f"no {each}: {refusal}")
        else:
            raise Refused("; ".join(refusals))
        self.note = "; ".join(filter(None, (function.note, *refusals, self.note)))

    @classmethod
    def on_graph(
        cls, outputs: Tensor, inputs: Tensor, *, edge: GradientEdge | None = None, seed: int = 0
    ) -> "JacobianOperator":
        """J = ∂y/∂x [m, n] of tensors that are already in a graph; by double backward only.

        Attention must have *run* under the math backend (`torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`)
        with the fast path of `torch.backends.mha` off: the fused kernels have no double backward.

        Args:
            outputs: y, of m elements, computed from `inputs`.
            inputs: x, of n elements; a leaf or any intermediate tensor that requires grad.
            edge: place of x in the graph, where that is not `inputs` itself: the tensor before an in-place
                op.
            seed: of the random cotangent that every Jv is checked with.

        Raises:
            TypeError: an argument is not a tensor.
            ValueError: a tensor is empty or not floating-point.
            TangentError: raised by the first product, where no path leads from `inputs` to `outputs`, the
                graph has no second derivative, Jv contradicts Jᵀu, or Jᵀu is not linear in u.

        Examples:
            >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
            >>> op = JacobianOperator.on_graph(x**2, x)
            >>> op @ torch.tensor([1.0, 1.0])
            tensor([2., 4.])
        """
        for name, tensor in (("outputs", outputs), ("inputs", inputs)):
            require_point(name, tensor)
        op = cls.__new__(cls)
        op._set_up(KeptGraph(outputs, inputs, inputs if edge is None else edge), None, seed)
        return op

    def connected(self) -> bool:
        """Whether a path leads from the inputs to the outputs; walks the graph, costs no product."""
        graph = self._graph
        return graph.inputs.requires_grad and connected(graph.outputs, graph.source)

    @property
    def known_product(self) -> tuple[Tensor, Tensor] | None:
        """(v [n], Jv [m]) of the random v that checked the tangent; None without a check."""
        return self._tangent

    @property
    def round_off(self) -> float:
        """Error of a product relative to ‖J‖."""
        found = self._tangents
        return found.round_off if isinstance(found, CentralDifferences) else self._graph.eps

    def _set_up(self, graph: KeptGraph, copies: Copies | None, seed: int) -> None:
        super().__init__(
            (graph.outputs.numel(), graph.inputs.numel()), graph.inputs.dtype, graph.inputs.device
        )
        self.method = Method.DOUBLE_BACKWARD
        self.note = ""
        self._graph = graph
        self._tangents: ForwardMode | CentralDifferences | None = None  # none: double backward
        self._copies = copies
        self._generator = torch.Generator().manual_seed(seed)
        self._adjoint: tuple[Tensor, Tensor] | None = None  # (u, Jᵀu), compared with every Jv
        self._tangent: tuple[Tensor, Tensor] | None = None  # (v, Jv) of the random v of the set-up
        self._witness: tuple[Tensor, Tensor] | None = None  # (v, Jv), compared with every Jᵀu

    def _use(self, method: Method, function: MeasuredFunction) -> None:
        """Use one method; compare its first product with finite differences."""
        self.method, self._witness, v = method, None, self._draw(self.shape[1])
        if method is Method.CENTRAL_DIFFERENCES:
            self._tangents = self._differences(function, v)
            return
        if method is Method.FORWARD_MODE:
            self._tangents = ForwardMode(function, self._graph)
        try:
            jv = self._forward(v.unsqueeze(0))[0]
            x, y = self._graph.inputs.detach(), self._graph.outputs.detach()
            self.note = require_tangent(function, x, v.reshape(x.shape), jv, y)
        except Refused:
            raise
        except TangentError as error:
            if method is Method.DOUBLE_BACKWARD and self._graph.lean:  # an op saves tensors without the hooks
                self._graph.lean, self._adjoint = False, None
                self._use(method, function)
                return
            if method is Method.DOUBLE_BACKWARD and self._graph.is_once_differentiable():
                raise Refused("a function in the graph is marked once_differentiable") from error
            raise TangentError(f"{error}; {self._remedy(function, v)}") from error
        self._tangent = self._witness = (v, jv)

    def _differences(self, function: MeasuredFunction, v: Tensor) -> CentralDifferences:
        """Central differences, where Jᵀu agrees with them along v; else raise `TangentError`."""
        cotangents = torch.stack([self._draw(self.shape[0]) for _ in range(NUM_COTANGENTS)])
        found = CentralDifferences(function, self._graph, cotangents)
        found.require_agreement(v.reshape(self._graph.inputs.shape))
        return found

    def _remedy(self, function: MeasuredFunction, v: Tensor) -> str:
        """Advice for a wrong tangent, after checking whether Jᵀu is right."""
        try:
            self._differences(function, v)
        except TangentError:
            return "Jᵀu contradicts finite differences too: no method can measure this function"
        other = Method.CENTRAL_DIFFERENCES
        return (
            f'Jᵀu agrees with finite differences: use method="{other}", which does not need this derivative'
        )

    def _forward(self, rows: Tensor) -> Tensor:
        self._require_path()
        x = self._graph.inputs
        cotangent, pulled = self._known_adjoint()
        tangents = self._push(rows.to(x).reshape(-1, *x.shape))
        found = tangents.detach().reshape(len(rows), -1)
        if self.method is not Method.CENTRAL_DIFFERENCES:  # those measure their own error
            require_adjoint(cotangent, pulled, rows.to(x), found)
            self._remember(rows[0].to(x), found[0])
        return found.to(self.device, self.dtype)

    def _backward(self, rows: Tensor) -> Tensor:
        self._require_path()
        rows = rows.to(self._graph.outputs)
        if self._witness is None and len(rows) > 1:
            pulled = self._pull_linearly(rows)
        else:
            pulled = self._pull(rows)
            if self._witness is not None:
                require_adjoint(*self._witness, rows, pulled)
        return pulled.to(self.device, self.dtype)

    def _remember(self, v: Tensor, jv: Tensor) -> None:
        """Keep the first Jv, at the length of a random v."""
        length = float(v.double().norm())
        if self._witness is None and 0 < length < inf:
            scale = len(v) ** 0.5 / length
            self._witness = (v.detach() * scale, jv * scale)

    def _pull_linearly(self, rows: Tensor) -> Tensor:
        """Rows Jᵀu, after checking that Jᵀ of a random sum of the rows is the sum of their Jᵀu."""
        generator = torch.Generator().manual_seed(len(rows))
        weights = torch.randn(len(rows), generator=generator, dtype=torch.float64).to(rows)
        *_, found = pulled = self._pull(torch.cat((rows, (weights @ rows).unsqueeze(0))))
        weights, pulled = weights.to(pulled), pulled[:-1]
        gap = float((weights @ pulled - found).double().norm())
        size = float((weights * pulled.norm(dim=-1)).double().norm())
        if not gap <= LINEAR * size:
            raise TangentError(
                f"Jᵀu is not linear in u: off by {gap:.2g} at size {size:.2g} for a sum of {len(rows)} rows; "
                "a backward in f is not a linear function of its gradient"
            )
        return pulled

    def _push(self, tangents: Tensor) -> Tensor:
        if self._tangents is not None:
            return self._tangents(tangents)
        if self._copies is not None:
            pushed = self._by_copies(self._copies.push_rows, tangents, self._known_adjoint())
            if pushed is not None:
                return pushed
        return self._graph.push_rows(tangents)

    def _pull(self, rows: Tensor) -> Tensor:
        """Rows Jᵀu [k, n], flat."""
        cotangents = rows.reshape(-1, *self._graph.outputs.shape)
        pulled = None
        if self._copies is not None:
            pulled = self._by_copies(self._copies.pull_rows, cotangents, self._tangent)
        if pulled is None:
            pulled = self._graph.pull_rows(cotangents)
        return pulled.detach().reshape(len(rows), -1)

    def _by_copies(
        self, product: Callable[[Tensor], Tensor], rows: Tensor, known: tuple[Tensor, Tensor] | None
    ) -> Tensor | None:
        """Rows of a batch, checked with a known product; None where f treats copies differently."""
        assert self._copies is not None
        if len(rows) == 1 or not self._copies.usable:
            return None
        try:
            found = product(rows)
            if known is not None:
                require_adjoint(*known, rows.reshape(len(rows), -1), found.reshape(len(rows), -1))
        except TangentError:
            self._copies.usable = False  # once is enough
            return None
        return found

    def _known_adjoint(self) -> tuple[Tensor, Tensor]:
        """(u, Jᵀu) of one random u, flat; with double backward its graph is the one that Jv needs."""
        if self._adjoint is None:
            y = self._graph.outputs
            u = self._draw(self.shape[0]).to(y)
            pull = self._graph.hold_pulled if self.method is Method.DOUBLE_BACKWARD else self._graph.pull
            self._adjoint = (u, pull(u.reshape(y.shape)).detach().reshape(-1))
        return self._adjoint

    def _draw(self, size: int) -> Tensor:
        vector = torch.randn(size, generator=self._generator, dtype=torch.float64)
        return vector.to(self.device, self.dtype)

    def _require_path(self) -> None:
        for name, tensor in (("outputs", self._graph.outputs), ("inputs", self._graph.inputs)):
            if not tensor.requires_grad:
                raise TangentError(f"the {name} are not in a graph (computed under no_grad, or detached)")


def _known(method: str) -> Method:
    if method not in list(Method):
        names = [str(each) for each in Method]
        (near,) = difflib.get_close_matches(method, names, n=1, cutoff=0.0)
        raise ValueError(f"method={method!r}: did you mean {near!r}? Expected one of {', '.join(names)}")
    return Method(method)
