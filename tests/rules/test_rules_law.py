"""Laws over the table of rules: a pair around every threshold, complete texts, frozen names."""

import re

import pytest
from synthetic_cases import PAIRS, Pair

from normscope.rules import RULES, Finding, explain

NAMES = {
    "NS101": "post-ln-deep",
    "NS102": "missing-final-norm",
    "NS103": "identical-blocks",
    "NS104": "unread",
    "NS201": "stream-growth",
    "NS202": "tokens-collapse",
    "NS203": "dead-branch",
    "NS204": "branch-decline",
    "NS205": "attention-saturated",
    "NS206": "unscaled-attention",
    "NS301": "gradient-vanish",
    "NS302": "gradient-explode",
    "NS303": "qk-starved",
    "NS304": "wrong-derivative",
    "NS401": "gain-spread",
    "NS501": "float16-overflow",
    "NS502": "float16-underflow",
    "NS503": "bfloat16-direction",
    "NS504": "eps-small",
    "NS505": "eps-large",
    "NS506": "non-finite",
    "NS601": "plateau",
    "NS602": "needs-warmup",
    "NS603": "diverges",
    "NS701": "later-tokens-leak",
    "NS702": "samples-mix",
    "NS703": "padding-counts",
    "NS704": "no-gradient",
    "NS705": "frozen",
    "NS706": "not-in-optimizer",
    "NS707": "updates-lost",
    "NS708": "first-loss",
    "NS709": "garbage-weights",
    "NS710": "clip-starves",
    "NS711": "decayed-gains",
    "NS712": "labels",
    "NS713": "low-precision-loss",
}


def test_codes_and_names_are_frozen_and_in_order() -> None:
    assert [(rule.code, rule.name) for rule in RULES.values()] == list(NAMES.items())


def test_every_rule_has_a_pair() -> None:
    assert PAIRS.keys() == RULES.keys()


@pytest.mark.parametrize(
    ("code", "pair"), [pytest.param(code, p, id=f"{code}-{p.what}") for code in PAIRS for p in PAIRS[code]]
)
def test_a_rule_fires_just_beyond_its_threshold_and_not_inside(code: str, pair: Pair) -> None:
    (finding,) = RULES[code].findings(pair.beyond)
    assert finding.severity == pair.severity
    assert_complete(finding)
    assert list(RULES[code].findings(pair.inside)) == []


def assert_complete(finding: Finding) -> None:
    rule = RULES[finding.code]
    assert finding.name == rule.name
    assert finding.threshold == rule.threshold
    assert finding.source == rule.source
    assert finding.remedy
    assert finding.message.endswith("."), finding.message
    assert ".." not in finding.message
    structural = finding.code in ("NS101", "NS102", "NS104")
    assert finding.evidence or structural, "a finding rests on measurements"


@pytest.mark.parametrize("code", RULES)
def test_a_rule_says_why_whence_and_what_to_do(code: str) -> None:
    rule, text = RULES[code], explain(code)
    for part in (rule.summary, rule.why, rule.threshold, rule.source, rule.remedy):
        assert part.strip().endswith((".", "?")), part
        assert part in text
    assert re.search(
        r"arXiv:\d{4}\.\d{4,5}|[Oo]ur |IEEE|[Ee]xact|closed form|documentation|own reading", rule.source
    )


@pytest.mark.parametrize("code", [c for c in RULES if c.startswith("NS1")])
def test_structure_alone_is_at_most_a_warning(code: str) -> None:
    assert all(pair.severity != "error" for pair in PAIRS[code])
