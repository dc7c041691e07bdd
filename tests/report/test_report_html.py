"""The page: self-contained, escaped, complete, small, honest about gaps, and the same every time."""

import base64
import hashlib
import itertools
import math
import re
from collections import Counter
from dataclasses import replace
from importlib.resources import files
from typing import Any

import handmade_reports as handmade
import pytest
import synthetic_reports as synthetic
from hypothesis import given
from hypothesis import strategies as st

from html_page import LOADING, Page
from normscope.anatomy import Anatomy, Site
from normscope.probes import Measurement, Measurements, not_measured
from normscope.report import Report
from normscope.report.figures import charts, scales
from normscope.report.figures.branches import norm_slots
from normscope.report.figures.deciding import deciding
from normscope.report.figures.fold import fold_layout, folds_of
from normscope.report.figures.layout import lay_out
from normscope.report.figures.ledger import Ledger
from normscope.report.figures.rail import place_findings
from normscope.report.figures.tower import draw_towers
from normscope.report.figures.tracks import draw_tracks
from normscope.report.figures.trial import forecast_charts
from normscope.report.html import describe_stack, lead_sentence, render_html, sentence
from normscope.report.tables import cell, number_sheets, spread
from normscope.rules import Finding, Severity


def views(html: str) -> tuple[str, str]:
    """The folded view of the stack, and the one with every block."""
    stack = html[html.index('<section id="tower">') : html.index('<details class="how-to"')]
    folded, every = stack.split('<details class="every">')
    return folded, every


@pytest.fixture(params=synthetic.ALL, scope="module")
def report(request: pytest.FixtureRequest) -> Any:
    return synthetic.ALL[request.param]()


@pytest.fixture(scope="module")
def html(report: Any) -> str:
    return render_html(report)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_it_loads_nothing(page: Page, html: str) -> None:
    for tag, attributes in page.tags:
        assert tag not in {
            "link",
            "iframe",
            "object",
            "embed",
            "base",
            "form",
            "image",
            "use",
            "audio",
            "video",
        }
        for name in LOADING & attributes.keys():
            assert attributes[name].startswith("#"), (tag, name)
        assert "url(" not in attributes.get("style", "")
    assert "@import" not in page.text["style"]
    assert "url(" not in page.text["style"]
    assert "default-src 'none'" in html


def test_only_its_own_script_may_run(page: Page, html: str) -> None:
    own = files("normscope.report").joinpath("templates", "page.js").read_text(encoding="utf-8")
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert page.text["script"] == own
    digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_every_block_appears_once_in_the_tower(report: Any, page: Page) -> None:
    rows = Counter(a["data-r"] for a in page.with_class("row"))
    for i, stack in enumerate(report.anatomy.stacks):
        for k, block in enumerate(stack.blocks):
            assert rows[f"{i}:{k}"] == 1
            assert f"{stack.name} · block {k} · {block.site}" in page.text["title"]


def test_every_finding_is_there_and_linked(report: Any, page: Page) -> None:
    ids = {a["id"] for _, a in page.tags if "id" in a}
    links = {a["href"].removeprefix("#") for tag, a in page.tags if tag == "a"}
    assert links <= ids
    assert len(page.with_class("card")) == len(report.findings)
    for finding in report.findings:
        for words in (
            finding.message,
            finding.code,
            finding.name,
            finding.threshold,
            finding.source,
            finding.remedy,
        ):
            assert words in page.all_text()
        for row in finding.evidence:
            assert row.quantity in page.all_text()


def test_what_a_reader_needs_to_run_it_again(report: Any, page: Page) -> None:
    text = page.all_text()
    for words in (report.model, report.input, str(report.seed), report.device, *report.versions.values()):
        assert words in text
    for words in (*report.anatomy.unread, *report.notes, *report.cost):
        assert words in text
    assert report.verdict.capitalize() in page.text["h1"]
    assert lead_sentence(report) in text


def test_every_site_and_quantity_is_in_a_table(report: Any, page: Page) -> None:
    text = page.all_text()
    for row in report.measurements:
        assert row.site in text
        assert row.quantity.partition("/")[2] in text


def test_same_report_same_page(report: Any, html: str) -> None:
    assert render_html(report) == html


@pytest.mark.parametrize("depth", [96, 200])
def test_a_deep_page_stays_under_a_megabyte(depth: int) -> None:
    html = render_html(synthetic.deep(depth))
    assert len(html.encode()) < 1_000_000
    assert f"block {depth - 1}" in html


def test_hostile_names_stay_text() -> None:
    html = render_html(synthetic.hostile())
    page = Page(html)
    assert "<script>alert" not in html
    assert "<img" not in html
    tame = {tag for tag, _ in Page(render_html(synthetic.post_ln())).tags}
    assert {tag for tag, _ in page.tags} <= tame
    assert html.count("</style>") == 1
    for where in ("title", "h3", "text", "th", "dd", "p", "td", "li", "b", "text"):
        assert "<script>alert(1)" in page.text[where], where
    assert any("onerror" in a.get("aria-label", "") for tag, a in page.tags if tag == "svg")


def test_lone_surrogates_do_not_break_the_file() -> None:
    anatomy = Anatomy((synthetic.stack("bad \ud800", 1, "pre"),))
    render_html(synthetic.report(anatomy, synthetic.measure(anatomy))).encode("utf-8")


def test_gaps_are_gaps_and_said() -> None:
    report = synthetic.broken()
    page = Page(render_html(report))
    assert "The loss is not finite." in page.text["li"]
    assert "3 not finite" in page.text["span"]
    assert page.with_class("stream-gap")
    assert not page.with_class("stream")
    assert page.with_class("bad")
    layout = lay_out(report.anatomy)
    rms = next(t for t in draw_tracks(layout, Ledger(report.measurements), 80) if t.title == "Stream RMS")
    lowest = min(
        float(y) for path in re.findall(r' d="([^"]*)"', rms.picture) for y in re.findall(r" ([\d.]+)", path)
    )
    assert lowest >= layout.stacks[0].blocks[4].top  # NaN from block 5 on: no line goes there


def test_a_line_does_not_bridge_a_gap() -> None:
    anatomy = Anatomy((synthetic.stack("decoder", 5, "pre"),))
    rows = [
        Measurement("stream/rms", b.site, math.nan if i == 2 else 1.0) for i, b in enumerate(anatomy.blocks)
    ]
    (track,) = draw_tracks(lay_out(anatomy), Ledger(rows), 80)
    assert track.picture.count("<path") == 2
    assert track.said == "1 not finite"
    (whole,) = draw_tracks(lay_out(anatomy), Ledger(rows[:2] + rows[3:]), 80)
    assert whole.picture.count("<path") == 1


@pytest.mark.parametrize(
    ("placement", "entry", "output", "stream"),
    [("pre", 1, 0, 0), ("post", 0, 0, 1), ("res-post", 0, 1, 0), ("peri", 1, 1, 0), ("none", 0, 0, 0)],
)
def test_norms_stand_in_their_places(placement: str, entry: int, output: int, stream: int) -> None:
    stack = synthetic.stack("decoder", 3, placement, final=False)
    for branch in (b for block in stack.blocks for b in block.branches):
        slots = norm_slots(branch)
        assert [len(slots[s]) for s in ("entry", "output", "stream")] == [entry, output, stream]
    tower, _ = draw_towers(lay_out(Anatomy((stack,))), Ledger(()), {})
    lying = [r for r in _norm_bars(tower) if float(r["width"]) > float(r["height"])]
    assert len(_norm_bars(tower)) == 6 * (entry + output + stream)
    assert len(lying) == 6 * stream


@pytest.mark.parametrize(
    ("placement", "places"),
    [("pre", ["entry"]), ("post", ["stream"]), ("res-post", ["output"]), ("peri", ["entry", "output"])],
)
def test_norms_behind_views_stand_where_the_placement_says(placement: str, places: list[str]) -> None:
    branch = synthetic.branch("h.0", "attention", placement)
    view = Site("h.0", 0, "aten.view.default", 0)
    norms = tuple(replace(norm, input=view, output=view) for norm in branch.norms)
    slots = norm_slots(replace(branch, norms=norms))
    assert [slot for slot, held in slots.items() if held] == places


def test_a_norm_is_bluer_the_more_it_erases() -> None:
    anatomy = Anatomy((synthetic.stack("decoder", 1, "pre", final=False),))
    first, second = (b.norms[0].path for b in anatomy.branches)
    rows = [Measurement("gradient/erased", first, 0.97), Measurement("gradient/erased", second, 0.01)]
    tower, _ = draw_towers(lay_out(anatomy), Ledger(rows), {})
    assert Counter(bar["class"] for bar in _norm_bars(tower)) == {"norm g1": 1, "norm g4": 1}


@pytest.mark.parametrize("up", [2, 9])
def test_cross_attention_is_wired_to_the_encoder(up: int) -> None:
    (folded, every), taps = views(render_html(synthetic.encoder_decoder(up, 6))), []
    for view, number in ((folded, 1), (every, 6)):
        wires = [Page(tag).tags[0][1] for tag in re.findall('<line[^>]*class="cross-wire"/>', view)]
        (rail,) = (w for w in wires if w["x1"] == w["x2"])
        taps = [w for w in wires if w["y1"] == w["y2"]]
        assert len(taps) == 1 + number  # the encoder's output, and each block of the decoder that is drawn
        assert_taps_meet(rail, taps)


def assert_taps_meet(rail: dict[str, str], taps: list[dict[str, str]]) -> None:
    for tap in taps:
        assert rail["x1"] in (tap["x1"], tap["x2"])
        assert float(rail["y1"]) <= float(tap["y1"]) <= float(rail["y2"])


def test_findings_stand_beside_their_blocks() -> None:
    report = synthetic.deep()
    layout = fold_layout(report.anatomy)
    spots = place_findings(report.findings, layout)
    assert [spot.number for spot in spots] == [1, 2]
    assert spots[0].finding.severity == "warning"
    assert spots[0].bottom == layout.stacks[0].blocks[0].bottom
    assert spots[0].top == layout.stacks[0].blocks[29].top
    html = render_html(report)
    leads = [int(px) for px in re.findall(r"--lead: (\d+)px", html)]
    assert leads[0] == round(spots[1].top)  # block 48 stands above blocks 0–29
    assert sum(leads) > 0.4 * layout.height


def test_a_card_names_its_blocks_by_runs() -> None:
    anatomy = Anatomy((synthetic.stack("s", 6, "pre"),))
    finding = Finding("NS1", "x", Severity.NOTE, ("h.0", "h.1", "h.4"), "Said.")
    html = render_html(synthetic.report(anatomy, [], findings=[finding]))
    assert "blocks 0–1, 4" in html


def test_a_flushed_share_is_in_percent() -> None:
    row = Measurement("precision/float16-flushed", "", 0.25)
    ((_, _, (line,)),) = number_sheets(Anatomy(()), [row])
    assert line == ("gradients that float16 flushes to zero", "25 %", "")


def test_the_logarithm_of_an_exact_zero_is_shown_as_that_zero() -> None:
    stack = synthetic.stack("decoder", 2, "pre")
    rows = [
        Measurement("jacobian/log-lower-bound", "decoder", value, "log10")
        for value in (-math.inf, -2.0, math.nan)
    ]
    ((_, _, lines),) = number_sheets(Anatomy((stack,)), rows)
    name = "lower bound on σ_min from its blocks"
    assert lines == [(name, "0", ""), (f"log₁₀ of the {name}", "−2", ""), (f"log₁₀ of the {name}", "NaN", "")]
    assert [cell(row).css for row in rows] == ["", "", "bad"]
    assert cell(replace(rows[0], unit="1")).css == "bad"


def test_up_to_four_values_are_all_shown() -> None:
    assert spread((1.0, 2.0, 3.0, 4.0)) == "1, 2, 3, 4"
    assert spread((1.0, 2.0, 3.0, 4.0, math.inf)) == "5 values, 1 … 4, 1 not finite"


def test_lead_sentence_is_the_worst_findings() -> None:
    assert lead_sentence(synthetic.post_ln()).startswith("After 20 Adam steps")
    assert lead_sentence(synthetic.gpt2()) == synthetic.gpt2().forecast.reason
    assert lead_sentence(synthetic.one_block()) == "The measurements show nothing above a note."


def test_an_interrupted_check_says_so_and_wears_no_tick() -> None:
    healthy = synthetic.report(Anatomy(()), [])
    cut = synthetic.report(Anatomy(()), [], verdict="interrupted")
    page = Page(render_html(cut))
    assert page.text["h1"].strip() == "Interrupted"
    assert "interrupted" in lead_sentence(cut)
    untried = synthetic.report(Anatomy(()), [], verdict="no trial")
    assert Page(render_html(untried)).text["h1"].strip() == "No trial"
    assert lead_sentence(untried).startswith("No training step was tried: no trial was asked for.")
    reports = (cut, untried, healthy)
    signs = {re.findall(r'<svg class="sign".*?</svg>', render_html(r), re.DOTALL)[0] for r in reports}
    assert len(signs) == 3


def test_sentences_keep_paths_and_symbols() -> None:
    assert sentence("adam at 0.001: tokens collapse") == "Adam at 0.001: tokens collapse."
    assert sentence("adamw at 0.001: tokens collapse") == "AdamW at 0.001: tokens collapse."
    assert sentence("sgd, at 1: it diverges") == "SGD, at 1: it diverges."
    assert sentence("h.5.attn is dead.") == "h.5.attn is dead."
    assert sentence("ε is small.") == "ε is small."


def test_the_tower_shows_the_gradient_after_the_trial() -> None:
    report = synthetic.post_ln()
    for view in views(render_html(report)):
        strips = re.findall('class="(after g.)"', view)
        assert_strips(strips)
    page = Page(render_html(report))
    assert "step 20" in page.text["text"]
    assert not Page(render_html(synthetic.one_block())).with_class("after")


def assert_strips(strips: list[str]) -> None:
    assert len(strips) == 12
    assert strips[-1] == "after g4"  # the last block is what the others are measured against
    assert strips[0] in ("after g0", "after g1")


def test_a_stack_in_one_line() -> None:
    assert describe_stack(synthetic.gpt2().anatomy.stacks[0]) == (
        "12 blocks of attention and feed-forward, norm placement pre (layernorm), with a final norm"
    )
    assert describe_stack(handmade.stack(4, "post", final=False, scheme="deepnorm")) == (
        "4 blocks of attention and feed-forward, deepnorm (post, layernorm), without a final norm"
    )


@given(st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=20), st.booleans())
def test_an_axis_holds_its_figures_in_order(values: list[float], log: bool) -> None:
    scale = scales.fit(values, 10.0, 90.0, log=log)
    pixels = [scale(v) for v in sorted(values)]
    assert pixels == sorted(pixels)
    assert scale.low <= min(values) * (1 + 1e-9)
    assert scale.high >= max(values) * (1 - 1e-9)
    ticks = scale.ticks(4)
    assert 2 <= len(ticks) <= 12
    assert all(9.999 <= scale(t) <= 90.001 for t in ticks)


@pytest.mark.parametrize(
    ("values", "log", "labels"),
    [
        ([1e-3, 1e-2], True, ["10⁻³", "10⁻²"]),
        ([3e-2, 0.5], True, ["0.02", "0.5"]),
        ([2e-3, 9e-3], True, ["2·10⁻³", "10⁻²"]),
        ([1e-7, 1e2], True, ["10⁻⁷", "10⁻⁴", "10⁻¹", "10²"]),
        ([0.0, 3.0], False, ["0", "1", "2", "3"]),
        ([0.0, 3e-4], False, ["0", "1·10⁻⁴", "2·10⁻⁴", "3·10⁻⁴"]),
        ([0.0, 1e-4], False, ["0", "0.25·10⁻⁴", "0.5·10⁻⁴", "0.75·10⁻⁴", "1·10⁻⁴"]),
    ],
)
def test_the_labels_of_an_axis_have_one_style(values: list[float], log: bool, labels: list[str]) -> None:
    assert [words for _, words in scales.fit(values, 10.0, 90.0, log=log).labelled(5)] == labels


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_figures_keep_six_digits(value: float) -> None:
    words = scales.figure(value, 6)
    back = words.replace("−", "-").translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")).replace("×10", "e")
    assert float(back) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(
    ("value", "reference", "css"),
    [
        *((1e-9, 1.0, "g0"), (5e-3, 1.0, "g1"), (0.5, 1.0, "g4"), (2.0, 1.0, "g4"), (5.0, 1.0, "g5")),
        *((1e9, 1.0, "g8"), (None, 1.0, "gx"), (math.nan, 1.0, "gx")),
        *((0.0, 0.0, "gx"), (0.0, 1.0, "g0"), (1.0, 0.0, "g8")),
    ],
)
def test_gradient_classes(value: float | None, reference: float, css: str) -> None:
    assert scales.gradient_class(value, reference) == css


def _norm_bars(tower: str) -> list[dict[str, str]]:
    return Page(tower).with_class("norm")


def test_names_of_lines_stand_apart_and_above_the_ticks() -> None:
    ends = {"a": 2.0, "b": 2.01, "c": 2.02, "d": 2.03}
    curves = [charts.Curve(name, "c-ink", [0.0, 1.0], [4.0, end]) for name, end in ends.items()]
    drawn = str(charts.chart(curves, label="Loss by step", x_label="step", log=False))
    heights = sorted(float(y) for y in re.findall(r'<text[^>]*y="([\d.]+)"[^>]*class="end', drawn))
    assert len(heights) == 4
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 12
    assert heights[-1] - 3.5 <= charts.HEIGHT - charts.LOWER


def test_the_page_leads_with_the_verdict_and_the_figure_that_decides() -> None:
    html = render_html(synthetic.post_ln())
    order = [
        html.index(part) for part in ("<h1>", 'class="lead"', 'class="decides"', 'id="tower"', 'id="facts"')
    ]
    assert order == sorted(order)
    assert order[-1] < html.index('id="forecast"')
    assert html.count("<b>Token diversity</b> Share of") == 1, "it is drawn once"


def decided(report: Any) -> Any:
    layout = lay_out(report.anatomy)
    ledger = Ledger(report.measurements)
    charts = forecast_charts(report.forecast, layout) if report.forecast else []
    picture, rest = deciding(report, charts, layout, ledger)
    assert picture not in rest
    assert picture is None or not picture.about.endswith("..")
    return picture and picture.title


@pytest.mark.parametrize(
    ("outcome", "title"),
    [
        *(("collapses", "Token diversity"), ("diverges", "Loss"), ("plateau", "Loss"), ("trains", "Loss")),
        *(("slow", "Loss"), ("needs-warmup", "Loss"), ("undecided", "Loss")),
    ],
)
def test_the_outcome_of_the_trial_chooses_its_figure(outcome: str, title: str) -> None:
    assert decided(with_outcome(synthetic.gpt2(), outcome)) == title


def test_without_a_failing_trial_the_worst_findings_evidence_decides() -> None:
    report = synthetic.deep()
    findings = tuple(replace(each, threshold="Under 0.1.") for each in report.findings)
    assert decided(replace(report, findings=findings)) == "gradient/stream by block"
    noted = replace(report, findings=findings[1:])  # a note decides nothing
    assert decided(noted) == "Loss"
    assert decided(replace(noted, forecast=None)) is None
    assert decided(with_outcome(report, "trains")) == "gradient/stream by block"
    assert decided(with_outcome(report, "collapses")) == "Token diversity", "a trial that fails goes first"


def with_outcome(report: Report, outcome: Any) -> Report:
    assert report.forecast is not None
    return replace(report, forecast=replace(report.forecast, outcome=outcome))


def test_identical_blocks_are_folded_with_the_worst_shown() -> None:
    report = synthetic.post_ln()
    folded, every = views(render_html(report))
    assert ">12 ×<" in folded
    assert (
        "12 identical blocks (blocks 0–11) are drawn once, with the figures of the worst, block 0" in folded
    )
    assert folded.count('class="box attn"') == 1
    assert every.count('class="box attn"') == 12
    assert folded.count('class="rung"') == 12, "the stream and the strips keep every block"
    assert every.count('class="rung"') == 0
    ends = [float(re.search(r'<svg viewBox="0 0 [\d.]+ ([\d.]+)"', view)[1]) for view in (folded, every)]
    assert ends[0] < 0.5 * ends[1]


def test_only_neighbours_that_are_identical_are_folded() -> None:
    first, odd = synthetic.stack("s", 4, "pre"), synthetic.stack("s", 6, "peri")
    mixed = Anatomy((replace(first, blocks=(*first.blocks, *odd.blocks[4:6])),))
    layout = fold_layout(mixed)
    (fold,) = folds_of(layout.stacks[0], Ledger(()), {})
    assert [place.number for place in fold.blocks] == [0, 1, 2, 3]
    assert fold.words == "4 identical blocks (blocks 0–3) are drawn once."
    assert fold_layout(Anatomy((synthetic.stack("s", 2, "pre"),))) is None
    html = render_html(synthetic.report(mixed, synthetic.measure(mixed)))
    assert views(html)[0].count('class="box attn"') == 3


@pytest.mark.parametrize(
    ("values", "flagged", "worst"),
    [
        ([1.0, 1.0, 2.0, 1.0], {}, 2),
        ([1.0, 0.1, 2.0, 1.0], {}, 1),
        ([1.0, 0.1, math.nan, 1.0], {}, 2),
        ([0.0, 0.1, 2.0, 1.0], {}, 0),
        ([1.0, 0.1, 2.0, 1.0], {"h.2": "warning"}, 2),
        ([1.0, 0.1, 2.0, 1.0], {"h.2": "warning", "h.3": "error"}, 3),
        ([1.0, 0.1, 2.0, 1.0], dict.fromkeys(("h.0", "h.1", "h.2", "h.3"), "error"), 1),
    ],
)
def test_the_worst_block(values: list[float], flagged: dict[str, str], worst: int) -> None:
    anatomy = Anatomy((synthetic.stack("s", 4, "pre"),))
    rows = [Measurement("gradient/stream", f"h.{i}", value) for i, value in enumerate(values)]
    (fold,) = folds_of(fold_layout(anatomy).stacks[0], Ledger(rows), flagged)
    assert fold.worst.number == worst
    if not flagged:
        assert "the gradient that arrives on the stream is" in fold.words


def test_the_training_loss_stands_beside_the_entropy_of_its_batches() -> None:
    layout = lay_out(synthetic.gpt2().anatomy)
    trial = synthetic.gpt2().forecast

    def loss(forecast: Any) -> Any:
        return next(each for each in forecast_charts(forecast, layout) if each.title == "Loss")

    known = loss(replace(trial, curve=tuple(replace(s, batch_entropy=2.9) for s in trial.curve)))
    assert "each training batch" in known.about
    assert "That of the whole text is 3.31." in known.about
    assert 'class="ref"' not in known.drawing
    assert "unigram  2.9" in known.drawing
    unknown = loss(trial)
    assert "of the whole text" in unknown.about
    assert "each training batch" not in unknown.about
    assert 'class="ref"' in unknown.drawing


def test_one_note_tells_all_that_the_budget_left_out() -> None:
    report = synthetic.gpt2()
    why = "--budget standard leaves it out; --budget deep has it"
    dear = [
        not_measured("jacobian/rank", "decoder", why),
        not_measured("jacobian/sigma-min", "h.3", why + "!"),
    ]
    rows = [*report.measurements, *dear, not_measured("x/y", "h.1", "no reason")]
    budget = {
        "name": "standard",
        "limit": 640,
        "forwards": 68,
        "parts": {},
        "left_out": {"density": why},
    }
    html = render_html(replace(report, measurements=Measurements(rows), budget=budget))
    gaps = re.findall("<li>(.*?)</li>", html[html.index('<ul class="gaps">') :].split("</ul>")[0], re.DOTALL)
    assert len(gaps) == 3  # of these, the smallest values that the synthetic report has not
    assert "jacobian/rank, jacobian/sigma-min" in gaps[-1]
    words = re.sub("<[^>]*>", "", html)
    assert words.count("--budget standard leaves out: density. A larger --budget measures them.") == 1
    assert words.count("leaves it out") == 0


def test_a_name_too_long_for_a_lines_end_stands_in_a_legend() -> None:
    curves = [charts.Curve(name, "c-ink", [0.0, 1.0], [4.0, 3.0]) for name in ("a", "language_model.layers")]
    assert charts.legend(curves) == (("1", "a", "c-ink"), ("2", "language_model.layers", "c-ink"))
    drawn = charts.chart(curves, label="x", x_label="step", log=False)
    assert re.findall('class="end c-ink">([^<]*)<', drawn) == ["1", "2"]
    assert charts.legend(curves[:1]) == ()


def test_marks_are_explained_where_there_are_some() -> None:
    trial = synthetic.gpt2().forecast
    layout = lay_out(synthetic.gpt2().anatomy)
    last = replace(trial.curve[-1], loss=math.nan)
    broken = replace(trial, curve=(*trial.curve[:-1], last))
    abouts = [
        next(each.about for each in forecast_charts(one, layout) if each.title == "Loss")
        for one in (trial, broken)
    ]
    assert [about.endswith("× marks a value that is not finite.") for about in abouts] == [False, True]


def test_a_loss_that_explodes_has_a_logarithmic_axis() -> None:
    trial, layout = synthetic.gpt2().forecast, lay_out(synthetic.gpt2().anatomy)
    for loss, log in ((49.0, False), (51.0, True)):
        curve = (*trial.curve[:-1], replace(trial.curve[-1], loss=loss))
        about = next(
            c.about for c in forecast_charts(replace(trial, curve=curve), layout) if c.title == "Loss"
        )
        assert about.endswith(" Log axis.") == log


def test_a_chart_without_two_points_to_join_is_not_drawn() -> None:
    trial, layout = synthetic.gpt2().forecast, lay_out(synthetic.gpt2().anatomy)
    broken = replace(trial.curve[-1], loss=math.nan, train_loss=None)
    curve = (replace(trial.curve[0], train_loss=None), broken)
    titles = [each.title for each in forecast_charts(replace(trial, curve=curve), layout)]
    assert "Loss" not in titles
    assert "Token diversity" in titles


def test_a_trial_without_gradients_has_no_chart_of_them() -> None:
    trial, layout = synthetic.gpt2().forecast, lay_out(synthetic.gpt2().anatomy)
    known = tuple(replace(step, gradients={f"h.{i}": 1.0 for i in range(12)}) for step in trial.curve[1:])
    unknown = tuple(replace(step, gradients=dict.fromkeys(step.gradients, math.nan)) for step in known)
    drawn = [forecast_charts(replace(trial, curve=curve), layout) for curve in (known, unknown)]
    assert ["Gradient by block" in [each.title for each in charts] for charts in drawn] == [True, False]


def test_zero_on_a_logarithmic_profile_is_written_and_has_no_dot() -> None:
    anatomy = Anatomy((synthetic.stack("decoder", 3, "pre"),))
    rows = [Measurement("stream/rms", b.site, float(i)) for i, b in enumerate(anatomy.blocks)]
    (track,) = draw_tracks(lay_out(anatomy), Ledger(rows), 80)
    assert track.picture.count('class="dot ') == 2
    assert track.picture.count('class="zero"') == 1


def test_no_line_crosses_the_words_not_measured() -> None:
    anatomy = Anatomy((synthetic.stack("decoder", 3, "pre"),))
    rows = [not_measured("jacobian/branch-norm", b.site, "left out") for b in anatomy.branches]
    (track,) = draw_tracks(lay_out(anatomy), Ledger(rows), 80)
    assert "not measured" in track.picture
    assert "<line" not in track.picture
    known = [Measurement("jacobian/branch-norm", b.site, 0.5) for b in anatomy.branches]
    (track,) = draw_tracks(lay_out(anatomy), Ledger(known), 80)
    assert 'class="ref"' in track.picture


def test_the_mark_of_a_block_is_invisible_until_it_is_placed(page: Page) -> None:
    assert {mark["height"] for mark in page.with_class("cursor")} <= {"0"}


def test_the_first_chart_stands_beside_the_verdict(html: str, page: Page) -> None:
    decides = 'class="decides"' in html
    assert len(page.with_class("split")) == decides
    assert re.search(r"min-width: 1000px\) \{ \.split \{ grid-template-columns", html)


def test_names_stand_in_the_order_of_their_lines() -> None:
    ends = {"top": 4.0, "middle": 3.02, "bottom": 3.0}
    curves = [
        charts.Curve(name, "c-ink", [0.0, 1.0], [5.0, ends[name]]) for name in ("bottom", "top", "middle")
    ]
    drawn = charts.chart(curves, label="x", x_label="step", log=False)
    assert re.findall('class="end c-ink">([^<]*)<', drawn) == ["top", "middle", "bottom"]


def test_the_page_has_a_dark_theme_and_cuts_no_legend(html: str) -> None:
    style = html[html.index("<style>") : html.index("</style>")]
    assert "prefers-color-scheme: dark" in style
    head = re.search(r"\n\.head \{([^}]*)\}", style)[1]
    assert "overflow: hidden" not in head
    assert "min-height" in head
