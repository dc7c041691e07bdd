"""Products with the graph that autograd holds; its refusals in our words."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

NO_PATH = "no path leads from the inputs to the outputs in the graph"


class TangentError(RuntimeError):
    """The derivative is not to be had, or is not the function's; the message says what was seen."""


class Refused(TangentError):
    """Autograd says so itself: no second derivative, no forward mode, a freed or reentrant graph."""


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
        Refused: what autograd says.
        TangentError: where no path leads from x to y.
    """
    if not y.requires_grad:
        raise TangentError(NO_PATH)
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
        raise Refused(f"autograd refuses: {first_line(error)}") from error
    if gradient is None:
        raise TangentError(NO_PATH)
    return gradient


def first_line(error: Exception) -> str:
    """What an exception says, without what follows."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nodes(y: Tensor) -> Iterator[tuple[Node, int]]:
    """(node, output number) of all that y was computed from, each once."""
    start = get_gradient_edge(y)
    waiting, seen = [(start.node, start.output_nr)], set()
    while waiting:
        edge = waiting.pop()
        if edge not in seen:
            seen.add(edge)
            yield edge
            waiting += [(after, number) for after, number in edge[0].next_functions if after is not None]


def connected(y: Tensor, x: Tensor | GradientEdge) -> bool:
    """Whether a path leads from x to y; walks the graph, costs no product."""
    if not y.requires_grad or (isinstance(x, Tensor) and not x.requires_grad):
        return False
    goal = get_gradient_edge(x) if isinstance(x, Tensor) else x
    return any(edge == (goal.node, goal.output_nr) for edge in nodes(y))


def leaves(y: Tensor) -> list[Tensor]:
    """Tensors that y was computed from and that gather a gradient: parameters, mostly."""
    return [node.variable for node, _ in nodes(y) if hasattr(node, "variable")] if y.requires_grad else []
