"""Autograd's graph: products with it, its leaves, and its errors as exceptions of ours."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

NO_PATH = "no path leads from the inputs to the outputs in the graph"


class TangentError(RuntimeError):
    """The derivative cannot be computed, or is not the function's; the message gives the finding."""


class NoPath(TangentError):
    """The outputs do not depend on the inputs in autograd's graph."""

    def __init__(self) -> None:
        super().__init__(NO_PATH)


class Refused(TangentError):
    """PyTorch refuses: no second derivative, no forward mode, a freed or reentrant graph."""


class KeptGraph:
    """y = f(x) in a graph that is kept: Jᵀu by one VJP, Jv by one VJP over the graph of u ↦ Jᵀu.

    Source: Townsend 2017, "A new trick for calculating Jacobian vector products"; Pearlmutter 1994.

    Args:
        outputs: y.
        inputs: x, in its shape and precision.
        source: place of x in the graph: a tensor, or an edge.
        lean: free the tensors that the graph of u ↦ Jᵀu saves and Jv does not need. These are values that
            depend on u, because a linear map's derivative does not (a backward that is not linear then gives
            a wrong Jv), and values that the first Jv does not use, which serve derivatives by x.
    """

    def __init__(
        self, outputs: Tensor, inputs: Tensor, source: Tensor | GradientEdge, *, lean: bool = False
    ) -> None:
        self.outputs, self.inputs, self.source, self.lean = outputs, inputs, source, lean
        self._double: tuple[Tensor, Tensor] | None = None
        self._saved: list[_Saved] = []  # by the graph of u ↦ Jᵀu, until the first Jv

    @property
    def eps(self) -> float:
        """ε of the coarser precision of x and y."""
        return max(torch.finfo(t.dtype).eps for t in (self.inputs, self.outputs))

    def pull(self, cotangents: Tensor) -> Tensor:
        """Jᵀu of the shape of x, for u of the shape of y."""
        return vjp(self.outputs, self.source, cotangents)

    def push(self, tangents: Tensor) -> Tensor:
        """Jv of the shape of y, for v of the shape of x; the first also builds the graph of u ↦ Jᵀu."""
        return self.push_rows(tangents.unsqueeze(0)).squeeze(0)

    def pull_rows(self, cotangents: Tensor) -> Tensor:
        """`pull` with a leading axis, batched by vmap; one by one where an op cannot be batched."""
        return _rows(self.outputs, self.source, cotangents)

    def push_rows(self, tangents: Tensor) -> Tensor:
        """`push` with a leading axis, batched in the same way."""
        try:
            pushed = _rows(*self._double_graph(), tangents)
        except NoPath:  # Jᵀu is zero, or constant for autograd; the adjoint test decides
            return self.outputs.new_zeros(len(tangents), *self.outputs.shape)
        for saved in self._saved:
            if not saved.used:
                saved.tensor = None
        self._saved = []
        return pushed

    def hold_pulled(self, cotangent: Tensor) -> Tensor:
        """Jᵀu, its graph by u held for `push`."""
        u = _above(self.outputs, cotangent)
        hooks: Any = nullcontext()
        if self.lean:
            lean = _Lean(u)
            hooks, self._saved = saved_tensors_hooks(lean, _used), lean.saved
        with torch.enable_grad(), hooks:
            pulled = vjp(self.outputs, self.source, u, create_graph=True)
        self._double = (pulled, u)
        return pulled.detach()

    def is_once_differentiable(self) -> bool:
        """Whether a function marked once-differentiable made Jᵀu: autograd skips it instead of refusing."""
        pulled, _ = self._double_graph()
        return pulled.requires_grad and any(node.name().endswith("Error") for node, _ in _edges(pulled))

    def _double_graph(self) -> tuple[Tensor, Tensor]:
        if self._double is None:
            self.hold_pulled(torch.ones_like(self.outputs))
        assert self._double is not None
        return self._double


@torch.enable_grad()
def _above(y: Tensor, cotangent: Tensor) -> Tensor:
    """A copy of the cotangent that requires grad and follows y in autograd's graph, with no element of y.

    Autograd searches the graph of Jᵀu for u, and the graph of y with it, but leaves out the nodes below u. So
    Jv of one block costs as much in a deep model as in a shallow one.
    """
    nothing = y.reshape(-1)[:0].to(cotangent)
    return torch.cat((cotangent.detach().reshape(-1), nothing)).reshape(cotangent.shape)


def vjp(
    y: Tensor,
    x: Tensor | GradientEdge,
    cotangent: Tensor,
    *,
    create_graph: bool = False,
    batched: bool = False,
) -> Tensor:
    """(∂y/∂x)ᵀ cotangent, of the shape of x; with one more leading axis where `batched`. The graph is kept.

    Raises:
        Refused: autograd refuses.
        NoPath: no path leads from x to y.
    """
    if not y.requires_grad:
        raise NoPath
    options = {"create_graph": create_graph, "is_grads_batched": batched}
    try:
        (gradient,) = torch.autograd.grad(y, x, cotangent, retain_graph=True, allow_unused=True, **options)
    except RuntimeError as error:
        raise Refused(f"autograd refuses: {first_line(error)}") from error
    if gradient is None:
        raise NoPath
    return gradient


def first_line(error: Exception) -> str:
    """First line of an exception's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def leaves(y: Tensor) -> list[Tensor]:
    """Leaves that y was computed from and that require grad, mostly parameters."""
    return [node.variable for node, _ in _edges(y) if hasattr(node, "variable")] if y.requires_grad else []


def connected(y: Tensor, x: Tensor | GradientEdge) -> bool:
    """Whether a path leads from x to y; walks the graph, costs no product."""
    if not y.requires_grad or (isinstance(x, Tensor) and not x.requires_grad):
        return False
    goal = get_gradient_edge(x) if isinstance(x, Tensor) else x
    return any(edge == (goal.node, goal.output_nr) for edge in _edges(y))


def _rows(y: Tensor, x: Tensor | GradientEdge, cotangents: Tensor) -> Tensor:
    if len(cotangents) > 1:
        try:
            return vjp(y, x, cotangents, batched=True)
        except Refused:  # no batching rule (a custom function); a real refusal comes below
            pass
    return torch.stack([vjp(y, x, row) for row in cotangents])


@dataclass
class _Saved:
    """Tensor that a node of the graph saved; freed once no product needs it."""

    tensor: Tensor | None
    used: bool = False


def _used(saved: _Saved) -> Tensor:
    if saved.tensor is None:
        raise RuntimeError("this product needs a part of the graph that the first product did not")
    saved.used = True
    return saved.tensor


class _Lean:
    """Hook that keeps tensors that do not depend on u, and only the shape of others. Visits nodes once."""

    def __init__(self, u: Tensor) -> None:
        self._u = u
        self.saved: list[_Saved] = []
        self._known: dict[Node, bool] = {get_gradient_edge(u).node: True}

    def __call__(self, tensor: Tensor) -> _Saved:
        kept = tensor.detach()
        if tensor is self._u or (tensor.grad_fn is not None and self._depends(tensor.grad_fn)):
            kept = kept.new_zeros(()).expand(kept.shape)
        self.saved.append(_Saved(kept))
        return self.saved[-1]

    def _depends(self, node: Node) -> bool:
        waiting = [node]
        while waiting:
            now = waiting[-1]
            before = [each for each, _ in now.next_functions if each is not None]
            unknown = [each for each in before if each not in self._known]
            if not unknown:
                self._known.setdefault(now, any(self._known[each] for each in before))
                waiting.pop()
            waiting += unknown
        return self._known[node]


def _edges(y: Tensor) -> Iterator[tuple[Node, int]]:
    """(node, output number) of everything that y was computed from, each once."""
    start = get_gradient_edge(y)
    waiting, seen = [(start.node, start.output_nr)], set()
    while waiting:
        edge = waiting.pop()
        if edge not in seen:
            seen.add(edge)
            yield edge
            waiting += [(after, number) for after, number in edge[0].next_functions if after is not None]
