"""Moving the norms of a model that was trained a little."""

import pytest

from normscope.claims import CLAIMS, Setup, measure_claim, swapped
from normscope.claims.swapped import Moved
from normscope.claims.training import Recipe


def test_both_ways_are_measured(monkeypatch):
    monkeypatch.setattr(swapped, "FIRST", Recipe(scheme="post", depth=1, width=8, lr=1e-2, steps=30))
    monkeypatch.setattr(swapped, "AFTER", 3)
    found = measure_claim(CLAIMS["C27"], Setup(seeds=(0, 1)))
    assert found.error is None, found.evidence.notes
    assert {case.part for case in found.evidence.cases} == {"", *CLAIMS["C27"].parts}
    assert {case.seed for case in found.evidence.cases} == {0, 1}
    assert len(found.evidence.notes) == 3


@pytest.mark.parametrize(("after", "holds"), [(-0.4, False), (-0.21, False), (-0.19, True), (1.0, True)])
def test_half_of_what_was_learnt_is_a_sharp_drop(after, holds):
    moved = Moved(trained=-0.4, swapped=after, tuned=0.0, scratch=0.0, gradient=1.0)
    assert swapped._drop(0, "post → pre", moved, "").holds is holds


@pytest.mark.parametrize(("tuned", "holds"), [(-0.4, False), (0.1, True)])
def test_a_new_model_with_the_same_steps_is_what_it_is_held_to(tuned, holds):
    moved = Moved(trained=-0.4, swapped=0.3, tuned=tuned, scratch=0.0, gradient=1.0)
    assert swapped._from_scratch(0, "post → pre", moved, "scratch").holds is holds


def test_a_swap_changes_the_loss_and_leaves_the_old_model_alone():
    subject = Recipe(scheme="post", depth=1, width=8).config(0).subject()
    before = swapped._held_out(subject, 0)
    moved = swapped.replace_model(subject, swapped._swapped(subject.model, "pre"))
    assert swapped._held_out(moved, 0) != before
    assert swapped._held_out(subject, 0) == before
