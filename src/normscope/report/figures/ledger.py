"""Ledger: measurements by quantity and site, as the drawings look them up."""

from collections.abc import Iterable

from normscope.anatomy import Branch, Norm
from normscope.anatomy.types import at_call
from normscope.forecast import ForecastStep
from normscope.probes import Measurement
from normscope.report.figures.scales import figure


class Ledger:
    """A quick look-up of a table of measurements."""

    def __init__(self, rows: Iterable[Measurement], trial: ForecastStep | None = None) -> None:
        """`trial`: the last step of a trial, whose gradients stand beside those at the start."""
        self.rows = list(rows)
        self.trial = trial if trial is not None and trial.step > 0 and trial.gradients else None
        self._found = {(row.quantity, row.site): row for row in reversed(self.rows)}

    def find(self, quantity: str, site: str) -> Measurement | None:
        """The first measurement of `quantity` at `site`, measured or not."""
        return self._found.get((quantity, site))

    def scalar(self, quantity: str, site: str) -> float | None:
        """Its value where it is one measured number."""
        row = self.find(quantity, site)
        return float(row.value) if row is not None and isinstance(row.value, float | int) else None

    def words(self, quantity: str, site: str, label: str = "") -> str:
        """One line for a tooltip: "stream/rms 1.234", or why there is no figure; "" without a row."""
        row = self.find(quantity, site)
        if row is None or isinstance(row.value, tuple):
            return ""
        return f"{label or quantity}  {figure(row.value, 6) if row.measured else row.how}"

    def erased(self, branch: Branch, norm: Norm) -> float | None:
        """Share of gradient energy that `norm` erases in this branch's call."""
        called = self.scalar("gradient/erased", at_call(norm.path, branch.call))
        return called if called is not None else self.scalar("gradient/erased", norm.path)

    def trained(self, site: str) -> float | None:
        """L2 norm of the gradient of a block's weights after the trial."""
        return self.trial.gradients.get(site) if self.trial is not None else None
