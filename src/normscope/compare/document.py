"""The comparison as one JSON object, in the schema of schemas/diff.json."""

import json
from typing import Any

from normscope.compare.types import Compared, Diff, Difference, Pair, Place
from normscope.compare.words import lead, outcome
from normscope.report.report import strict

SCHEMA = "normscope.diff/1"
"""Name of the JSON Schema of `to_dict`, schemas/diff.json."""


def to_dict(diff: Diff) -> dict[str, Any]:
    """The comparison as plain data that strict JSON can hold: what is not finite is a string, as "nan"."""
    return strict(
        {
            "schema": diff.schema,
            "a": diff.a,
            "b": diff.b,
            "outcome": outcome(diff),
            "verdict": lead(diff),
            "parts": [_compared(each, len(diff.of(each.part))) for each in diff.parts],
            "differences": [_difference(each) for each in diff.differences],
            "rows": _pair(diff.rows),
            "weights": None if diff.weights is None else dict(diff.weights),
            "notes": list(diff.notes),
            "cost": dict(diff.cost),
            "versions": dict(diff.versions),
        }
    )


def to_json(diff: Diff) -> str:
    """One JSON object, indented."""
    return json.dumps(to_dict(diff), indent=2, ensure_ascii=False, allow_nan=False)


def _compared(each: Compared, num_differences: int) -> dict[str, Any]:
    return {
        "part": str(each.part),
        "how": each.how,
        "why": list(each.why),
        "said": each.said,
        "num_differences": num_differences,
        "figures": dict(each.figures),
    }


def _difference(each: Difference) -> dict[str, Any]:
    return {
        "part": str(each.part),
        "name": each.name,
        "sites": [{"a": a, "b": b} for a, b in each.sites],
        "a": each.a,
        "b": each.b,
        "message": each.message,
        "evidence": list(each.evidence),
        "confirmed": each.confirmed,
        "is_first": each.is_first,
    }


def _pair(pair: Pair) -> dict[str, Any]:
    return {"a": _place(pair.a), "b": _place(pair.b), "parts": [_pair(each) for each in pair.parts]}


def _place(place: Place | None) -> dict[str, Any] | None:
    """The place alone: its parts stand in the pair's parts."""
    return None if place is None else {"level": place.level, "name": place.name, "facts": dict(place.facts)}
