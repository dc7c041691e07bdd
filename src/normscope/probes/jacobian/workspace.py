"""Data that all parts of the probe share: the held graph, its conditions, the costs, missing figures."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, Block, Site, Stack, named_parameters
from normscope.linalg import JacobianOperator, SigmaMax, Status, TangentError, confidence_of_each, sigma_max
from normscope.probes.jacobian.budget import OverBudget, Spending
from normscope.probes.jacobian.derivative import FINER, TINY, compare, is_wrong, same_gap, settled
from normscope.probes.jacobian.double import held_in_double
from normscope.probes.jacobian.held_graph import HeldGraph
from normscope.probes.jacobian.one_sequence import Feed
from normscope.probes.measurement import EXACT, Measurement, not_measured
from normscope.subjects.memory import is_out_of_memory

DERIVATIVE = "derivative/relative-error"

CONFIDENCE = {"part": 0.95, "stack": 0.8}
"""Confidence of an iterative figure's error. At 0.999 the stack would cost half as much again. Actual errors
are mostly far smaller."""

BOUND_CONFIDENCE = 0.95  # of all bounds of one report together; each σ_max gets a share of it

FROM_ERRORS = f"from estimates and their errors, all bounds together at {BOUND_CONFIDENCE:.0%} confidence"

TOLERANCE = {"part": 5e-2, "stack": 1e-2}  # relative error of σ_max, for branches and blocks, and for stacks

MAX_PRODUCTS = {"part": 24, "stack": 40}

SET_UP = 1  # additional cost of the first Jv of a map, in products: the graph of u ↦ Jᵀu
COMPARISON = 2  # cost of comparing a derivative with finite differences, in products
CHAIN_TOLERANCE = 1e-3  # relative distance up to which a product of maps is the whole map


@dataclass
class Workspace:
    """State of the probe on one sequence.

    Attributes:
        model, anatomy, feed: the model, its reading, and the sequence that it is fed.
        graph: tensors at the sites, with the graph over them.
        conditions: mode, kernels and precision of the figures, for `how`.
        spending: the costs.
        refused: site → reason why its Jacobian is not measured.
        norms: site of a branch → an upper bound of ‖A‖ of the added term, where it was measured.
        largest: site of a block or stack → σ_max, where it was measured.
        errors: the same site → its relative error, at `CONFIDENCE`.
        upper: the same site → an upper bound of σ_max, at `bound_confidence`.
    """

    model: nn.Module
    anatomy: Anatomy
    feed: Feed
    graph: HeldGraph
    conditions: str
    spending: Spending
    refused: dict[str, str] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    upper: dict[str, float] = field(default_factory=dict)
    _last: tuple[tuple[Site, Site], JacobianOperator] | None = None

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by the names that the anatomy uses."""
        return dict(named_parameters(self.model, remove_duplicate=False))

    def share(self, part: Block | Stack) -> float:
        """Cost of a forward through `part`, as a share of one through all stacks."""
        return (len(part.blocks) if isinstance(part, Stack) else 1) / max(1, len(self.anatomy.blocks))

    def operator(self, source: Site, target: Site) -> JacobianOperator:
        """The map from one site to another, or a `TangentError`; the last map is cached with its graphs."""
        if self._last is None or self._last[0] != (source, target):
            self._last = None
            self._last = ((source, target), self.graph.operator(source, target))
        return self._last[1]

    def ends(self, part: Block | Stack) -> JacobianOperator:
        """The map from the entry of `part` to its exit; `TangentError` where it has none."""
        return self.operator(*ends_of(part))

    @property
    def bound_confidence(self) -> float:
        """Confidence of each estimate with which all bounds of blocks and branches hold together."""
        blocks = self.anatomy.blocks
        return confidence_of_each(BOUND_CONFIDENCE, len(blocks) + sum(len(b.branches) for b in blocks))

    def sigma_max(self, op: JacobianOperator, kind: str) -> tuple[SigmaMax, str]:
        """σ_max to the tolerance of `kind` ("part", "stack"), and how."""
        found = sigma_max(
            op, tol=TOLERANCE[kind], max_products=MAX_PRODUCTS[kind], confidence=CONFIDENCE[kind]
        )
        if found.status is Status.EXACT:
            return found, f"{EXACT}; {self.conditions}"
        error = f"relative error ≤ {found.error:.1g} ({CONFIDENCE[kind]:.0%} confidence)"
        how = f"iterative, {found.status}, {error}, residual {found.residual:.1g}, {found.products} products"
        return found, f"{how}; {self.conditions}"

    def derivative_row(self, name: str, site: str, source: Site, target: Site, share: float) -> Measurement:
        """Error of the derivative from `source` to `target`; the site is refused where it is wrong.

        `name` is the part that pays, and a forward through the map costs `share` of one through all stacks.
        """

        def measure() -> list[Measurement]:
            moves = self.graph.shifted
            if source not in moves or target not in moves:
                return [not_measured(DERIVATIVE, site, "the stream is not an argument of the first block")]
            self.spending.require(name, (COMPARISON + SET_UP) * share)
            op = self.operator(source, target)
            with self.booked(name, op, share):
                error = compare(op, moves[source], moves[target], self.graph.tensors[target], self.graph.eps)
            if isinstance(error, str):
                return [not_measured(DERIVATIVE, site, error)]
            if is_wrong(error):
                if self.graph.has_second_way(source, target):
                    reason = "the stream has a second way in, around the first block: differences miss it"
                    return [not_measured(DERIVATIVE, site, reason)]
                if self._is_bypassed(source, target):
                    reason = (
                        "it also reads earlier states around its entry, which the differences move as well"
                    )
                    return [not_measured(DERIVATIVE, site, reason)]
                second = self._in_double(name, source, target, share)
                if second is None and not self._same_gap(name, source, target, share):
                    reason = "the forward bends or jumps within the steps of the finite differences"
                    return [not_measured(DERIVATIVE, site, reason)]
                error = error if second is None else second
            if is_wrong(error):
                self.refused[site] = (
                    f"its derivative is off by {error:.0%} against finite differences of its forward "
                    "(caused by a part without gradient, a custom backward, or a wrong reading)"
                )
            how = f"Jv against central differences, at the median token; {self.conditions}"
            return [Measurement(DERIVATIVE, site, error, how=how)]

        return guarded(self, (DERIVATIVE,), site, measure, decides=True)[0]

    def _is_bypassed(self, source: Site, target: Site) -> bool:
        """Whether the entry of the stack that holds `target` also reaches it around `source`."""
        for stack in self.anatomy.stacks:
            held = {site for branch in stack.branches for site in (branch.output, branch.sum)}
            if target in held | {block.exit for block in stack.blocks}:
                return self.graph.is_bypassed(stack.blocks[0].entry, source, target)
        return False

    @cached_property
    def double(self) -> HeldGraph | None:
        """The graph of a float64 copy, made where a derivative looks wrong."""
        return held_in_double(self.model, self.anatomy, self.feed)

    def _in_double(self, name: str, source: Site, target: Site, share: float) -> float | None:
        """Error of the derivative from `source` to `target` in float64; None where that cannot tell."""
        forwards = 0 if "double" in vars(self) else 3 + 2 * len(TINY) * len(self.anatomy.stacks)
        self.spending.require(name, forwards + (COMPARISON + SET_UP) * share)
        self.spending.add(name, forwards)
        with self.spending.timed(name):
            graph = self.double
            if graph is None or not {source, target} <= graph.shifted.keys():
                return None
            op = graph.operator(source, target)
        with self.booked(name, op, share):
            return settled(op, graph.shifted[source], graph.shifted[target])

    def _same_gap(self, name: str, source: Site, target: Site, share: float) -> bool:
        """Whether the gap from `source` to `target` is the same at finer steps; their forwards run once."""
        graph = self.graph
        forwards = 0 if "finer" in vars(graph) else 2 * len(FINER) * len(self.anatomy.stacks)
        self.spending.require(name, forwards + (1 + len(FINER)) * share)
        self.spending.add(name, forwards)
        if not {source, target} <= graph.finer.keys():  # a router sent no token there
            return False
        ends, finer = ((moves[source], moves[target]) for moves in (graph.shifted, graph.finer))
        op = self.operator(source, target)
        with self.booked(name, op, share):
            return same_gap(op, ends, finer, graph.tensors[target], graph.eps)

    @contextmanager
    def booked(self, name: str, op: JacobianOperator, share: float) -> Iterator[None]:
        """Book the products of the body on `op`, a map that is `share` of the whole, under `name`."""
        before, fresh = op.products, op.products == 0
        with self.spending.timed(name):
            try:
                yield
            finally:
                self.spending.add(name, (op.products - before + (SET_UP if fresh else 0)) * share)


def ends_of(part: Block | Stack) -> tuple[Site, Site]:
    """Sites where a block or a stack begins and ends."""
    blocks = part.blocks if isinstance(part, Stack) else (part,)
    return blocks[0].entry, blocks[-1].exit


def site_of(part: Block | Stack) -> str:
    """Its name in measurements."""
    return part.site if isinstance(part, Block) else part.name


def drawn(op: JacobianOperator, count: int, size: int) -> Tensor:
    """Standard normal rows [count, size] for products with `op`, the same in every run."""
    rows = torch.randn(count, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return rows.to(op.device, op.dtype)


def is_product(whole: JacobianOperator, pullbacks: Iterable[Callable[[Tensor], Tensor]]) -> bool:
    """Whether a product of maps and `whole` agree on one random cotangent; False where shapes differ.

    `pullbacks` are the factors' u ↦ Jᵀu, in the order of the forward.
    """
    (u,) = drawn(whole, 1, whole.shape[0])
    expected, pulled = whole.rmatvec(u), u
    for pull in reversed(list(pullbacks)):
        pulled = pull(pulled)
    gap = float((pulled - expected).double().norm())
    return gap <= CHAIN_TOLERANCE * float(expected.double().norm())


def fits(whole: JacobianOperator, maps: list[JacobianOperator]) -> bool:
    """Whether the product of `maps`, in the order of the forward, exists and has the shape of `whole`."""
    ends = (maps[-1].shape[0], maps[0].shape[1])
    return ends == whole.shape and all(a.shape[0] == b.shape[1] for a, b in pairwise(maps))


def guarded(
    workspace: Workspace,
    quantities: Iterable[str],
    site: str,
    measure: Callable[[], list[Measurement]],
    *,
    decides: bool = False,
) -> list[Measurement]:
    """Rows of `measure`, or the reason why there are none, for each of `quantities`.

    With `decides`, a site without derivative is refused from then on.
    """
    reason = workspace.refused.get(site, "")
    if not reason:
        try:
            return measure()
        except OverBudget as left_out:
            decides, reason = False, str(left_out)
        except TangentError as error:
            reason = str(error)
        except FloatingPointError:
            reason = "a product with the Jacobian is not finite"
        except (TypeError, ValueError, RuntimeError) as error:  # a hook or a custom backward of the model
            if is_out_of_memory(error):
                raise
            reason = f"the backward fails ({type(error).__name__}): {' '.join(str(error).split())[:200]}"
    if decides:
        workspace.refused[site] = reason
    return [not_measured(quantity, site, reason) for quantity in quantities]


def log10(value: float) -> float:
    """log₁₀, −inf of zero."""
    return math.log10(value) if value > 0 else -math.inf
