"""Claims in words: figures, verdicts, JSON, Markdown, and the README's counts held to docs/claims.md."""

import dataclasses
import importlib
import json
import math
import re
import textwrap
from pathlib import Path

import pytest

from normscope.claims import CLAIMS, Claim, Figure, Setup, measure_claim
from normscope.claims import sentences as sentences_module
from normscope.claims.page import render_page
from normscope.claims.result import ClaimResult as Outcome
from normscope.claims.sentences import read_sentences
from normscope.claims.words import figure_words, in_full, number, table, tally, to_json, verdict_words

ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs" / "claims.md", ROOT / "README.md"
TWO = Setup(seeds=(0, 1))
KEYS = {
    *(
        "id",
        "says",
        "says_zh",
        "hypothesis",
        "outside",
        "smallest",
        "effects",
        "asks",
        "kind",
        "sources",
        "verdict",
        "figure",
        "condition",
        "seconds",
        "cached",
    ),
    *("long", "cases", "held", "counterexample", "stable", "verdict_by_seed", "parts", "plots", "notes"),
    *("unmeasured", "reason", "code", "digest", "kept_long"),
}


@pytest.fixture
def tested(odd: dict[str, Claim]) -> list[Outcome]:
    return [measure_claim(odd[id], TWO) for id in ("Z1", "Z2", "Z3", "Z4", "Z5", "Z8")]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (0.012345, "0.0123"),
        (-1234.5, "-1234"),
        (4.56e-8, "4.6e-8"),
        (3e12, "3e12"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_numbers_are_short(value: float, words: str) -> None:
    assert number(value) == words


def test_a_figure_has_its_interval_where_seeds_differ() -> None:
    assert figure_words(Figure("size", {0: 1.0, 1: 3.0, 2: 2.0})) == "size: 2 (1 … 3)"
    assert figure_words(Figure("size", {0: 1.0, 1: 1.0001})) == "size: 1"
    assert figure_words(None) == ""


def test_a_verdict_says_its_condition_and_on_how_many_seeds(tested: list[Outcome]) -> None:
    said = [verdict_words(each.judgement) for each in tested]
    assert said == [
        "holds",
        "holds under our condition: x < 1; met in 2 of 4 real blocks",
        "undecided (seeds disagree: 1 × refuted, 1 × holds)",
        "not measured",
        "not measured",
        "refuted",
    ]


def test_json_has_every_key_and_no_nan(tested: list[Outcome]) -> None:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    given = json.loads(to_json(tested, TWO, "normscope claims", 1.0), parse_constant=refuse)
    assert given["schema"] == "normscope.claims/2"
    assert given["tally"] == {
        "holds": 1,
        "holds under our condition": 1,
        "refuted": 1,
        "undecided": 1,
        "not measured": 2,
    }
    for each, claim in zip(tested, given["claims"], strict=True):
        assert claim.keys() == KEYS
        assert claim["id"] == each.claim.id
        assert claim["verdict"] == str(each.judgement.verdict)
    condition = given["claims"][1]["condition"]
    assert condition == {"says": "x < 1", "met": 2, "cases": 4, "of": "real blocks"}
    assert given["claims"][5]["figure"]["value"] == "-inf"
    assert given["claims"][5]["plots"][0]["lines"][0]["y"] == ["nan", 0.0, "-inf"]


def test_the_documented_keys_are_those_of_the_json(tested: list[Outcome]) -> None:
    _, _, rows = render_page("claims.md", tested, TWO, "normscope claims", 1.0).partition(
        "A claim is an object with these keys:"
    )
    documented = {
        key for row in re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)
    }
    assert documented == KEYS


def test_one_claim_in_full_has_all_that_was_measured(tested: list[Outcome]) -> None:
    full = "\n".join(in_full(tested[1]))
    for words in (
        "Z2  It holds",
        "half of it",
        "Besides, this",
        "A note",
        "On a GPU",
        "not measured",
        "零空间",
    ):
        assert words in full
    assert "reason        needs a GPU <here>" in in_full(tested[3])


def test_the_table_of_a_terminal_keeps_brackets(tested: list[Outcome]) -> None:
    from rich.console import Console

    odd = dataclasses.replace(tested[0].claim.sentence, says="See [bold]this[/bold] and [1, 2].")
    first = dataclasses.replace(tested[0], claim=dataclasses.replace(tested[0].claim, sentence=odd))
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table([first, *tested[1:]]))
    assert "[bold]this[/bold] and [1, 2]." in captured.get()


def test_a_narrow_table_cuts_nothing(tested: list[Outcome]) -> None:
    from rich.console import Console

    long = dataclasses.replace(tested[0].claim, says_zh="这对影响仅是右乘对角矩阵，不改变零空间的结构")
    first = dataclasses.replace(tested[0], claim=long)
    console = Console(width=40)
    with console.capture() as captured:
        console.print(table([first, *tested[1:]]))
    shown = captured.get()
    assert "…\n" not in shown
    assert all(character in shown for character in long.says_zh)
    for each in tested:
        for figure in re.findall(r"\d[\d.e-]*", figure_words(each.evidence.figure)):
            assert figure in shown


def test_the_tally_speaks_of_one_and_of_many(tested: list[Outcome]) -> None:
    assert tally([]) == "no claim was tested"
    assert tally(tested[:1]) == "1 claim: 1 holds"
    assert tally(tested[2:3]) == "1 claim: 1 is undecided"


def test_markdown_is_tables_that_nothing_breaks(tested: list[Outcome]) -> None:
    page = render_page("claims.md", tested, TWO, "normscope claims", 1.0)
    rows = [line for line in page.splitlines() if line.startswith("| [Z")]
    assert [re.match(r"\| \[(Z\d)\]", row)[1] for row in rows] == ["Z1", "Z2", "Z3", "Z4", "Z5", "Z8"]  # type: ignore[index]
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) == 6
    assert "**holds under our condition**: x &lt; 1; met in 2 of 4 real blocks" in page
    assert "<script>" not in page
    assert "### Z4" in page
    assert "needs a GPU &lt;here>" in page
    assert "Traceback" not in page
    assert page == render_page("claims.md", tested, TWO, "normscope claims", 1.0)


def test_a_table_of_some_claims_shows_the_rows_of_the_page(tested: list[Outcome]) -> None:
    page, rows = render_page("claims.md", tested, TWO, "", 1.0), render_page("table.md", tested, TWO)
    assert verdicts(rows, "docs/claims.md") == verdicts(page)
    assert verdicts(page)


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.id)
def test_the_page_shows_the_sentences_as_they_are(claim: Claim) -> None:
    page = PAGE.read_text(encoding="utf-8")
    entry = page.partition(f"\n### {claim.id}\n\n")[2].partition("\n###")[0].replace("&lt;", "<")
    assert entry.startswith(claim.sentence.says + "\n")
    assert f"- **criterion**: {claim.asks} ({claim.kind})\n" in entry
    if "- **verdict**: **not measured**" not in entry:
        assert [part.says for part in claim.parts.values() if f"tested**: {part.says} **" not in entry] == []


def test_the_readme_counts_the_verdicts_of_the_page() -> None:
    (tally,) = re.findall(r"^\*\*(\d+) claims: (.*?)\.\*\*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    readme = " ".join(README.read_text(encoding="utf-8").split())
    assert f"tests {tally[0]} statements" in readme
    assert tally[1] in readme


def verdicts(page: str, file: str = "") -> dict[str, tuple[str, str]]:
    """Verdict and figure of each row by id."""
    found = {}
    for id, cells in re.findall(rf"^\| \[(\w+)\]\({re.escape(file)}#\w+\) \| (.*) \|$", page, re.MULTILINE):
        *_, verdict, figure = re.split(r"(?<!\\)\|", cells)
        found[id] = (verdict.strip(), figure.strip())
    return found


def test_the_claim_of_contributing_is_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```\w+ title=src/normscope/claims/(\S+)\n(.*?)```", page, re.DOTALL))
    said = read_sentences(textwrap.dedent(blocks.pop("sentences.toml")))
    monkeypatch.setattr(sentences_module, "sentences", lambda: said)
    ((file, body),) = blocks.items()
    name = file.removesuffix(".py")
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(body), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module(name)
        tested = measure_claim(CLAIMS["C99"], TWO)
    finally:
        CLAIMS.pop("C99", None)
    assert tested.error is None
    words = verdict_words(tested.judgement)
    assert words == "holds under our condition: the input's variance is at least 100 ε"
