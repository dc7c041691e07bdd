"""docs/findings: each finding has a page and a picture; Chinese texts have the figures of English ones."""

import re
import runpy
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from normscope.rules import RULES

FOLDER = Path(__file__).parents[2] / "docs" / "findings"


@pytest.fixture(scope="module")
def makers() -> dict:
    """The namespace of docs/findings/pages.py."""
    sys.path.insert(0, str(FOLDER))
    try:
        return runpy.run_path(str(FOLDER / "pages.py"))
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("cases", None)


def test_the_pages_are_in_step_with_the_rules(makers: dict) -> None:
    written = {path: path.read_text(encoding="utf-8") if path.exists() else "" for path in makers["pages"]()}
    assert written == makers["pages"](), "run: PYTHONPATH=. python docs/findings/pages.py"
    assert set(FOLDER.glob("*.md")) <= set(written)


def test_every_finding_has_a_case_and_a_picture(makers: dict) -> None:
    assert set(makers["CASES"]) == set(RULES) == set(makers["CHINESE"])
    for code in RULES:
        picture = FOLDER.parent / "images" / "findings" / f"{code}.svg"
        assert "</svg>" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize("field", ["summary", "why", "threshold", "source", "remedy"])
@pytest.mark.parametrize("code", RULES)
def test_the_chinese_text_has_the_figures_of_the_english_one(code: str, field: str, makers: dict) -> None:
    english, chinese = (
        Counter(re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text))
        for text in (getattr(RULES[code], field), makers["CHINESE"][code][field])
    )
    assert english == chinese


@pytest.mark.parametrize("code", tomllib.loads((FOLDER / "zh-alarms.toml").read_text(encoding="utf-8")))
def test_the_chinese_text_of_an_alarm_has_the_figures_of_the_english_one(code: str, makers: dict) -> None:
    texts = makers["CHINESE_ALARMS"][code]
    assert set(texts) == {"summary", "why", "threshold", "source", "remedy"}
    for field, chinese in texts.items():
        english = getattr(makers["ALARMS"][code], field)
        found = [Counter(re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text)) for text in (english, chinese)]
        assert found[0] == found[1], field


def test_a_case_gets_its_finding_and_its_twin_does_not(makers: dict) -> None:
    """All of them: PYTHONPATH=. python docs/findings/pictures.py, by hand."""
    healthy, broken = makers["CASES"]["NS206"].reports("NS206")
    assert "NS206" not in {finding.code for finding in healthy.findings}
    assert "NS206" in {finding.code for finding in broken.findings}
