"""Every row of the five texts is there, once, with what the table and the page need of it."""

import ast
import re
from pathlib import Path

import pytest

import normscope.claims
from normscope.claims import CLAIMS, TEXTS, Claim, chosen, claim, in_order
from normscope.claims.registry import MODULES
from normscope.claims.sentences import read_sentences
from normscope.errors import UsageError

ROWS = [f"A{i}" for i in range(1, 17)] + [f"B{i}" for i in range(1, 16)] + [f"C{i}" for i in range(1, 34)]
TRAINED = ("A16", "B4", "B5", "B7", "B8", "C2", "C10", "C11", "C14", "C19", "C26", "C27", "C28", "C29")
every_claim = pytest.mark.parametrize("claim", in_order(), ids=lambda claim: claim.id)


def test_every_row_is_there() -> None:
    assert set(MODULES) == {claim.measure.__module__.rpartition(".")[2] for claim in CLAIMS.values()}
    assert set(ROWS) <= set(CLAIMS)


def test_trained_claims_have_a_long_form() -> None:
    assert [id for id in TRAINED if not CLAIMS[id].has_long] == []


@every_claim
def test_a_claim_says_where_it_is_said_and_what_is_asked(claim: Claim) -> None:
    assert re.fullmatch(r"[ABC][1-9]\d?", claim.id)
    assert all(source.text in TEXTS and source.where for source in claim.sources)
    assert any(source.words for source in claim.sources), "a phrase to find it by"
    assert claim.sentence.says.endswith(".")
    assert claim.asks
    assert claim.measure.__doc__
    assert claim.code.startswith("@claim(")
    assert all(part.says.endswith(".") for part in claim.parts.values())


def test_a_claim_without_a_sentence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"claim C99 has no sentence: add a table \[C99\] to claims/sent"):
        claim("C99")


TABLE = 'says = "x"\nzh = "x"\nasks = "x"\n'


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (TABLE, "'sources'"),
        (TABLE + 'sources = []\nsay = "y"', "'say'"),
        (TABLE + 'sources = []\nparts = {a = {says = "y", says_zh = "y"}}', "'says_zh'"),
        (TABLE + 'sources = []\nparts = {a = {condition = "y"}}', "'says'"),
        (TABLE + 'sources = []\nkind = "lwa"', "'lwa'"),
    ],
)
def test_a_table_that_lacks_a_key_or_has_another_is_refused(table: str, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        read_sentences(f"[C99]\n{table}")


def test_smallest_effects_and_conditions_stand_with_their_sentences() -> None:
    tuned = CLAIMS["C11"]
    found = {name: part.smallest for name, part in {"": tuned.sentence, **tuned.parts}.items()}
    assert found == {"": 0.3, "band": None, "norms": 0.3, "deep": 0.3}
    assert CLAIMS["C24"].conditional == ["", "better"]
    assert CLAIMS["C25"].conditional == ["guard"]
    assert CLAIMS["C8"].parts["hundred"].hypothesis == "the blocks have residuals and norms"


@pytest.mark.parametrize("claim", in_order(), ids=lambda claim: claim.id)
def test_a_population_stands_where_a_condition_or_hypothesis_counts_in_it(claim: Claim) -> None:
    sentences = claim.sentences.values()
    counted = any(each.condition or each.hypothesis for each in sentences)
    assert counted or not any(each.of for each in sentences)


def test_no_module_types_a_verdict() -> None:
    """A case that is told True or False, by place or by name, is not a measurement."""
    for module in MODULES:
        source = (Path(normscope.claims.__file__).parent / f"{module}.py").read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Case":
                told = call.args[3:4] + [word.value for word in call.keywords if word.arg == "holds"]
                assert not any(isinstance(each, ast.Constant) for each in told), f"{module}:{call.lineno}"


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["a7"], ["A7"]),
        (["B3-B5"], ["B3", "B4", "B5"]),
        (["A2", "a1", "A2"], ["A1", "A2"]),
    ],
)
def test_claims_are_chosen_by_id_and_range(words: list[str], ids: list[str]) -> None:
    assert [claim.id for claim in chosen(words)] == ids


def test_groups_texts_and_all() -> None:
    assert {claim.group for claim in chosen(["c"])} == {"C"}
    assert all("003" in {source.text for source in claim.sources} for claim in chosen(["003"]))
    assert chosen([]) == in_order()


@pytest.mark.parametrize("word", ["Z1", "A99", "B5-C2", "005", ""])
def test_a_word_that_names_none_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="expected an id"):
        chosen([word])
