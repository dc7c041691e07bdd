"""Budget of the jacobian probe: its limit, the cost of each part, and the parts left out.

The unit is one forward of the sequence through all stacks: a product with a stack's Jacobian costs about one
unit, a product with one of L blocks about 1/L. A part that may cost more than the rest of the budget is
skipped whole, with a reason, so the limit is never exceeded.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from normscope.errors import UsageError, suggest


class OverBudget(Exception):
    """A part that is left out; the message says why."""


class Budget(StrEnum):
    """Limit of a check's Jacobian analysis."""

    FAST = "fast"
    STANDARD = "standard"
    DEEP = "deep"

    @property
    def forwards(self) -> int:
        """The limit, in forwards of one sequence; docs/cost.md has what a default check of GPT-2 costs."""
        return {Budget.FAST: 160, Budget.STANDARD: 640, Budget.DEEP: 4000}[self]

    @classmethod
    def of(cls, name: str) -> "Budget":
        """The budget of that name; `UsageError` where there is none."""
        if name not in list(cls):
            raise UsageError(f"budget {name!r}", " or ".join(cls), suggest(name, list(cls), "choose one"))
        return cls(name)


@dataclass
class Part:
    """Cost of one part of the probe."""

    forwards: float = 0.0
    seconds: float = 0.0


@dataclass
class Spending:
    """Costs of one check.

    Attributes:
        budget: the user's choice.
        parts: name → cost, in the order of the parts.
        left_out: name → reason.
    """

    budget: Budget = Budget.STANDARD
    parts: dict[str, Part] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def forwards(self) -> float:
        """Forwards spent so far."""
        return sum(part.forwards for part in self.parts.values())

    @property
    def left(self) -> float:
        """Forwards that may still be spent."""
        return max(0.0, self.budget.forwards - self.forwards)

    def require(self, part: str, price: float, least: Budget = Budget.FAST) -> None:
        """Check that the budget is at least `least` and has `price` forwards left for `part`.

        Raises:
            OverBudget: it does not; `left_out` records the reason.
        """
        order = list(Budget)
        if order.index(self.budget) < order.index(least):
            reason = f"--budget {self.budget} leaves it out: needs --budget {least}"
        elif price > self.left:
            reason = (
                f"it may cost {price:.0f} forwards, and {self.left:.0f} of the {self.budget.forwards} of "
                f"--budget {self.budget} are left"
            )
        else:
            return
        self.left_out.setdefault(part, reason)
        raise OverBudget(reason)

    def add(self, part: str, forwards: float) -> None:
        """Book `forwards` on `part`."""
        self.parts.setdefault(part, Part()).forwards += forwards

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Book the seconds that the body takes on `part`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.parts.setdefault(part, Part()).seconds += time.perf_counter() - start

    @contextmanager
    def fixed(self, part: str, price: float, least: Budget) -> Iterator[None]:
        """`require`, then book `price` and the seconds of the body on `part`."""
        self.require(part, price, least)
        with self.timed(part):
            yield
        self.add(part, price)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, for the report's JSON."""
        return {
            "name": str(self.budget),
            "limit": self.budget.forwards,
            "forwards": round(self.forwards, 2),
            "parts": {
                name: {"forwards": round(part.forwards, 2), "seconds": round(part.seconds, 4)}
                for name, part in self.parts.items()
            },
            "left_out": dict(self.left_out),
        }
