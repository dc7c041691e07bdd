"""A16: what is measured before the first step, and what each suspect predicts."""

import pytest

from normscope.claims import Setup
from normscope.claims.rank_or_gain import INTERVENTIONS, NOT_PREDICTED, Start, _suspects, start_of
from normscope.claims.training import Outcome

LOOK = Setup(seeds=(0,))
ERASED = {
    "Post-LN, Xavier": (2, 2),
    "Post-LN with RMSNorm, Xavier": (1, 1),
    "Post-LN with DyT for the norm, Xavier": (0, 0),
    "Pre-LN with its final norm, Xavier": (0, 2),
    "Pre-LN without final norm, Xavier": (0, 0),
}


@pytest.mark.parametrize("name", ERASED)
def test_directions_erased(name: str) -> None:
    start = start_of(LOOK, INTERVENTIONS[name], 0)
    assert (start.by_layer, start.by_stack) == ERASED[name]


def test_the_text_is_asked_only_what_it_predicts() -> None:
    outcome = Outcome((3.0,) * 300, (3.0,) * 300, 3.0)
    for name in NOT_PREDICTED:
        assert name in INTERVENTIONS
        parts = {case.part for case in _suspects(name, 0, Start(2, 0, 0.9, 0.001), outcome)}
        assert parts == {"any", "gain", "tokens", "collapse"}


@pytest.mark.parametrize("loss", [2.0, 3.0])
def test_a_suspect_is_right_where_it_predicts_the_outcome(loss: float) -> None:
    outcome = Outcome((loss,) * 300, (3.0,) * 300, 3.0)
    found = list(_suspects("a stack", 0, Start(2, 0, 0.9, 0.001), outcome))
    cases = {case.part: case.holds for case in found}
    assert {case.value for case in found} == ({0.1, -0.1} if loss == 3.0 else {0.9, -0.9})
    fails = loss == 3.0
    assert cases == {
        "": fails,
        "end": not fails,
        "any": fails,
        "gain": not fails,
        "tokens": fails,
        "collapse": not fails,
    }
