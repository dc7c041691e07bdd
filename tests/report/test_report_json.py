"""A report as JSON: strict, in the schema, with the keys of the design, whatever the figures are."""

import json
import math
from dataclasses import replace

import jsonschema
import pytest
from handmade_reports import report

from normscope.anatomy import Anatomy
from normscope.probes import Measurement, Measurements
from normscope.report import Report
from normscope.schemas import schema

KEYS = [
    "schema",
    "model",
    "input",
    "notes",
    "seed",
    "device",
    "versions",
    "anatomy",
    "measurements",
    "recipe",
    "forecast",
    "ladder",
    "remedies",
    "findings",
    "verdict",
    "cost",
    "budget",
]


def refuse(token: str) -> None:
    raise AssertionError(f"{token} is not JSON")


def parsed(one: Report) -> dict:
    return json.loads(one.to_json(), parse_constant=refuse)


@pytest.mark.parametrize(
    "one",
    [
        report(),
        report(1),
        report(findings=()),
        replace(report(), anatomy=Anatomy((), ("nothing",)), measurements=Measurements(), forecast=None),
        replace(report(), seed=None),
    ],
    ids=["full", "one-block", "healthy", "nothing-read", "script"],
)
def test_json_is_strict_and_in_the_schema(one: Report) -> None:
    data = parsed(one)
    jsonschema.Draft202012Validator.check_schema(schema("report"))
    jsonschema.validate(data, schema("report"))
    assert list(data) == KEYS
    assert data == json.loads(json.dumps(one.to_dict()))


def test_the_schema_refuses_what_is_not_a_report() -> None:
    for change in ({"verdict": "fine"}, {"extra": 1}, {"seed": "0"}, {"schema": "normscope.report/2"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(parsed(report()) | change, schema("report"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_word_that_float_reads_back(value: float) -> None:
    rows = Measurements(
        [Measurement("stream/rms", "layers.0", value), Measurement("stream/rms", "", (value,))]
    )
    data = parsed(replace(report(), measurements=rows))
    jsonschema.validate(data, schema("report"))
    first, second = (row["value"] for row in data["measurements"])
    assert str(float(first)) == str(float(second[0])) == str(value)


def test_not_measured_is_null_and_says_why() -> None:
    row = next(r for r in parsed(report())["measurements"] if r["quantity"] == "jacobian/rank")
    assert row["value"] is None
    assert row["how"] == "not measured: too large"


def test_a_report_without_notes_is_one_of_before() -> None:
    data = parsed(report())
    del data["notes"]
    jsonschema.validate(data, schema("report"))


def test_a_scripts_report_names_no_seed() -> None:
    script = replace(report(), seed=None)
    assert parsed(script)["seed"] is None
    assert "<dt>Seed</dt>" in report().to_html()
    assert "<dt>Seed</dt>" not in script.to_html()
    assert "made with | cpu, torch" in script.to_markdown()


def test_findings_and_notes_are_there() -> None:
    data = parsed(report())
    assert data["verdict"] == "will fail"
    assert data["input"] == "4 × 64 byte ids; a single batch is repeated"
    assert data["notes"] == ["a single batch is repeated"]
    assert [(f["code"], f["severity"]) for f in data["findings"]] == [("NS202", "error"), ("NS504", "note")]
    assert data["findings"][0]["evidence"][0]["value"] == "-inf"


def test_assert_healthy_names_what_is_wrong_and_passes_notes() -> None:
    with pytest.raises(AssertionError, match="NS202 tokens-collapse: Gone: 1e-9") as raised:
        report().assert_healthy()
    assert "NS504" not in str(raised.value)
    report(findings=report().findings[1:]).assert_healthy()


@pytest.mark.parametrize("verdict", ["interrupted", "no trial"])
def test_what_was_not_checked_to_the_end_is_not_healthy(verdict: str) -> None:
    cut = replace(report(findings=()), verdict=verdict)
    jsonschema.validate(parsed(cut), schema("report"))
    with pytest.raises(AssertionError, match=rf"verdict '{verdict}'$"):
        cut.assert_healthy()
