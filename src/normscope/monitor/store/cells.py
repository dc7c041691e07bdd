"""Cells of a run store's tables: values, layouts and findings as SQLite holds them.

The values of a row are kept in a blob, because SQLite turns a NaN in a REAL column into NULL.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.monitor.row import Layout
from normscope.probes import Measurement
from normscope.rules import Finding, Severity

_LITTLE = np.dtype("<f8")


def as_blob(values: NDArray[np.float64]) -> bytes:
    """Values as a blob."""
    return np.ascontiguousarray(values, dtype=_LITTLE).tobytes()


def values_of(blob: bytes) -> NDArray[np.float64]:
    """Values of a blob, or of several that were joined."""
    return np.frombuffer(blob, dtype=_LITTLE)


def layout_of(text: str) -> Layout:
    """Layout of the cell that holds its columns."""
    return tuple((quantity, site) for quantity, site in json.loads(text))


def as_json(value: Any) -> str:
    """A note, or the data of an event, as JSON; what JSON cannot hold becomes a string."""
    return json.dumps(value, default=str)


def cells_of(finding: Finding) -> tuple[str, ...]:
    """Cells of a finding in the table of alarms."""
    return (
        finding.code,
        finding.name,
        str(finding.severity),
        json.dumps(finding.sites),
        finding.message,
        json.dumps([measurement.to_dict() for measurement in finding.evidence]),
        finding.threshold,
        finding.source,
        finding.remedy,
        json.dumps(finding.remedies),
    )


def finding_of(
    code: str,
    name: str,
    severity: str,
    sites: str,
    message: str,
    evidence: str,
    threshold: str,
    source: str,
    remedy: str,
    remedies: str,
) -> Finding:
    """Finding of its cells in the table of alarms."""
    return Finding(
        code=code,
        name=name,
        severity=Severity(severity),
        sites=tuple(json.loads(sites)),
        message=message,
        evidence=tuple(_measurement(row) for row in json.loads(evidence)),
        threshold=threshold,
        source=source,
        remedy=remedy,
        remedies=tuple(json.loads(remedies)),
    )


def _measurement(row: Mapping[str, Any]) -> Measurement:
    value = tuple(row["value"]) if isinstance(row["value"], list) else row["value"]
    return Measurement(**{**row, "value": value})
