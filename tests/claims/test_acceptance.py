"""C33: the parts of it, one by one; the whole on planted results is in the mutation test."""

import pytest

from normscope.claims.acceptance import FAULTS, _derivatives, _faulty, _sound


@pytest.mark.parametrize("scheme", ["pre", "post", "deepnorm", "rezero"])
def test_sound_schemes_pass(scheme: str) -> None:
    assert _sound(scheme, 0).holds


def test_every_fault_is_found_and_two_of_them_without_a_nan() -> None:
    cases = [case for fault in FAULTS for case in _faulty(fault, 0)]
    assert all(case.holds for case in cases if not case.part)
    assert [case.where for case in cases if case.part == "nan" and not case.holds] == [
        "a dead branch",
        "24 blocks without residuals",
    ]


def test_derivative_is_one_where_nothing_stands_on_the_stream() -> None:
    cases = {case.where: case for case in _derivatives(0)}
    assert cases["rezero"].value == pytest.approx(1)
    assert cases["pre"].holds
    assert cases["pre"].met
    assert not cases["post"].holds
    assert not cases["post"].met
