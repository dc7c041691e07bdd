"""The claims in Chinese: each has the sentence of its source, and the page shows it with the verdict."""

import dataclasses
import re

import pytest

from normscope.claims import Claim, Setup, Verdict, in_order, measure_claim
from normscope.claims.page import render_page
from normscope.claims.sentences import sentences
from normscope.claims.words import SIGNS, in_full

TWO = Setup(seeds=(0, 1))


def test_every_claim_has_its_sentence_and_no_other_has() -> None:
    assert set(sentences()) == {claim.id for claim in in_order()}
    for claim in in_order():
        assert re.search(r"[\u4e00-\u9fff]|bn\(x", claim.says_zh), claim.id


def test_every_verdict_has_a_word() -> None:
    assert set(SIGNS) == set(Verdict)
    assert all(re.search(r"[\u4e00-\u9fff]", sign.chinese) for sign in SIGNS.values())


def test_the_sentence_stands_beside_the_claim_everywhere(odd: dict[str, Claim]) -> None:
    result = measure_claim(dataclasses.replace(odd["Z2"], says_zh="在 x < 1 时成立。"), TWO)
    assert result.to_dict()["says_zh"] == "在 x < 1 时成立。"
    assert "在 x < 1 时成立。" in "\n".join(in_full(result))
    for page in (render_page("claims.md", [result], TWO, "", 1.0), render_page("table.md", [result], TWO)):
        assert "在 x &lt; 1 时成立。" in page
    page = render_page("claims.zh.md", [result], TWO, "normscope claims", 1.0)
    (row,) = [line for line in page.splitlines() if line.startswith("| [Z2]")]
    assert "在 x &lt; 1 时成立。" in row
    assert "**在我们的条件下成立**（x &lt; 1）" in row
    assert len(re.findall(r"(?<!\\)\|", row)) == 6
    assert "1 条论断：在我们的条件下成立 1。" in page


@pytest.mark.parametrize("claim", in_order(), ids=lambda claim: claim.id)
def test_conditions_and_hypotheses_are_in_chinese_too(claim: Claim) -> None:
    sentence = claim.sentence
    assert bool(sentence.condition) == bool(sentence.condition_zh)
    assert bool(sentence.hypothesis) == bool(sentence.hypothesis_zh)
    figures = r"\d+(?:\.\d+)?(?:e-?\d+)?"
    for english, chinese in (
        (sentence.condition, sentence.condition_zh),
        (sentence.hypothesis, sentence.hypothesis_zh),
    ):
        assert sorted(re.findall(figures, english)) == sorted(re.findall(figures, chinese))
