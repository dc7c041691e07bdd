"""The JSON: in its schema, strict, with every difference and every row."""

import json
from pathlib import Path
from typing import Any

import handmade
import jsonschema
import pytest

from normscope.compare.document import SCHEMA, to_dict, to_json
from normscope.compare.markdown import render_markdown
from normscope.compare.page import render_html
from normscope.compare.text import render_text
from normscope.compare.types import Diff, Pair
from normscope.schemas import schema

KEYS = [
    "schema",
    "a",
    "b",
    "outcome",
    "verdict",
    "parts",
    "differences",
    "rows",
    "weights",
    "notes",
    "cost",
    "versions",
]
"""Frozen: a script reads them."""


@pytest.fixture(params=handmade.ALL)
def diff(request: pytest.FixtureRequest) -> Diff:
    return handmade.ALL[request.param]()


def refuse(token: str) -> None:
    raise AssertionError(f"{token} is no JSON")


def test_it_is_strict_and_in_the_schema(diff: Diff) -> None:
    document = json.loads(to_json(diff), parse_constant=refuse)
    jsonschema.Draft202012Validator(schema("diff")).validate(document)
    assert document["schema"] == SCHEMA == diff.schema
    assert list(document) == KEYS


def test_every_difference_is_there(diff: Diff) -> None:
    document = to_dict(diff)
    assert [each["message"] for each in document["differences"]] == [
        each.message for each in diff.differences
    ]
    assert [each["confirmed"] for each in document["differences"]] == [
        each.confirmed for each in diff.differences
    ]
    assert sum(part["num_differences"] for part in document["parts"]) == len(diff.differences)
    assert document["outcome"] == (
        "different"
        if diff.differences
        else "same"
        if any(each.how != "not" for each in diff.parts)
        else "not compared"
    )


def test_every_row_is_there(diff: Diff) -> None:
    def agrees(written: dict[str, Any], pair: Pair) -> bool:
        names = [each and each.name for each in (pair.a, pair.b)]
        found = [written[side] and written[side]["name"] for side in ("a", "b")]
        return (
            found == names
            and len(written["parts"]) == len(pair.parts)
            and all(map(agrees, written["parts"], pair.parts))
        )

    assert agrees(to_dict(diff)["rows"], diff.rows)


def test_a_figure_that_is_not_finite_is_a_string() -> None:
    found = next(
        each for each in to_dict(handmade.everything())["differences"] if each["name"] == "measurement"
    )
    assert found["b"] == "nan"
    assert found["a"] == 1.2e-3


def test_names_are_those_of_the_models() -> None:
    """For programs, nothing is cleaned or cut."""
    document = json.loads(to_json(handmade.hostile()))
    assert document["a"] == handmade.HOSTILE
    assert document["differences"][0]["b"] == handmade.HOSTILE * 20


def test_the_methods_are_the_outputs(tmp_path: Path) -> None:
    diff = handmade.one()
    assert diff.to_dict() == to_dict(diff)
    assert diff.to_json() == to_json(diff)
    assert diff.to_text(80) == render_text(diff, 80)
    assert diff.to_markdown("x") == render_markdown(diff, "x")
    assert diff.to_html(tmp_path / "a.html", command="x") == render_html(diff, "x")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == render_html(diff, "x")
