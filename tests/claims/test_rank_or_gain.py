"""A16: what is measured before the first step, and what each suspect foretells."""

import pytest

from normscope.claims import Setup
from normscope.claims.rank_or_gain import INTERVENTIONS, Start, _suspects, start_of
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


@pytest.mark.parametrize("loss", [2.0, 3.0])
def test_a_suspect_is_right_where_it_foretells_the_outcome(loss: float) -> None:
    outcome = Outcome((loss,) * 300, (3.0,) * 300, 3.0)
    cases = {case.part: case.holds for case in _suspects("a stack", 0, Start(2, 0, 0.9, 0.001), outcome)}
    fails = loss == 3.0
    assert cases == {
        "": fails,
        "end": not fails,
        "any": fails,
        "gain": not fails,
        "tokens": fails,
        "collapse": not fails,
    }
