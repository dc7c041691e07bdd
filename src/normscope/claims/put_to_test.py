"""`put_to_test`: one claim, measured in this process."""

import math
import time
import traceback
import warnings

import torch

from normscope.claims.claim import Claim
from normscope.claims.evidence import Evidence
from normscope.claims.look import Look
from normscope.claims.tested import Tested
from normscope.errors import describe
from normscope.subjects.rng import generators_kept


class NotMeasured(Exception):
    """Raised by a claim's function that cannot measure here; the message says why."""


def put_to_test(claim: Claim, look: Look) -> Tested:
    """Measure `claim`; what goes wrong in it is said in `error`, with its traceback in the evidence."""
    began = time.perf_counter()
    error = None
    with generators_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            evidence = claim.measure(look)
            _require_sound(claim, evidence)
        except NotMeasured as reason:
            evidence = Evidence(unmeasured=[str(reason)])
        except Exception as failure:  # a claim that breaks must not cost the others; it is shown, and exits 1
            error = describe(failure)
            evidence = Evidence(unmeasured=[error], notes=[traceback.format_exc()])
    return Tested(
        claim=claim, evidence=evidence, seconds=time.perf_counter() - began, long=look.long, error=error
    )


def _require_sound(claim: Claim, evidence: Evidence) -> None:
    """AssertionError for what a claim's function may not return: it would be lost without a word."""
    unknown = {case.part for case in evidence.cases} - {"", *claim.parts}
    assert not unknown, f"cases of no part of {claim.id}: {', '.join(sorted(unknown))}"
    assert evidence.figure is not None or not evidence.cases, f"{claim.id} has cases, but no figure"
    odd = [
        case.where for case in evidence.cases if type(case.holds) is not bool or type(case.met) is not bool
    ]
    assert not odd, f"{claim.id}: {odd[0]}: holds and met are Python's own bool"
    lost = [case.where for case in evidence.cases if case.holds and math.isnan(case.value)]
    assert not lost, f"{claim.id}: {lost[0]}: a case that holds has a figure, not NaN"
