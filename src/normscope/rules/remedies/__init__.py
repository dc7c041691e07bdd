"""Remedies: functions that change a Subject or the settings of its run, and their trials."""

# The families enter their remedies into REMEDIES, in the order in which they are tried.
from normscope.rules.remedies import run, start, head, placement, scaling, qk_norm, norms  # noqa: F401, I001
from normscope.rules.remedies.remedy import REMEDIES, NotApplicable, Remedy
from normscope.rules.remedies.run import LOWER_RATES
from normscope.rules.remedies.trying import (
    LONGER,
    Attempt,
    RemediesInterrupted,
    Rescue,
    apply_all,
    needs_rescue,
    try_remedies,
)

__all__ = [
    "LONGER",
    "LOWER_RATES",
    "REMEDIES",
    "Attempt",
    "NotApplicable",
    "RemediesInterrupted",
    "Remedy",
    "Rescue",
    "apply_all",
    "needs_rescue",
    "try_remedies",
]
