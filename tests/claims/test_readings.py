"""The readings of printed code and of models: B15, B18, C7, C37, C38."""

import pytest

from normscope.claims import CLAIMS, Setup, Verdict, measure_claim
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.readings import placement_of
from normscope.claims.result import ClaimResult as Found
from normscope.claims.snippets import SNIPPETS, model_of, read


def measured(id: str) -> Found:
    """The claim on one seed, without an error."""
    found = measure_claim(CLAIMS[id], Setup(seeds=(0,)))
    assert found.error is None, found.evidence.notes
    return found


@pytest.mark.parametrize(
    ("name", "placement"),
    [("norm of the sum", "post"), ("norm inside", "pre"), ("norm of the output", "res-post")],
)
def test_printed_formulas_are_read(name: str, placement: str) -> None:
    printed = next(each for each in SNIPPETS if each.update == name)
    assert placement_of(read(model_of(printed, 0))) == placement


def test_snippets_labelled_post_are_mostly_pre() -> None:
    found = measured("C7")
    assert found.judgement.verdict is Verdict.REFUTED
    assert found.parts["pre"].verdict is Verdict.REFUTED
    assert found.parts["others"].verdict is Verdict.HOLDS
    assert (found.judgement.held, found.judgement.cases) == (2, 10)
    assert "6 are pre" in found.evidence.notes[0]
    assert "22 of 22" in found.evidence.notes[1]  # torch's own blocks agree with the anatomy


def test_templates_are_pre_without_a_final_norm() -> None:
    found = measured("B18")
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.parts["rms"].verdict is Verdict.HOLDS
    assert found.parts["batch"].verdict is Verdict.REFUTED
    assert found.parts["final"].verdict is Verdict.REFUTED


def test_llms_named_are_pre_and_gpt_has_layer_norm() -> None:
    pytest.importorskip("transformers")
    found = measured("B15")
    assert found.judgement.verdict is Verdict.REFUTED
    assert (found.judgement.held, found.judgement.cases) == (2, 3)
    assert found.parts["placement"].verdict is Verdict.HOLDS
    assert found.judgement.counterexample is not None
    assert "GPT" in found.judgement.counterexample.where


def test_bert_is_post() -> None:
    pytest.importorskip("transformers")
    found = measured("C37")
    assert found.judgement.counterexample is not None
    assert "BERT: post" in found.judgement.counterexample.where
    assert found.parts["variants"].verdict is Verdict.REFUTED


def test_neither_t5_nor_gpt_starts_at_zero() -> None:
    pytest.importorskip("transformers")
    found = measured("C38")
    assert found.judgement.verdict is Verdict.REFUTED
    assert "adds at most 0 of" in found.evidence.notes[0]
