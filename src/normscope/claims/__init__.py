"""Tests of every claim of the five sources.

The main calls:

    claims = chosen(["A", "B3"])                  # or chosen([]) for all
    tested = run_claims(claims, Setup())           # each: verdict, figure, parts, plots, seconds
"""

from normscope.claims.claim import CLAIMS, Claim, Kind, Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.judge import Judgement, Verdict, judge
from normscope.claims.measure import NotMeasured, measure_claim
from normscope.claims.plots import Line, Plot
from normscope.claims.registry import chosen, in_order
from normscope.claims.result import ClaimResult
from normscope.claims.run import run_claims
from normscope.claims.runs import Runs
from normscope.claims.setup import SEEDS, Setup
from normscope.claims.sources import TEXTS, Source, Text

__all__ = [
    "CLAIMS",
    "SEEDS",
    "TEXTS",
    "Case",
    "Claim",
    "ClaimResult",
    "Evidence",
    "Figure",
    "Judgement",
    "Kind",
    "Line",
    "NotMeasured",
    "Plot",
    "Runs",
    "Sentence",
    "Setup",
    "Source",
    "Text",
    "Verdict",
    "chosen",
    "claim",
    "in_order",
    "judge",
    "measure_claim",
    "run_claims",
]
