"""The sets `fresh` and `same-fresh` of `benchmarks.diff.runs`: what they hold, and that their truth is true.

All of their cases are checked by hand: `python -m benchmarks.diff.fresh.check`.
"""

from dataclasses import replace

import pytest
import torch

from benchmarks.diff.fresh.check import difference, exact, is_right
from benchmarks.diff.fresh.different import cases, sources
from benchmarks.diff.fresh.same import cases as same_cases
from benchmarks.diff.kinds import KINDS

PLANTED = {case.name: case for case in cases()}
SAME = {case.name: case for case in same_cases()}
CHECKED = [
    "Mistral, split: window at all attention",
    "Cohere, fused: rotary layout at all attention",
    "BLOOM, fused: slopes at all attention",
    "StarCoder2, fused: stop-gradient at attention 1",
    "DINOv2, port: layer scale at layers",
    "Marian, port: embedding scale at first",
    "recipe: norms decay after a refactoring",
    "start: truncated",
    "start: drawn by the library",
    "GPT-NeoX, fused: parity",
    "ModernBERT, port: parity",
    "BART, port: parity",
    "refactoring: heads in a list",
    "refactoring: stacked layers",
    "refactoring: time first",
    "weights: complex rotations",
    "recipe: another style",
]


def test_the_sets_are_large_and_varied() -> None:
    kinds = {truth.kind for case in PLANTED.values() for truth in case.truths}
    assert len(PLANTED) == len(cases()) >= 80
    assert len(kinds) >= 20
    assert kinds <= set(KINDS)
    assert len({case.architecture for case in PLANTED.values()}) >= 20
    assert sum(len(case.truths) == 2 for case in PLANTED.values()) >= 12
    assert len(sources()) >= 25
    assert len(SAME) == len(same_cases()) >= 40
    assert not any(case.truths for case in SAME.values())


@pytest.mark.parametrize("name", CHECKED)
def test_the_two_sides_differ_where_the_case_says_so(name: str) -> None:
    right, size = is_right({**PLANTED, **SAME}[name])
    assert right, size


def test_a_plant_without_effect_is_found() -> None:
    planted = PLANTED["Cohere, split: head scale at last"]
    assert not is_right(replace(planted, b=planted.a))[0]
    assert not is_right(replace(planted, truths=()))[0]
    recipe = PLANTED["recipe: clipping lost"]
    assert not is_right(replace(recipe, b=recipe.a))[0]
    start = PLANTED["start: queries scaled as well"]
    assert not is_right(replace(start, b=start.a))[0]
    assert not is_right(replace(start, truths=()))[0]


def test_the_check_leaves_the_default_type_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), exact():
        raise ZeroDivisionError
    assert torch.get_default_dtype() is torch.float32


def test_a_model_does_not_differ_from_itself() -> None:
    case = SAME["GPT-NeoX, fused: parity"]
    assert difference(replace(case, b=case.a)) == 0
