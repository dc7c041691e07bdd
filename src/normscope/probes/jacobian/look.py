"""What every part of the probe works with: the held graph, its conditions, the account, and how a figure that
cannot be had says so."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, Block, Stack, named_parameters
from normscope.linalg import JacobianOperator, SigmaMax, Status, TangentError, confidence_of_each, sigma_max
from normscope.probes._feeding import Feed
from normscope.probes._held import HeldGraph
from normscope.probes.jacobian.budget import OverBudget, Spending
from normscope.probes.measurement import EXACT, Measurement, not_measured

CONFIDENCE = {"part": 0.95, "stack": 0.8}
"""Of an iterative figure's error. At 0.999 the stack would cost half as much again; actual errors are mostly
far smaller."""

BOUND_CONFIDENCE = 0.95
"""Of all bounds of one report together: they are built from σ_max and its error at a part's share of this."""

FROM_ERRORS = f"from estimates and their errors, all bounds together at {BOUND_CONFIDENCE:.0%} confidence"

TOLERANCE = {"part": 5e-2, "stack": 1e-2}
"""Relative error of σ_max, for branches and blocks, and for stacks."""

MAX_PRODUCTS = {"part": 24, "stack": 40}

SET_UP = 1
"""Products that the first Jv of a map costs besides: the graph of u ↦ Jᵀu."""


@dataclass
class Look:
    """One sequence under observation.

    Attributes:
        model, anatomy, feed: what runs.
        graph: tensors at the sites, with the graph over them.
        conditions: under which the figures are taken, in words.
        spending: the account.
        refused: site → why it has no Jacobian here.
        norms: site of a branch → an upper bound of ‖A‖ of the term as it is added, where it was measured.
        largest: site of a block or stack → σ_max, where it was measured.
        upper: site of a block → an upper bound of σ_max, where it was measured.
        whole: sites of blocks and stacks whose spectrum was taken whole.
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
    upper: dict[str, float] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by the names that the anatomy uses."""
        return dict(named_parameters(self.model, remove_duplicate=False))

    def share(self, part: Block | Stack) -> float:
        """What a forward through `part` costs of one through all stacks."""
        return (len(part.blocks) if isinstance(part, Stack) else 1) / max(1, len(self.anatomy.blocks))

    def ends(self, part: Block | Stack) -> JacobianOperator:
        """The map from where `part` begins to where it ends.

        Raises:
            TangentError: it has none here.
        """
        first, last = (part, part) if isinstance(part, Block) else (part.blocks[0], part.blocks[-1])
        return self.graph.operator(first.entry, last.exit)

    @property
    def bound_confidence(self) -> float:
        """Confidence to ask of each estimate, so that all bounds of blocks and branches hold together."""
        blocks = self.anatomy.blocks
        return confidence_of_each(BOUND_CONFIDENCE, len(blocks) + sum(len(b.branches) for b in blocks))

    def sigma_max(self, op: JacobianOperator, kind: str) -> tuple[SigmaMax, str]:
        """σ_max as exactly as `kind` ("part", "stack") wants it, and how."""
        found = sigma_max(
            op, tol=TOLERANCE[kind], max_products=MAX_PRODUCTS[kind], confidence=CONFIDENCE[kind]
        )
        if found.status is Status.EXACT:
            return found, f"{EXACT}; {self.conditions}"
        error = f"relative error ≤ {found.error:.1g} ({CONFIDENCE[kind]:.0%} confidence)"
        how = f"iterative, {found.status}, {error}, residual {found.residual:.1g}, {found.products} products"
        return found, f"{how}; {self.conditions}"

    @contextmanager
    def booked(self, name: str, op: JacobianOperator, share: float) -> Iterator[None]:
        """Put what the body spends on `op`, a map that is `share` of the whole, on the account of `name`."""
        before = op.products
        with self.spending.timed(name):
            try:
                yield
            finally:
                self.spending.add(name, (op.products - before + SET_UP) * share)


def site_of(part: Block | Stack) -> str:
    """Its name in measurements."""
    return part.site if isinstance(part, Block) else part.name


def drawn(op: JacobianOperator, count: int, size: int) -> Tensor:
    """Standard normal rows [count, size] for products with `op`, the same in every run."""
    rows = torch.randn(count, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return rows.to(op.device, op.dtype)


def compared(was: bool) -> str:
    """What `how` says of the tangent check."""
    return "" if was else "; tangent not compared with finite differences"


def guarded(
    look: Look,
    quantities: Iterable[str],
    site: str,
    measure: Callable[[], list[Measurement]],
    *,
    decides: bool = False,
) -> list[Measurement]:
    """What `measure` gives, or why there is nothing, for each of `quantities`.

    Args:
        decides: whether a site that has no derivative here is refused from then on.
    """
    reason = look.refused.get(site, "")
    if not reason:
        try:
            return measure()
        except OverBudget as left_out:
            decides, reason = False, str(left_out)
        except TangentError as error:
            reason = str(error)
        except FloatingPointError:
            reason = "a product with the Jacobian is not finite"
    if decides:
        look.refused[site] = reason
    return [not_measured(quantity, site, reason) for quantity in quantities]


def log10(value: float) -> float:
    """log₁₀, −inf of zero."""
    return math.log10(value) if value > 0 else -math.inf
