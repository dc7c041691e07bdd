"""Remedies that were tried and other rates, in the terminal, on the page and in the JSON."""

import io
import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from handmade_reports import report

from normscope.cli.output import spell_out
from normscope.forecast import AtScale, BestRate, Forecast, ForecastStep, LadderForecast, ScaledRate
from normscope.report import text_report
from normscope.report.console import as_text
from normscope.report.figures.trial import ladder_charts
from normscope.report.rescue import (
    ladder_table,
    ladder_words,
    rate_to_use,
    rates_at_scale,
    remedies_legend,
    way_out,
)
from normscope.rules.remedies import REMEDIES, Attempt, Rescue
from normscope.schemas import schema


def rung(lr: float, outcome: str, loss: float, score: float | None = 1.0) -> Forecast:
    curve = (ForecastStep(0, None, 5.5, {"layers": 0.5}), ForecastStep(20, loss, loss, {"layers": 1e-3}))
    return Forecast(outcome, f"{outcome} <b>so</b>", "adam", lr, 0, 20, 3.31, curve, score)  # type: ignore[arg-type]


LADDER = LadderForecast(
    (rung(1e-4, "slow", 5.1), rung(1e-3, "trains", 3.0), rung(1e-2, "diverges", float("inf"), -3.0)),
    1e-3,
    "10 steps: without one, it fails",
    10,
    BestRate(1.234e-3, 4e-4, 2e-3, "the lowest loss predicted for 300 steps"),
)
RESCUE = Rescue(
    (
        Attempt(("pre-ln",), rung(1e-2, "trains", 3.1, 2.0), "no sign of failure", 1.5),
        Attempt(("deepnorm", "warm-up"), rung(1e-2, "trains", 3.2), "well", 1.5),
        Attempt(("clip",), rung(1e-2, "collapses", 3.4, -1.0), "as before", 1.5),
        Attempt(("qk-norm",), None, "the <i>maps</i> were not found", 0.0),
    )
)
FULL = replace(report(), ladder=LADDER, remedies=RESCUE)
NONE = replace(report(), remedies=Rescue((), "nothing to rescue: the forecast says trains"))
LOST = replace(report(), remedies=Rescue(RESCUE.attempts[2:]))
BOUND = replace(LADDER, rungs=LADDER.rungs[:2])
EMPTY = replace(report(), ladder=LadderForecast((), None, "not tried: interrupted after 0 of 3 rates", None))


@pytest.mark.parametrize(
    "one",
    [FULL, replace(FULL, ladder=BOUND), NONE, LOST, EMPTY],
    ids=["full", "bound", "none", "lost", "empty"],
)
def test_all_are_in_the_schema_and_can_be_shown(one) -> None:
    data = json.loads(one.to_json())
    jsonschema.validate(data, schema("report"))
    assert one.to_html() == one.to_html()
    assert text_report(one)


def test_json_has_the_best_first_with_all_there_is_to_it() -> None:
    data = json.loads(FULL.to_json())
    assert data["remedies"]["best"] == ["pre-ln"]
    assert [a["status"] for a in data["remedies"]["attempts"]] == [
        "rescues",
        "rescues",
        "fails",
        "not applicable",
    ]
    assert data["remedies"]["attempts"][0]["code"] == [REMEDIES["pre-ln"].code]
    assert data["ladder"]["largest_rate"] == 1e-3
    assert data["ladder"]["largest_is_bound"] is False
    assert [r["outcome"] for r in data["ladder"]["rungs"]] == ["slow", "trains", "diverges"]


def test_the_schema_refuses_a_status_that_there_is_not() -> None:
    data = json.loads(FULL.to_json())
    data["remedies"]["attempts"][0]["status"] = "works"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema("report"))


def test_the_terminal_tells_the_way_out_and_every_line() -> None:
    words = text_report(FULL, width=110)
    flat = " ".join(words.split())
    assert f"rescue pre-ln. {REMEDIES['pre-ln'].summary}" in flat
    assert "skipped qk-norm (the <i>maps</i> were not found)" in flat
    lines = [line.split()[:4] for line in words.splitlines()]
    assert ["pre-ln", "rescues", "20", "3.1"] in lines
    assert ["clip", "fails", "20", "3.4"] in lines
    assert "deepnorm + warm-up rescues" in flat
    assert "3 learning rates tested, the largest that trains is 0.001; warm-up 10 steps" in flat
    assert "0.01 diverges" in flat


def test_the_remedies_table_names_steps_and_rates_and_says_how_to_read_losses() -> None:
    long = rung(1e-3, "trains", 3.4)
    long = replace(long, steps=100, certainty=0.7, curve=(long.curve[0], replace(long.curve[-1], step=100)))
    attempts = (
        Attempt(("much-lower-rate",), long, "no sign of failure", 1.5),
        Attempt(("pre-ln", "lower-rate"), rung(1e-2 / 3, "trains", 3.2), "well", 1.5),
        *RESCUE.attempts[2:],
    )
    one = replace(report(), remedies=Rescue(attempts))
    words = text_report(one, width=80)
    rows = [re.split(" {2,}", line) for line in words.splitlines()]
    table = {name: cells for name, *cells in rows}
    assert table["remedy"] == ["forecast", "steps", "loss", "diversity", "changes"]
    assert table["much-lower-rate (0.001)"] == ["rescues", "100", "3.4", "0.001", "settings"]
    assert table["pre-ln + lower-rate (0.00333)"] == ["rescues", "20", "3.2", "0.001", "model"]
    assert table["clip"][:3] == ["fails", "20", "3.4"]
    legend = (
        "“rescues”: forecast to get under the unigram entropy, 3.31, within 300 steps; a short trial need"
    )
    assert legend in " ".join(words.split())
    page = re.sub(r"<[^>]+>", " ", one.to_html()).replace("\u00a0", " ")
    assert legend in page
    assert "much-lower-rate (0.001) rescues 0.70 100 3.4 0.001" in " ".join(page.split())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"outcome": "plateau", "certainty": 0.02}, "open"),  # stuck after 20 steps
        ({"outcome": "collapses", "certainty": 0.02}, "fails"),
        ({"outcome": "collapses", "certainty": 0.2}, "open"),
        ({"outcome": "collapses", "certainty": None}, "fails"),
        ({"outcome": "plateau", "certainty": 0.2, "steps": 300}, "fails"),  # a whole run
        ({"outcome": "trains", "certainty": 0.6}, "rescues"),
    ],
)
def test_a_remedy_that_fails_by_too_few_steps_is_open(change: dict[str, Any], word: str) -> None:
    attempt = Attempt(("clip",), replace(rung(1e-2, "plateau", 3.2), **change), "", 1.0)
    one = replace(report(), remedies=Rescue((attempt,)))
    words = text_report(one, width=80)
    assert ["clip", word] in [line.split()[:2] for line in words.splitlines()]
    legend = "“open”: it fails so far, and so few steps do not tell; --rates tries for longer."
    assert (legend in " ".join(words.split())) is (word == "open")
    assert f">{word}</span>" in one.to_html()


def test_the_legend_names_the_loss_to_beat_that_there_is() -> None:
    of_values = replace(rung(1e-2, "trains", 3.2), unigram_entropy=None, best_constant=0.5)
    unknown = replace(of_values, best_constant=None)
    for forecast, aim in ((of_values, "get under the loss without the input, 0.5,"), (unknown, "train")):
        legend = remedies_legend(Rescue((Attempt(("clip",), forecast, "", 1.0),)))
        assert legend.startswith(f"“rescues”: forecast to {aim} within 300 steps;")
    assert remedies_legend(Rescue(RESCUE.attempts[3:])) == ""


UNJUDGED = rung(3e-2, "not measured", 5.5)


@pytest.mark.parametrize("rungs", [LADDER.rungs[:2], (*LADDER.rungs[:2], UNJUDGED)])
def test_the_largest_rate_is_a_bound_where_no_larger_one_was_tested(rungs: tuple[Forecast, ...]) -> None:
    bound = replace(FULL, ladder=replace(LADDER, rungs=rungs))
    said = (
        "2 learning rates tested, the largest that trains is at least 0.001 "
        "(no larger one was tested; --rates 0.001:0.01:4 goes on)"
    )
    words = text_report(bound, width=110)
    page = re.sub(r"<[^>]+>", "", bound.to_html()).replace("\u00a0", " ")
    assert said in " ".join(words.split())
    assert said in " ".join(page.split())
    assert said in bound.to_markdown()
    assert "\n← trains; no larger rate was tested\n" in words
    data = json.loads(bound.to_json())
    jsonschema.validate(data, schema("report"))
    assert (data["ladder"]["largest_rate"], data["ladder"]["largest_is_bound"]) == (1e-3, True)


@pytest.mark.parametrize("num", [0, 5])
def test_rates_that_were_not_judged_do_not_fail(num: int) -> None:
    """Ctrl-C in the first trials."""
    stopped = "not tried: interrupted after 0 of 9 learning rates"
    ladder = LadderForecast((UNJUDGED,) * num, None, stopped, None)
    said = "no learning rate was judged yet; warm-up not tried: interrupted after 0 of 9 learning rates"
    assert ladder_words(ladder) == said
    assert said in " ".join(text_report(replace(FULL, ladder=ladder)).split())
    whole = replace(ladder, warmup="not needed", best=BestRate(None, None, None, "none trains"))
    assert ladder_words(whole) == "no learning rate was judged; warm-up not needed"


def test_the_count_of_tested_rates_is_that_of_the_judged_ones() -> None:
    stopped = "not tried: interrupted after 1 of 9 learning rates"
    ladder = LadderForecast((LADDER.rungs[0], UNJUDGED), None, stopped, None)
    assert ladder_words(ladder) == f"1 learning rate tested, none trains; warm-up {stopped}"


WIDE = tuple(
    replace(rung(4.64e-5 * 10 ** (k / 3), outcome, 8.41e-4), divergence=0.26, certainty=0.97)
    for k, outcome in enumerate(["not measured", *["trains"] * 6, "collapses", "diverges"])
)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("largest", [1, 6])
def test_nine_rates_with_all_columns_are_a_table_of_eighty_columns(largest: int, encoding: str) -> None:
    spell_out()
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="normscope")
    rungs = [replace(each, lr=float(f"{each.lr:.3g}")) for each in WIDE]
    ladder = replace(LADDER, rungs=tuple(rungs), largest_rate=rungs[largest].lr)
    lines = as_text(lambda width: [ladder_table(ladder)], 80, stream).splitlines()
    assert lines[0].replace("|", " ").split() == [
        "rate",
        "outcome",
        "probability",
        "diverges",
        "steps",
        "loss",
        "diversity",
    ]
    assert [line.split()[0] for line in lines[2:]] == [f"{each.lr:g}" for each in rungs]
    assert max(map(len, lines)) <= 80
    marked = [line.split()[0] for line in lines if {"←", "<-"} & set(line.split())]
    assert marked == [f"{rungs[largest].lr:g}"]


def test_the_mark_in_the_table_is_explained_where_there_is_one() -> None:
    words = text_report(FULL, width=110).splitlines()
    assert [line for line in words if line.startswith("←")] == ["← largest that trains"]
    assert any(line.split()[:3] == ["0.001", "trains", "←"] for line in words)
    assert "←" not in text_report(replace(FULL, ladder=replace(LADDER, largest_rate=None)))


def test_every_form_leads_with_the_rate_to_use() -> None:
    said = "learning rate 0.0012 (0.0004 … 0.002), without a warm-up: the lowest loss predicted for 300 steps"
    words = " ".join(text_report(FULL, width=110).split())
    assert words.index(f"use {said}") < words.index("model ")
    assert f"Use {said}." in FULL.to_markdown()
    page = re.sub(r"<[^>]+>", "", FULL.to_html()).replace("\u00a0", " ")
    assert f"Use {said}" in page
    assert json.loads(FULL.to_json())["ladder"]["best"]["rate"] == 1.234e-3
    ramped = replace(LADDER, rungs=tuple(replace(one, warmup=7) for one in LADDER.rungs))
    assert "0.002), warm-up 7 steps: the lowest" in rate_to_use(ramped)
    needed = replace(LADDER, best=BestRate(4e-3, None, None, "smaller ones end higher", 1))
    assert rate_to_use(needed) == "learning rate 0.004, warm-up 1 step or more: smaller ones end higher"


def test_every_form_says_what_to_expect_of_a_larger_model_under_the_rate() -> None:
    larger = (
        ScaledRate("width", 2, "standard", 7e-4, 3e-4, 1.2e-3),
        ScaledRate("width", 4, "standard", 5e-4, 2e-4, 1e-3),
        ScaledRate("width", 2, "mup", 1.1e-3, 6e-4, 2e-3),
        ScaledRate("depth", 2, "standard", 9e-4, 4e-4, 1.6e-3),
    )
    ladder = replace(LADDER, at_scale=AtScale(larger, ""))
    wide = "at 2× the width about 0.0007 (0.0003 … 0.0012), under μP 0.0011 (0.0006 … 0.002)"
    deep = "at 2× the depth about 0.0009 (0.0004 … 0.0016)"
    one = replace(FULL, ladder=ladder)
    assert rates_at_scale(ladder) == f"{wide}; {deep}"
    words = " ".join(text_report(one, width=110).split())
    assert words.index("use learning") < words.index(f"larger {wide}; {deep}") < words.index("model ")
    assert f"300 steps. A larger model: {wide}; {deep}." in one.to_markdown()
    assert f"A larger model {wide}; {deep}" in re.sub(r"<[^>]+>", "", one.to_html()).replace("\u00a0", " ")
    data = json.loads(one.to_json())
    jsonschema.validate(data, schema("report"))
    assert [each["times"] for each in data["ladder"]["at_scale"]["rates"]] == [2, 4, 2, 2]
    for none in (
        replace(ladder, best=BestRate(None, None, None, "none of them trains")),
        replace(ladder, at_scale=AtScale((), "not measured with sgd")),
        LADDER,
    ):
        assert rates_at_scale(none) == ""
        assert "larger" not in text_report(replace(FULL, ladder=none))
        jsonschema.validate(json.loads(replace(FULL, ladder=none).to_json()), schema("report"))


def test_no_form_names_a_rate_where_there_is_none() -> None:
    none = replace(FULL, ladder=replace(LADDER, best=BestRate(None, None, None, "none of them trains")))
    for one in (none, EMPTY):
        assert rate_to_use(one.ladder) == ""  # type: ignore[arg-type]
        assert "learning rate 0" not in text_report(one) + one.to_markdown()


def test_the_terminal_says_where_nothing_helps_or_nothing_was_tried() -> None:
    assert "no remedy that was tried rescues this run" in text_report(LOST)
    assert "nothing to rescue" in text_report(NONE)
    assert "interrupted after 0 of 3 rates" in " ".join(text_report(EMPTY).split())


def test_a_rate_that_was_tried_is_a_number_to_copy() -> None:
    one = Attempt(("much-lower-rate",), rung(1e-3, "trains", 3.0), "well", 1.0)
    assert "lr = lr / 10 (tried at 0.001). Costs" in way_out(one)
    assert "tried at" not in way_out(RESCUE.attempts[0])
    assert ladder_words(LadderForecast(LADDER.rungs[1:2], 1e-3, "not needed", 0)).startswith(
        "1 learning rate tested, "
    )


def test_the_page_leads_with_the_way_out_and_escapes_names() -> None:
    page = FULL.to_html()
    assert "Tested remedy" in page
    assert "What to do" not in page
    assert "<i>maps</i>" not in page
    assert "<b>so</b>" not in page
    assert page.count('class="outcome good"') >= 3
    assert len(re.findall(r"<section id=\"(?:ladder|remedies)\"", page)) == 2


def test_without_a_rescue_the_page_says_what_the_finding_does() -> None:
    page = LOST.to_html()
    assert "What to do" in page
    assert "no tested remedy rescues the run" in page


def test_a_page_without_trials_has_no_such_sections() -> None:
    page = report().to_html()
    assert 'id="remedies"' not in page
    assert 'id="ladder"' not in page


def test_the_lengths_of_the_trials_stand_beside_their_losses() -> None:
    def about(*steps: int) -> str:
        rungs = [rung(lr, "trains", 3.0) for lr in (1e-4, 1e-3)]
        ended = [
            replace(each, curve=tuple(replace(step, step=at) if step.step else step for step in each.curve))
            for each, at in zip(rungs, steps, strict=True)
        ]
        return ladder_charts(replace(LADDER, rungs=tuple(ended)))[0].about

    assert "Trials took 36 to 300 steps" in about(36, 300)
    assert "steps" not in about(36, 36)
