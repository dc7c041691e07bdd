"""Moving the norms of a model that was trained a little."""

import dataclasses

import pytest

from normscope.claims import CLAIMS, Setup, Verdict, measure_claim, swapped
from normscope.claims.swapped import Moved
from normscope.claims.training import Setting


def test_both_ways_are_measured(monkeypatch):
    monkeypatch.setattr(swapped, "FIRST", Setting(scheme="post", depth=1, width=8, lr=1e-2, steps=30))
    monkeypatch.setattr(swapped, "AFTER", 3)
    found = measure_claim(CLAIMS["C27"], Setup(seeds=(0, 1)))
    assert found.error is None, found.evidence.notes
    assert {case.part for case in found.evidence.cases} == {"", *CLAIMS["C27"].parts}
    assert {case.seed for case in found.evidence.cases} == {0, 1}
    assert len(found.evidence.notes) == 2


@pytest.mark.parametrize(
    ("after", "tuned", "drops", "no_better"),
    [(-0.21, -0.4, False, False), (-0.19, 0.1, True, True), (1.0, -0.02, True, True)],
)
def test_half_of_what_was_learnt_is_a_sharp_drop(after, tuned, drops, no_better, monkeypatch):
    moved = Moved(trained=-0.4, swapped=after, tuned=tuned, scratch=0.0, gradient=1.0)
    monkeypatch.setattr(swapped, "_moved", lambda setup, first, scheme: dict.fromkeys(setup.seeds, moved))
    found = measure_claim(CLAIMS["C27"], Setup(seeds=(0, 1)))
    assert (found.judgement.verdict is Verdict.HOLDS) is drops
    assert (found.parts["reverse scratch"].verdict is Verdict.HOLDS) is no_better
    assert found.parts["explosion"].verdict is Verdict.REFUTED


def test_a_swap_changes_the_loss_and_leaves_the_old_model_alone():
    subject = Setting(scheme="post", depth=1, width=8).config(0).subject()
    before = swapped._held_out(subject, 0)
    moved = dataclasses.replace(subject, model=swapped._swapped(subject.model, "pre"))
    assert swapped._held_out(moved, 0) != before
    assert swapped._held_out(subject, 0) == before
