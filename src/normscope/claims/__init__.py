"""Testing: every claim of the five sources, put to the test.

claims = chosen(["A", "B3"])                  # or chosen([]) for all
tested = run_claims(claims, Look())           # each: verdict, figure, parts, plots, seconds
"""

from normscope.claims.claim import CLAIMS, Claim, Kind, Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure, Line, Plot
from normscope.claims.judge import Judgement, Verdict, judge
from normscope.claims.look import SEEDS, Look
from normscope.claims.put_to_test import NotMeasured, put_to_test
from normscope.claims.registry import chosen, in_order
from normscope.claims.run import run_claims
from normscope.claims.runs import Runs
from normscope.claims.sources import TEXTS, Source, Text
from normscope.claims.tested import Tested

__all__ = [
    "CLAIMS",
    "SEEDS",
    "TEXTS",
    "Case",
    "Claim",
    "Evidence",
    "Figure",
    "Judgement",
    "Kind",
    "Line",
    "Look",
    "NotMeasured",
    "Plot",
    "Runs",
    "Sentence",
    "Source",
    "Tested",
    "Text",
    "Verdict",
    "chosen",
    "claim",
    "in_order",
    "judge",
    "put_to_test",
    "run_claims",
]
