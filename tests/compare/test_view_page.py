"""The page: self-contained, escaped, complete, with aligned rows, and the same every time."""

import re
from collections import Counter
from dataclasses import replace

import handmade
import pytest

from html_page import LOADING, Page
from normscope.compare.page import MOST_POINTS, condensed, render_html, walk_chart
from normscope.compare.towers import Towers
from normscope.compare.types import Diff, Part
from normscope.compare.walked import walk_of
from normscope.compare.words import clean, headline

COMMAND = "normscope diff a.py:f b.py:g"


@pytest.fixture(params=handmade.ALL, scope="module")
def diff(request: pytest.FixtureRequest) -> Diff:
    return handmade.ALL[request.param]()


@pytest.fixture(scope="module")
def html(diff: Diff) -> str:
    return render_html(diff, COMMAND)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_it_loads_and_runs_nothing(page: Page, html: str) -> None:
    for tag, attributes in page.tags:
        assert tag not in {"script", "link", "iframe", "object", "embed", "base", "form", "image", "use"}
        assert not [name for name in attributes if name.startswith("on")]
        for name in LOADING & attributes.keys():
            assert attributes[name].startswith("#"), (tag, name)
        assert "url(" not in attributes.get("style", "")
    assert "@import" not in html
    assert "url(" not in html
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "script" not in policy


def test_names_are_unique_and_links_lead_somewhere(page: Page) -> None:
    ids = Counter(attributes["id"] for _, attributes in page.tags if "id" in attributes)
    assert max(ids.values(), default=1) == 1
    assert {a["href"].removeprefix("#") for tag, a in page.tags if tag == "a"} <= set(ids)


def test_the_verdict_every_difference_and_every_gap_are_there(diff: Diff, page: Page) -> None:
    shown = clean(diff)
    assert headline(shown) in page.plain
    for each in shown.differences:
        assert " ".join(each.message.split()) in page.plain
        assert all(" ".join(words.split()) in page.plain for words in each.evidence)
    for part in shown.parts:
        assert all(" ".join(why.split()) in page.plain for why in part.why)
    assert COMMAND in page.plain


def test_every_row_is_drawn_once_or_in_a_fold(diff: Diff) -> None:
    towers = Towers(diff)
    for stack, tower in zip(diff.rows.parts, towers.stacks, strict=True):
        assert sum(line.count for line in tower.lines[1:-1]) == len(stack.parts)
    for each in diff.differences:
        assert towers.id_of(each).startswith("row-")


def test_both_sides_of_a_row_are_equally_high(diff: Diff) -> None:
    for tower in Towers(diff).stacks:
        for line in tower.lines:
            heights = [re.search(r'height="([\d.]+)"', str(side)) for side in (line.a, line.b)]
            assert len({found[1] for found in heights if found}) == 1


def test_the_same_comparison_gives_the_same_page(diff: Diff, html: str) -> None:
    assert render_html(diff, COMMAND) == html


def test_pictures_have_names_for_screen_readers(page: Page) -> None:
    pictures = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert all(each["role"] == "img" and each["aria-label"] for each in pictures)


def test_rows_open_by_keyboard_and_say_where_they_part(page: Page, diff: Diff) -> None:
    """A `summary` takes the focus and opens by Enter, without a script."""
    tags = [tag for tag, _ in page.tags]
    assert (
        tags.count("summary") == tags.count("details") >= sum(len(each.lines) for each in Towers(diff).stacks)
    )
    if diff.of(Part.FUNCTION):
        assert page.plain.count("they part here") == 1


def test_insertions_are_gaps() -> None:
    page = Page(render_html(handmade.inserted()))
    labels = [attributes.get("aria-label", "") for _, attributes in page.tags]
    assert labels.count("A: nothing here") == 2
    assert labels.count("B: nothing here") == 1
    assert sum("a branch is missing" in label for label in labels) == 1
    lines = Towers(handmade.inserted()).stacks[0].lines
    assert [line.short for line in lines[1:-1]] == [
        "5 | 6",
        "4 | 5",
        "3 | –",
        "2 | 4",
        "– | 3",
        "– | 2",
        "1",
        "0",
    ]
    assert [line.lacks for line in lines[1:-1]] == ["", "", "B", "", "A", "A", "", ""]


def test_rows_that_are_alike_are_folded_and_the_odd_one_is_not() -> None:
    lines = Towers(handmade.deep()).stacks[0].lines[1:-1]
    assert [(line.short, line.count) for line in lines] == [("58–95", 38), ("57", 1), ("0–56", 57)]
    assert [line.is_apart for line in lines] == [True, True, False]
    assert [line.is_first for line in lines] == [False, True, False]
    assert len(render_html(handmade.deep())) < 100_000
    lines = Towers(handmade.one()).stacks[0].lines[1:-1]
    assert [(line.short, line.is_first) for line in lines] == [("1–3", False), ("0", True)]


def test_differences_of_the_embedding_stand_at_the_input() -> None:
    a, b = handmade.stack(2), handmade.stack(2)
    b = replace(b, facts=b.facts | {"embedding_dropout": 0.1, "final_norm_eps": 1e-6})
    a = replace(a, facts=a.facts | {"embedding_dropout": 0.0})
    rows = handmade.aligned(handmade.model(a), handmade.model(b))
    found = tuple(
        handmade.difference(Part.STRUCTURE, name, ["h"], *values)
        for name, *values in (("final-norm-eps", 1e-5, 1e-6), ("embedding-dropout", 0.0, 0.1))
    )
    lines = Towers(replace(handmade.not_all(), rows=rows, differences=found)).stacks[0].lines
    assert [lines[0].names, lines[-1].names] == [["final-norm-eps"], ["embedding-dropout"]]
    assert [[each.changed for each in line.facts] for line in (lines[0], lines[-1])] == [
        [(("final-norm-eps", "1e-05", "1e-06"),)],
        [(("embedding-dropout", "0", "0.1"),)],
    ]
    assert [str(line.a).count("changed") for line in (lines[0], lines[-1])] == [1, 1]


def test_a_row_tells_the_facts_that_differ() -> None:
    line = next(line for line in Towers(handmade.deep()).stacks[0].lines if line.short == "57")
    assert [each.title for each in line.facts] == ["attention", "feed-forward"]
    assert line.facts[0].changed == (("placement", "pre", "post"),)
    assert "norm-eps 1e-05" in line.facts[0].same


def test_sizes_are_compared_with_the_tolerance() -> None:
    lines = Towers(handmade.everything()).stacks[0].lines[1:-1]
    assert lines[-1].is_apart  # its second branch parts
    alike = Towers(handmade.same()).stacks[0].lines[1:-1]
    assert not any(line.is_apart for line in alike)
    assert alike[0].size == "8×10⁻¹³"


def test_a_size_that_is_not_a_number_is_apart() -> None:
    base = handmade.deep()
    steps = handmade.walk(base.rows, lambda k: float("nan") if k == 3 else 1e-14)
    parts = handmade.said(base.parts, Part.FUNCTION, "x", tolerance=1e-10, walk=steps)
    lines = Towers(replace(base, parts=parts)).stacks[0].lines[1:-1]
    assert [line.short for line in lines if line.is_apart] == ["1"]
    assert "NaN" in render_html(replace(base, parts=parts))


def test_the_walk_is_a_plot_with_the_first_parting() -> None:
    chart = walk_chart(handmade.two_stacks())
    assert chart is not None
    assert chart.about.endswith("The dot marks the first that parts: sum of decoder.block.0.cross.")
    assert "tolerance" in str(chart.drawing)
    assert walk_chart(handmade.inserted()) is None
    same = walk_chart(handmade.same())
    assert same is not None
    assert "first" not in same.about


def test_a_long_walk_is_condensed_without_losing_its_peak() -> None:
    base = handmade.deep()
    steps = [
        {"a": "x", "b": "x", "name": str(k), "relative": 5.0 if k == 7777 else 1e-14} for k in range(9000)
    ]
    parts = handmade.said(base.parts, Part.FUNCTION, "x", tolerance=1e-10, walk=steps)
    chart = walk_chart(replace(base, parts=parts))
    assert chart is not None
    assert chart.about.endswith("the first that parts: 7777 of x.")
    assert max(len(path) for path in re.findall(r' d="([^"]*)"', str(chart.drawing))) < 30 * MOST_POINTS


def test_a_stretch_shows_its_largest_value_and_nan_before_all() -> None:
    nan = float("nan")
    xs, ys = condensed([1.0, 3.0, 2.0, nan, 9.0, 1.0, None, None, None, None, 4.0], 3)
    assert xs == [1.0, 4.0, 7.0, 10.0]
    assert str(ys) == "[3.0, nan, None, 4.0]"


def test_figures_of_another_kind_draw_nothing() -> None:
    parts = handmade.said(handmade.compared(), Part.FUNCTION, "x", walk=[{"a": None}], tolerance="small")
    assert walk_chart(replace(handmade.same(), parts=parts)) is None
    assert [step.relative for step in walk_of(replace(handmade.same(), parts=parts))] == [None]


def test_weights_are_listed() -> None:
    page = Page(
        render_html(replace(handmade.same(), weights=handmade.same().weights | {"only_b": ["lm_head.bias"]}))
    )
    assert "model.layers.3.self_attn.v_proj.weight" in page.plain
    assert "rows 64–95, transposed" in page.plain
    assert "1 only in B: lm_head.bias" in page.plain
