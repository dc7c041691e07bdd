"""Tests of codes as users type them, and of the page written from the table."""

import subprocess
import sys
from pathlib import Path

import pytest

from normscope.errors import UsageError
from normscope.rules import RULES, Finding, Severity, explain, matches, parse_codes
from normscope.rules.pages import page

PAGE = Path(__file__).parents[2] / "docs" / "findings.md"
FINDING = Finding("NS202", "tokens-collapse", Severity.ERROR, (), "")


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_code_and_name_explain_the_same_in_any_case(rule) -> None:
    assert explain(rule.code) == explain(rule.name.upper()) == explain(f" {rule.code.lower()} ")
    assert explain(rule.code).startswith(f"# {rule.code} {rule.name}\n")


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("NS20", "NS20"),
        ("token-colapse", "NS202 (tokens-collapse)"),
        ("needs_warmup", "NS602 (needs-warmup)"),
    ],
)
def test_an_unknown_code_gets_the_nearest_one(typed: str, nearest: str) -> None:
    with pytest.raises(UsageError, match="the nearest is") as error:
        explain(typed)
    assert nearest in str(error.value)


def test_nonsense_gets_the_page() -> None:
    with pytest.raises(UsageError, match=r"docs/findings\.md and docs/alarms\.md"):
        explain("%%%")
    with pytest.raises(UsageError, match=r"see docs/findings\.md and docs/alarms\.md for all"):
        parse_codes("%%%")


@pytest.mark.parametrize("code", [pytest.param("NS804", marks=pytest.mark.slow), "loss-spike"])
def test_an_alarm_is_explained_in_a_process_that_imported_no_alarms(code: str) -> None:
    program = f"import normscope.rules; print(normscope.rules.explain({code!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("# NS804 loss-spike\n")


@pytest.mark.parametrize("code", ["NS202", "ns202", "NS2", "NS", "tokens-collapse", "TOKENS-COLLAPSE"])
def test_codes_prefixes_and_names_match(code: str) -> None:
    assert matches(FINDING, code)


@pytest.mark.parametrize("code", ["NS201", "NS3", "tokens", "collapse", ""])
def test_the_rest_does_not(code: str) -> None:
    assert not matches(FINDING, code)


def test_codes_are_parsed_and_a_typo_is_named() -> None:
    assert parse_codes("NS101, NS5,post-ln-deep,") == ("NS101", "NS5", "post-ln-deep")
    assert parse_codes("") == ()
    assert parse_codes(["NS804", "slow-growth"]) == ("NS804", "slow-growth")
    with pytest.raises(UsageError, match=r"'qk-starve'.*NS303"):
        parse_codes("NS101,qk-starve")


def test_the_page_is_in_step_with_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m normscope.rules > docs/findings.md"
