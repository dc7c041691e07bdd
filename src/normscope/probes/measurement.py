"""Measurement, one figure with its name, site, unit and method; and a table of them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

EXACT = "exact"

Value = float | tuple[float, ...] | None


@dataclass(frozen=True)
class Measurement:
    """One figure.

    Attributes:
        quantity: `<quantity>/<stat>`, e.g. "stream/diversity".
        site: a branch, block, norm or parameter path; "" is the whole model; a stack's name for a stack.
        value: a float, a tuple of floats (a spectrum), or None where it was not measured. May be inf or nan.
        unit: "1", "nats", "bits", …
        how: "exact", "iterative, relative error ≤ 1e-2", or "not measured: …" with the reason.
    """

    quantity: str
    site: str
    value: Value
    unit: str = "1"
    how: str = EXACT

    @property
    def measured(self) -> bool:
        """True if it has a value."""
        return self.value is not None

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, for the report's JSON."""
        return vars(self) | {"value": list(self.value) if isinstance(self.value, tuple) else self.value}


def not_measured(quantity: str, site: str, reason: str, unit: str = "1") -> Measurement:
    """A measurement without a value, and the reason."""
    return Measurement(quantity, site, None, unit, f"not measured: {reason}")


class Measurements:
    """A table of measurements, in the order they were made."""

    def __init__(self, rows: Iterable[Measurement] = ()) -> None:
        self._rows = list(rows)

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def extend(self, rows: Iterable[Measurement]) -> None:
        """Put `rows` at the end."""
        self._rows.extend(rows)

    def of(self, quantity: str) -> dict[str, float]:
        """Site → value of every *measured scalar* of `quantity`, in order."""
        return {
            m.site: m.value for m in self._rows if m.quantity == quantity and isinstance(m.value, float | int)
        }

    def find(self, quantity: str, site: str = "") -> Measurement | None:
        """The measurement of `quantity` at `site`, measured or not; None where no probe made one."""
        return next((m for m in self._rows if m.quantity == quantity and m.site == site), None)
