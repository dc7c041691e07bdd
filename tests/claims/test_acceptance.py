"""C33: the parts of it, one by one; the whole on planted results is in the mutation test."""

import pytest

from normscope.claims.acceptance import FAULTS, _faulty, _sound


def test_a_dead_branch_and_a_lost_mask_pass_both_checks() -> None:
    cases = {case.where: case for fault in FAULTS for case in _faulty(fault, 0) if not case.part}
    missed = {where for where, case in cases.items() if not case.holds}
    assert {"a dead branch, derivative", "no causal mask, derivative"} <= missed
    assert cases["residuals forgotten, derivative"].holds
    assert cases["a NaN in a weight, derivative"].holds


def test_derivative_is_one_where_nothing_stands_on_the_stream() -> None:
    cases = {scheme: next(_sound(scheme, 0)) for scheme in ("rezero", "pre", "post")}
    assert cases["rezero"].value == pytest.approx(1)
    assert cases["pre"].holds
    assert not cases["post"].holds
