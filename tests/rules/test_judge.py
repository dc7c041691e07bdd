"""Tests of order and verdict, and of a broken model: it gives one finding, not many."""

import dataclasses
import math
from itertools import chain

import pytest
from synthetic_cases import PAIRS, READING, anatomy, case, partly, trial

from normscope.anatomy import Anatomy
from normscope.forecast import ForecastStep
from normscope.probes import Measurement, Measurements
from normscope.rules import Case, Finding, Severity, judge, verdict


def judged(one: Case) -> list[Finding]:
    return judge(one.anatomy, one.table, one.forecast, one.dtype)


@pytest.mark.parametrize(
    ("severities", "expected"),
    [
        ((), "healthy"),
        (("note", "note"), "healthy"),
        (("note", "warning"), "at risk"),
        (("note", "warning", "error"), "will fail"),
    ],
)
def test_the_worst_finding_makes_the_verdict(severities: tuple[str, ...], expected: str) -> None:
    findings = [Finding("NS999", "x", Severity(s), (), "") for s in severities]
    assert verdict(findings) == expected
    assert verdict(findings, tried=False) == expected.replace("healthy", "no trial")
    for tried in (True, False):
        cut = verdict(findings, interrupted=True, tried=tried)
        assert cut == expected.replace("healthy", "interrupted")


@pytest.mark.parametrize(
    ("diversity", "words"), [(0.95, "0.95): the logits are too small"), (1e-11, "Fix the collapse")]
)
def test_starved_queries_are_treated_by_what_starves_them(diversity: float, words: str) -> None:
    starving = PAIRS["NS303"][0].beyond
    rows = [Measurement("stream/diversity", block.site, diversity) for block in READING.blocks]
    one = Case(READING, Measurements([*starving.table, *rows]), None)
    (finding,) = [f for f in judged(one) if f.code == "NS303"]
    assert words in finding.remedy


def test_findings_come_by_severity_then_depth_then_code() -> None:
    one = case(
        ("stream/rms", "layers.5", 1.0),
        ("stream/rms", "layers.11", 100.0),
        ("branch/zero-output", "layers.2.mlp", 1.0),
        ("branch/trainable", "layers.2.mlp", 0.0),
        ("precision/eps", "layers.0.norm", 1e-12),
        reading=anatomy(final=False),
        forecast=trial("collapses"),
    )
    found = [(f.severity.value, f.code) for f in judged(one)]
    assert found == [
        ("error", "NS202"),
        ("warning", "NS203"),
        ("warning", "NS201"),
        ("warning", "NS102"),
        ("note", "NS504"),
    ]


def test_sites_come_in_the_order_of_depth() -> None:
    sites = ["layers.10.attn", "layers.9.attn", "layers.2.attn"]
    (finding,) = judged(case(*(("attention/entropy", site, 0.0) for site in sites)))
    assert finding.sites == ("layers.2.attn", "layers.9.attn", "layers.10.attn")


def test_nothing_measured_and_nothing_tried_is_no_finding() -> None:
    assert judge(READING, Measurements(), None) == []


def test_a_row_that_was_not_measured_silences_its_rule() -> None:
    table = Measurements([Measurement("attention/entropy", "layers.0.attn", None, how="not measured: x")])
    assert judge(READING, table, None) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_broken_model_gives_its_birth_and_no_flood(value: float) -> None:
    pairs = chain.from_iterable(PAIRS.values())
    rows = {(m.quantity, m.site) for pair in pairs for m in pair.beyond.table}
    table = Measurements(Measurement(quantity, site, value) for quantity, site in sorted(rows))
    broken = Measurement("precision/non-finite", "layers.4.mlp", 1.0, how="exact; NaN born in aten.div")
    table = Measurements([broken, *(m for m in table if m.quantity != "precision/non-finite")])
    found = judge(READING, table, trial("diverges", reason="the loss is not finite"))
    assert [(f.code, f.severity, f.sites) for f in found] == [("NS506", Severity.ERROR, ("layers.4.mlp",))]
    assert "NaN born in aten.div" in found[0].message
    assert verdict(found) == "will fail"


def test_an_empty_reading_is_judged_too() -> None:
    found = judge(Anatomy((), ("no residual adds",)), Measurements(), trial("collapses"))
    assert [f.code for f in found] == ["NS202", "NS104"]


def test_remedies_fit_the_case() -> None:
    collapsed = trial("collapses", lr=1e-3)
    (post,) = judge(anatomy(4, "post"), Measurements(), collapsed)
    (pre,) = judge(anatomy(4, "pre"), Measurements(), collapsed)
    assert "norm_first=True" in post.remedy
    assert "norm_first" not in pre.remedy
    assert "try 0.0001" in post.remedy
    (half,) = judge(READING, Measurements(), trial("diverges"), "float16")
    (full,) = judge(READING, Measurements(), trial("diverges"))
    assert "float32" in half.remedy
    assert "Divide the learning rate" in full.remedy


@pytest.mark.parametrize("code", ["NS102", "NS201", "NS204"])
def test_no_rule_judges_the_part_of_a_stack_that_was_not_read(code: str) -> None:
    """The upper half, the upper quarter and the norm after the last block may all be in that part."""
    for pair in PAIRS[code]:
        one = pair.beyond
        assert code in {f.code for f in judged(one)}
        seen = Case(partly(one.anatomy), one.table, one.forecast, one.dtype)
        assert code not in {f.code for f in judged(seen)}


def test_all_branches_that_were_read_are_not_all_there_are() -> None:
    one = PAIRS["NS203"][1].beyond
    seen = Case(partly(one.anatomy), one.table, None, one.dtype)
    assert [f.severity for f in judged(one) if f.code == "NS203"] == ["error"]
    assert [f.severity for f in judged(seen) if f.code == "NS203"] == ["warning"]


@pytest.mark.parametrize(
    ("losses", "is_pointed"),
    [
        ((4.0, 3.5, 3.0, math.nan), True),
        ((4.0, 3.0, math.inf), True),
        ((4.0, 3.0, 3.5, math.nan), False),  # it rose first, as at a rate that is too large
        ((4.0, math.nan), False),
        ((4.0, 3.0, 9.0), False),
    ],
)
def test_a_nan_out_of_a_falling_loss_points_to_the_tool_that_finds_it(
    losses: tuple[float, ...], is_pointed: bool
) -> None:
    curve = tuple(ForecastStep(10 * k, loss, loss, {}) for k, loss in enumerate(losses))
    (found,) = judge(READING, Measurements(), dataclasses.replace(trial("diverges"), curve=curve))
    assert ("normscope watch" in found.message and "docs/monitor.md" in found.message) == is_pointed
