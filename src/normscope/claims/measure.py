"""`measure_claim`: one claim, measured in this process."""

import math
import time
import traceback
import warnings
from dataclasses import replace

import torch

from normscope.claims.claim import Claim
from normscope.claims.evidence import Case, Evidence
from normscope.claims.result import ClaimResult
from normscope.claims.setup import FRESH_SEEDS, Setup
from normscope.errors import describe
from normscope.subjects.rng import generators_kept


class NotMeasured(Exception):
    """Raised by a claim's function that cannot measure here; the message says why."""


def measure_claim(claim: Claim, setup: Setup) -> ClaimResult:
    """Measure `claim`; an exception in it becomes `error`, with its traceback in the evidence."""
    began = time.perf_counter()
    error = None
    with generators_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            evidence = _confirmed(claim, claim.measure(setup), setup)
            _require_sound(claim, evidence)
            evidence = replace(evidence, cases=[_counted(claim, case) for case in evidence.cases])
        except NotMeasured as reason:
            evidence = Evidence(unmeasured=[str(reason)])
        except Exception as failure:  # a claim that breaks must not cost the others; it is shown, and exits 1
            error = describe(failure)
            evidence = Evidence(unmeasured=[error], notes=[traceback.format_exc()])
    return ClaimResult(
        claim=claim, evidence=evidence, seconds=time.perf_counter() - began, long=setup.long, error=error
    )


def _confirmed(claim: Claim, evidence: Evidence, setup: Setup) -> Evidence:
    """The evidence, with the cases of unused seeds where a condition of ours is to be confirmed."""
    if not claim.conditional or not evidence.cases:
        return evidence
    again = claim.measure(replace(setup, seeds=FRESH_SEEDS, fresh=True, long=False))
    cases = [replace(case, fresh=True) for case in again.cases if case.part in claim.conditional]
    return replace(evidence, cases=[*evidence.cases, *cases])


def _counted(claim: Claim, case: Case) -> Case:
    """The case; an effect holds if it is at least the sentence's smallest."""
    smallest = claim.sentences[case.part].smallest
    return case if smallest is None else replace(case, holds=case.value >= smallest)


def _require_sound(claim: Claim, evidence: Evidence) -> None:
    """AssertionError for evidence that would be lost or misread."""
    unknown = {case.part for case in evidence.cases} - claim.sentences.keys()
    assert not unknown, f"cases of no part of {claim.id}: {', '.join(sorted(unknown))}"
    assert evidence.figure is not None or not evidence.cases, f"{claim.id} has cases, but no figure"
    for case in evidence.cases:
        place = f"{claim.id}: {case.where}"
        flags = (case.holds, case.met, case.within)
        assert all(type(flag) is bool for flag in flags), f"{place}: holds, met and within are bool"
        assert not (case.holds and math.isnan(case.value)), f"{place}: a case that holds has a figure"
        if claim.sentences[case.part].smallest is not None:
            assert math.isfinite(case.value), f"{place}: an effect is finite"
