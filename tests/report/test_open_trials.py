"""Trials that leave the verdict open, and outcomes that seem to differ: the report says why."""

import html
from dataclasses import replace

import pytest
from handmade_reports import report, trial

from normscope.forecast import Forecast, LadderForecast
from normscope.report import Report, text_report
from normscope.report.words import certainty_in_words, headline
from normscope.rules import Finding, Severity


def told(outcome: str, certainty: float | None = None, **more: object) -> Forecast:
    fields = {"outcome": outcome, "reason": "said so", "certainty": certainty} | more
    return replace(trial(), **fields)  # type: ignore[arg-type]


def judged(verdict: str, forecast: Forecast | None, *rungs: Forecast) -> Report:
    ladder = LadderForecast(rungs, None, "not tried", None) if rungs else None
    return replace(report(findings=()), verdict=verdict, forecast=forecast, ladder=ladder)


def words(one: Report) -> str:
    return " ".join(text_report(one, 100).split())


@pytest.mark.parametrize("verdict", ["healthy", "at risk"])
@pytest.mark.parametrize("outcome", ["undecided", "slow", "not measured"])
def test_the_headline_names_a_trial_that_leaves_the_verdict_open(verdict: str, outcome: str) -> None:
    one = judged(verdict, told(outcome))
    said = f"{verdict}, trial {outcome}"
    assert text_report(one, 80).splitlines()[0] == f"{said}  hf:gpt2"
    assert one.to_markdown().splitlines()[0] == f"### normscope: {said}"
    assert f">{said}<" in one._repr_html_()
    page = one.to_html()
    assert f"{said.capitalize()}</h1>" in page
    assert f"<title>{said} · hf:gpt2" in page
    assert ('<header class="untried">' in page or 'class="split untried"' in page) == (verdict == "healthy")
    assert said in repr(one)
    assert one.to_dict()["verdict"] == verdict


@pytest.mark.parametrize(
    ("verdict", "outcome"),
    [
        ("healthy", "trains"),
        ("will fail", "slow"),
        ("no trial", "not measured"),
        ("interrupted", "undecided"),
    ],
)
def test_other_verdicts_stand_alone(verdict: str, outcome: str) -> None:
    assert headline(verdict, told(outcome)) == verdict
    assert headline(verdict, None) == verdict


@pytest.mark.parametrize(
    ("verdict", "outcome", "certainty", "is_named"),
    [
        ("healthy", "trains", 0.69, True),
        ("at risk", "trains", 0.89, True),
        ("at risk", "plateau", 0.56, True),
        ("will fail", "collapses", 0.2, True),
        ("healthy", "trains", 0.9, False),
        ("will fail", "collapses", 0.1, False),
        ("will fail", "trains", 0.69, False),  # another finding made the verdict
        ("at risk", "needs-warmup", 0.69, False),  # the probability is that of the warm-up's trial
        ("healthy", "trains", None, False),
    ],
)
def test_the_headline_names_a_probability_that_is_not_sure(
    verdict: str, outcome: str, certainty: float | None, is_named: bool
) -> None:
    one = judged(verdict, told(outcome, certainty))
    said = f"{verdict}, probability of training {certainty:.2f}" if is_named else verdict
    assert text_report(one, 80).splitlines()[0] == f"{said}  hf:gpt2"
    assert f"{said.capitalize()}</h1>" in one.to_html()
    assert one.to_dict()["verdict"] == verdict


def test_a_headline_that_rests_on_the_ladders_trial_has_its_probability() -> None:
    one = judged("healthy", told("slow", 0.6), told("trains", 0.7, steps=36))
    assert words(one).startswith("healthy, probability of training 0.70 hf:gpt2")


@pytest.mark.parametrize(
    ("outcome", "certainty", "differs"),
    [
        ("slow", 0.6, True),
        ("slow", 0.4, False),
        ("trains", 0.4, True),
        ("trains", 0.6, False),
        ("plateau", 0.6, True),
        ("plateau", 0.4, False),
    ],
)
def test_a_probability_on_the_other_side_of_the_outcome_is_explained(
    outcome: str, certainty: float, differs: bool
) -> None:
    forecast = told(outcome, certainty)
    reason = "near the limit, where runs go either way"
    said = certainty_in_words(forecast)
    assert said == f"probability of training {certainty:.2f}, not sure" + f": {reason}" * differs
    assert (f"{certainty:.2f}, not sure: {reason}" in words(judged("healthy", forecast))) == differs
    one = judged("healthy", told("trains", 0.99), forecast)
    limit = f"outcome and probability differ at 0.001: {reason}"
    assert (limit in words(one)) == differs
    assert (limit in one.to_markdown()) == differs
    assert (limit.capitalize() in one.to_html()) == differs


def test_a_ladder_that_says_otherwise_than_the_runs_trial_says_which_to_trust() -> None:
    why = (
        "at 0.001 the run's trial of 20 steps says slow, and the one here, of 18 steps, says trains; "
        "the verdict rests on the former"
    )
    stopped = (trial().curve[0], replace(trial().curve[-1], step=18))  # half-way, because it was clear
    one = judged("healthy", told("slow", 0.3), told("trains", 0.9, steps=36, curve=stopped))
    assert f"but {why}" in words(one)
    assert why in one.to_markdown()
    assert "At 0.001 the run" in html.unescape(one.to_html())
    untried = judged("healthy", told("slow", 0.3), told("trains", 0.9, curve=()))
    assert "the one here, decided by the loss of larger rates, says trains" in words(untried)
    for same in (told("slow", 0.3, steps=36), told("trains", 0.9, lr=2e-3), told("not measured")):
        assert "the verdict rests on" not in words(judged("healthy", told("slow", 0.3), same))


@pytest.mark.parametrize(
    ("trial_says", "ladder_says", "is_closed"),
    [("slow", "trains", True), ("slow", "slow", False), ("undecided", "trains", False)],
)
def test_a_ladder_that_trains_closes_a_slow_trial(trial_says: str, ladder_says: str, is_closed: bool) -> None:
    one = judged("healthy", told(trial_says), told("trains", lr=5e-3), told(ladder_says, steps=36))
    said = "healthy" if is_closed else f"healthy, trial {trial_says}"
    assert text_report(one, 100).splitlines()[0] == f"{said}  hf:gpt2"
    assert f"<title>{said} · hf:gpt2" in one.to_html()
    elsewhere = judged("healthy", told(trial_says), told("trains", steps=36, lr=5e-3))
    assert words(elsewhere).startswith(f"healthy, trial {trial_says}")


def test_a_check_that_was_cut_short_says_so_first_in_every_form() -> None:
    why = "the script was interrupted after 80 of 300 steps"
    one = replace(judged("at risk", told("trains", 0.99)), cut_short=why, notes=("a single batch", why))
    assert text_report(one, 80).splitlines()[:2] == ["at risk  hf:gpt2", f"but     {why}"]
    assert words(one).count(why) == 1
    markdown = one.to_markdown()
    assert markdown.index(f"Cut short: {why}.") < markdown.index("| the run | |")
    page = one.to_html()
    assert page.index(f"<b>Cut short</b> {why.capitalize()}.") < page.index('<p class="lead">')
    assert page.lower().count(why) == 1
    assert f"Cut short: {why}" in one._repr_html_()
    assert one.to_dict()["notes"] == ["a single batch", why]
    assert "Cut short" not in judged("at risk", told("trains", 0.99)).to_html()


def test_a_short_slow_trial_names_what_says_more() -> None:
    more = "A trial of 20 steps may call a run slow too early: --forecast takes 36 and compares"
    slow = judged("healthy", told("slow", 0.3))
    assert more in words(slow)
    assert more in slow.to_html()
    for other in (told("slow", 0.3, steps=40), told("trains", 0.9)):
        assert "too early" not in words(judged("healthy", other))
    assert "too early" not in words(judged("healthy", told("slow", 0.3), told("slow", 0.3, steps=36)))


def test_a_note_does_not_close_an_open_trial() -> None:
    note = Finding("NS504", "eps-small", Severity.NOTE, (), "ε = 1e-12.")
    one = replace(judged("healthy", told("undecided")), findings=(note,))
    assert words(one).startswith("healthy, trial undecided")


def test_an_open_trial_names_a_risk_of_divergence() -> None:
    risky = judged("healthy", told("undecided", divergence=0.99))
    assert words(risky).startswith("healthy, trial undecided, risk of divergence 0.99")
    assert "Healthy, trial undecided, risk of divergence 0.99</h1>" in risky.to_html()
    little = judged("healthy", told("undecided", divergence=0.05))
    assert words(little).startswith("healthy, trial undecided hf:gpt2")
