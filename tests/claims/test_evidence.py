"""Figures, and verdicts in words and JSON, where cases lie outside a hypothesis or no seed draws them."""

import json
from dataclasses import replace

from normscope.claims import Case, ClaimResult, Evidence, Figure, Sentence, Setup, judge, measure_claim
from normscope.claims.claim import Claim
from normscope.claims.words import effects_words, verdict_words


def case(seed: int | None, value: float, *, holds: bool = True, within: bool = True, part: str = "") -> Case:
    return Case(seed=seed, where="here", value=value, holds=holds, within=within, part=part)


COUNTED = [case(0, 2.0), case(0, 1.0, holds=False), case(0, 9.0, within=False), case(1, 3.0)]
CASES = [*COUNTED, case(1, 8.0, part="a")]


def test_a_figure_is_of_the_cases_that_count() -> None:
    assert Figure.largest("x", CASES).by_seed == {0: 2.0, 1: 3.0}
    assert Figure.share("x", CASES).by_seed == {0: 50.0, 1: 100.0}
    assert Figure.largest("x", CASES, "a").by_seed == {1: 8.0}


def test_a_figures_value_is_the_median_over_seeds() -> None:
    figure = Figure("x", {0: 1.0, 1: 9.0, 2: 2.0})
    assert (figure.low, figure.value, figure.high) == (1.0, 2.0, 9.0)


def test_what_no_seed_draws_comes_through_json(odd: dict[str, Claim]) -> None:
    import dataclasses

    evidence = Evidence(cases=[case(None, 2.0)], figure=Figure("x", {None: 2.0}))
    claim = dataclasses.replace(odd["Z1"], measure=lambda setup: evidence)
    result = measure_claim(claim, Setup(seeds=(0, 1)))
    given = json.loads(json.dumps(result.to_dict()))
    assert given["figure"]["by_seed"] == {"all": 2.0}
    assert given["cases"] == 1
    assert given["verdict_by_seed"] == {}
    again = ClaimResult.from_cache(claim, json.loads(json.dumps(result.to_cache())))
    assert again.evidence.figure == evidence.figure
    assert again.evidence.cases == list(evidence.cases)


def test_a_hypothesis_says_how_often_it_is_met() -> None:
    sentence = Sentence("It holds.", hypothesis="‖A‖ < 1", of="maps")
    words = verdict_words(judge(sentence, CASES[2:4]))
    assert words == "holds; its hypothesis, ‖A‖ < 1, is met in 1 of 2 maps"
    assert verdict_words(judge(replace(sentence, of=""), CASES[2:4])) == "holds"


def test_an_effect_in_words() -> None:
    sentence = Sentence("It helps.", smallest=0.1)
    cases = [Case(seed=seed, where="6 blocks", value=v, holds=True) for seed, v in enumerate((0.2, 0.3, 0.4))]
    (words,) = effects_words(judge(sentence, cases))
    assert words == "6 blocks: 0.3 (95 % 0.0516 … 0.548, 3 seeds), counts from 0.1"
    assert effects_words(judge(Sentence("It is."), cases)) == []


def test_a_case_without_words_is_named_by_its_figures() -> None:
    assert (
        Case(0, "", 1.0, True, at={"norm": "rmsnorm", "width": 64, "ε": 1e-5}).where
        == "rmsnorm, width 64, ε 1e-05"
    )
    assert Case(0, "here", 1.0, True, at={"width": 64}).where == "here"


def test_the_smallest_value_of_each_seed_is_a_figure() -> None:
    cases = [case(0, 2.0), case(0, 1.0), case(1, 3.0), case(1, 0.5, part="p"), case(0, 0.1, within=False)]
    assert Figure.smallest("x", cases).by_seed == {0: 1.0, 1: 3.0}


def test_a_case_holds_up_to_its_bound() -> None:
    assert [Case.at_most(0, "x", value, 1.0).holds for value in (0.5, 1.0, 1.5)] == [True, True, False]
    assert not Case.at_most(0, "x", float("nan"), 1.0).holds
    assert [Case.at_least(0, "x", value, 1.0).holds for value in (0.5, 1.0, 1.5)] == [False, True, True]
    assert Case.at_most(0, "x", 1.0, 2.0, "part", met=False) == Case(0, "x", 1.0, True, "part", met=False)
