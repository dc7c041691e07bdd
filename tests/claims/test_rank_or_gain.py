"""A16: what is measured before the first step, and what each suspect foretells."""

import pytest

from normscope.claims import Look
from normscope.claims.rank_or_gain import VARIANTS, _Start, _start, _suspects
from normscope.maps import Result

LOOK = Look(seeds=(0,))
ERASED = {"Post-LN, Xavier": 2, "Post-LN with RMSNorm, Xavier": 1, "Post-LN with DyT for the norm, Xavier": 0}


@pytest.mark.parametrize("name", ERASED)
def test_directions_erased(name: str) -> None:
    variant = next(each for each in VARIANTS if each.name == name)
    assert _start(LOOK, variant, 2, 0).erased == ERASED[name]


@pytest.mark.parametrize("verdict", ["trains", "fails"])
def test_a_suspect_is_right_where_it_foretells_the_verdict(verdict: str) -> None:
    result = Result(
        losses=(3.0,) * 300,
        unigram_entropy=3.2,
        verdict=verdict,
        certain_at=None,
        certain=None,
        stopped=False,
        seconds=1.0,
        stack=1,
        versions={},
    )
    cases = {case.part: case.holds for case in _suspects(VARIANTS[0], 0, _Start(2, 0.9, 0.001), result)}
    fails = verdict == "fails"
    assert cases == {"": fails, "any": fails, "gain": not fails, "tokens": fails, "collapse": not fails}
