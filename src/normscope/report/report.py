"""Report: everything that one check found, ready to be printed, stored or asserted on."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normscope.anatomy import Anatomy
from normscope.forecast import Forecast, LadderForecast
from normscope.probes import Measurements
from normscope.report.words import headline
from normscope.rules import Finding, Severity, Verdict
from normscope.rules.remedies import Rescue

SCHEMA = "normscope.report/1"
"""Name of the JSON Schema of `Report.to_dict()`, schemas/report.json."""


@dataclass(frozen=True)
class Report:
    """One check.

    Attributes:
        model: where the model came from, as the user wrote it.
        input: the model's input, in words.
        seed, device, versions: the facts needed to repeat the check; `versions` by package name. The seed is
            None where a script has its own.
        anatomy, measurements: the structure that was read, and its figures.
        forecast: result of the trial; None where no trial was asked for.
        ladder: the same run at other learning rates; None where it was not asked for.
        remedies: the tried remedies, ranked; None where they were not asked for.
        findings: all findings, the gravest first, as `judge` orders them.
        verdict: "will fail", "at risk" or "healthy", from the findings. Instead of "healthy" it is
            "no trial" where no training step was tried, and "interrupted" where the check was.
        cost: seconds by probe.
        budget: limit on the cost of the Jacobians, their actual cost, and the parts left out.
        recipe: what a step of the trial does: optimizers and their groups, schedule, clipping, accumulation
            and precision, see `normscope.train.described`; None where no step was asked for.
        notes: further facts that a reader must know ("a single batch is repeated").
        cut_short: the note that says why the check ended before its end; empty if it did not.
    """

    model: str
    input: str
    seed: int | None
    device: str
    versions: Mapping[str, str]
    anatomy: Anatomy
    measurements: Measurements
    forecast: Forecast | None
    findings: tuple[Finding, ...]
    verdict: Verdict
    cost: Mapping[str, float] = field(default_factory=dict)
    budget: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    ladder: LadderForecast | None = None
    remedies: Rescue | None = None
    recipe: Mapping[str, Any] | None = None
    cut_short: str = ""
    schema: str = SCHEMA

    @property
    def other_notes(self) -> list[str]:
        """The notes without `cut_short`, which stands in the first lines of a report."""
        return [note for note in self.notes if note != self.cut_short]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data that strict JSON can hold; the notes also come after `input`.

        JSON has no token for what is not finite, and null already means "not measured": such figures are the
        strings "nan", "inf" and "-inf". `float()` reads all three back.
        """
        plain = {
            "schema": self.schema,
            "model": self.model,
            "input": "; ".join((self.input, *self.notes)),
            "notes": list(self.notes),
            "seed": self.seed,
            "device": self.device,
            "versions": dict(self.versions),
            "anatomy": self.anatomy.to_dict(),
            "measurements": [m.to_dict() for m in self.measurements],
            "recipe": None if self.recipe is None else dict(self.recipe),
            "forecast": None if self.forecast is None else self.forecast.to_dict(),
            "ladder": None if self.ladder is None else self.ladder.to_dict(),
            "remedies": None if self.remedies is None else self.remedies.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings],
            "verdict": self.verdict,
            "cost": dict(self.cost),
            "budget": dict(self.budget),
        }
        return strict(plain)

    def to_json(self) -> str:
        """One JSON object, indented, in the schema of schemas/report.json."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def to_html(self, path: str | Path | None = None, *, command: str | None = None) -> str:
        """The report as one self-contained HTML page.

        Args:
            path: file to write it to; None only returns it.
            command: shell command that made the report, shown as the way to run it again.
        """
        from normscope.report.html import render_html  # it reads Report: imported where it is needed

        page = render_html(self, command)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def __repr__(self) -> str:
        """Model, verdict and findings, for a prompt: the whole would fill pages."""
        findings = ", ".join(f"{finding.code} {finding.name}" for finding in self.findings)
        said = headline(self.verdict, self.forecast, self.ladder)
        return f"<Report of {self.model}: {said}{'; ' * bool(findings)}{findings}>"

    def _repr_html_(self) -> str:
        """The verdict, the findings and the blocks, in a notebook cell."""
        from normscope.report.notebook import report_html  # it reads Report: imported where it is needed

        return report_html(self)

    def to_markdown(self, command: str | None = None) -> str:
        """The report for a pull request: verdict, findings, what was run; 60 lines at most.

        Args:
            command: shell command that made the report, shown as the way to run it again.
        """
        from normscope.report.markdown import render_markdown  # it reads Report: imported where it is needed

        return render_markdown(self, command)

    def assert_healthy(self) -> None:
        """Raise AssertionError, which names every error and warning, unless the verdict is "healthy".

        For a user's own test suite. A check without a trial (no loss, `steps=0`) does not pass.
        """
        __tracebackhide__ = True  # pytest shows the caller's line
        grave = [finding for finding in self.findings if finding.severity != Severity.NOTE]
        if grave or self.verdict != "healthy":
            listed = "\n".join(f"  {f.severity} {f.code} {f.name}: {f.message}" for f in grave)
            raise AssertionError(f"{self.model}: verdict {self.verdict!r}\n{listed}".rstrip())


def strict(value: Any) -> Any:
    """`value` with every float that is not finite as a string, tuples as lists and keys as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value
