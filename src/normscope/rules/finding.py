"""Finding: the judgement of a rule, with its evidence, threshold, source and remedy."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from normscope.probes import Measurement


class Severity(StrEnum):
    """Severity of a finding: an error makes the verdict "will fail", a warning "at risk", a note neither."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One judgement.

    Attributes:
        code: stable code, "NS101"; `normscope explain NS101` explains it in full.
        name: stable name, "post-ln-deep".
        severity: see `Severity`.
        sites: block or branch sites it is about, in depth order; empty for the whole model.
        message: one or two sentences with the figures in them.
        evidence: the measurements it rests on (structure alone: may be empty).
        threshold: the rule's limit in words and figures.
        source: paper or measurement the threshold comes from.
        remedy: advice on what to change.
        remedies: names of the remedies that `check(…, try_remedies=True)` can try against it.
    """

    code: str
    name: str
    severity: Severity
    sites: tuple[str, ...]
    message: str
    evidence: tuple[Measurement, ...] = field(default=())
    threshold: str = ""
    source: str = ""
    remedy: str = ""
    remedies: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain data, for the report's JSON."""
        return vars(self) | {
            "severity": str(self.severity),
            "sites": list(self.sites),
            "evidence": [m.to_dict() for m in self.evidence],
            "remedies": list(self.remedies),
        }
