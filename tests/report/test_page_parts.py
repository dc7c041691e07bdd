"""Parts that all pages share: words that stay whole, both themes, text without trailing spaces."""

import io
import itertools
import re
from importlib.resources import files

import handmade_reports as handmade
import pytest
from rich.console import Console

from normscope.demo.page import COLOURS
from normscope.report import print_report
from normscope.report.page import command, environment, style_sheet, themed, whole
from normscope.report.words import criterion_in_words

BASE = style_sheet("base.css")
LIGHT, DARK = BASE.split("@media (prefers-color-scheme: dark)")


def variables(sheet: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): ?(#[0-9a-f]{3,8})", sheet))


def test_numbers_and_options_stay_in_one_piece() -> None:
    words = "trains at up to 9.7e-3), not at −0.3 or <3e-2> of well-known --lr"
    assert re.findall(r'<span class="w">(.*?)</span>', whole(words)) == [
        "9.7e-3),",
        "−0.3",
        "&lt;3e-2&gt;",
        "--lr",
    ]
    assert re.sub("<[^>]*>", "", whole(words)) == words.replace("<", "&lt;").replace(">", "&gt;")


def test_a_command_breaks_at_its_spaces_only() -> None:
    made = command("normscope map --early-stop\n--store 'a <b>'")
    assert re.findall(r'<span class="w">(.*?)</span>', made) == [
        *("normscope", "map", "--early-stop", "--store", "&#39;a", "&lt;b&gt;&#39;")
    ]
    assert made.count("\n") == 1
    assert command("nn:decoder,depth=2") == '<span class="w">nn:decoder,<wbr>depth=2</span>'


@pytest.mark.parametrize("room", ["report", "claims", "demo", "maps"])
def test_every_page_has_the_same_head(room: str) -> None:
    """A page extends base.html and repeats nothing of it."""
    templates = files(f"normscope.{room}").joinpath("templates")
    pages = [each for each in templates.iterdir() if each.name.endswith(".html") and each.name != "base.html"]
    assert pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text.startswith('{% extends "base.html" %}')
        assert not re.findall("<(?:!doctype|html|head|meta|title|style|body)[ >]", text)


def test_the_criterion_in_a_sentence() -> None:
    assert criterion_in_words("Trains", 3.17157) == (
        "“Trains” means that the mean loss of the last 20 steps is at least 0.1 nats "
        "below the unigram entropy of 3.172 nats."
    )
    assert criterion_in_words("Trained", None).endswith("below the unigram entropy.")


def test_templates_escape_and_miss_nothing() -> None:
    made = environment("normscope.report").from_string("{{ name }} {{ name | whole }} {{ name | command }}")
    assert "<i>" not in made.render(name="<i>--a")
    with pytest.raises(Exception, match="name"):
        made.render()


def test_every_colour_has_a_dark_one() -> None:
    assert variables(LIGHT).keys() == variables(DARK).keys()


def test_literal_colours_become_those_of_the_theme() -> None:
    svg = '<path style="fill: #1d2127; stroke: #ffffff"/><text>#1d2127 fill: of #abcdef</text>'
    assert themed(svg, {"#1d2127": "ink"}) == svg.replace("fill: #1d2127", "fill: var(--ink)")


@pytest.mark.parametrize("width", [60, 110])
def test_a_report_in_a_pipe_has_no_trailing_spaces(width: int) -> None:
    pipe = io.StringIO()
    print_report(handmade.report(), Console(file=pipe, width=width))
    lines = pipe.getvalue().splitlines()
    assert len(lines) > 5
    assert [line for line in lines if line != line.rstrip()] == []


LMS = (
    (0.31399022, 0.63951294, 0.04649755),
    (0.15537241, 0.75789446, 0.08670142),
    (0.01775239, 0.10944209, 0.87256922),
)
BLIND = {
    "no red": ((0, 1.05118294, -0.05116099), (0, 1, 0), (0, 0, 1)),
    "no green": ((1, 0, 0), (0.9513092, 0, 0.04866992), (0, 0, 1)),
}
"""Viénot, Brettel and Mollon 1999: what remains of (L, M, S)."""


def seen(colour: str, lacks: str) -> list[float]:
    """A colour in the two or three responses that are left, as the cube root of each."""
    digits = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in digits]
    cones = [sum(a * b for a, b in zip(row, linear, strict=True)) for row in LMS]
    if lacks in BLIND:
        cones = [sum(a * b for a, b in zip(row, cones, strict=True)) for row in BLIND[lacks]]
    return [max(0.0, cone) ** (1 / 3) for cone in cones]


@pytest.mark.parametrize("sheet", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("lacks", ["nothing", *BLIND])
def test_the_demos_lines_can_be_distinguished(sheet: str, lacks: str) -> None:
    colours = [variables(sheet)[css.split("-")[1]] for css in COLOURS]
    for one, other in itertools.combinations(colours, 2):
        apart = sum((a - b) ** 2 for a, b in zip(seen(one, lacks), seen(other, lacks), strict=True)) ** 0.5
        assert apart > 0.09, (one, other)
