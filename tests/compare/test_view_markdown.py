"""The Markdown: short, true, and names stay text."""

import html
import re

import handmade
import pytest
from markdown_it import MarkdownIt

from normscope.compare.markdown import render_markdown
from normscope.compare.types import Diff


@pytest.fixture(params=handmade.ALL)
def diff(request: pytest.FixtureRequest) -> Diff:
    return handmade.ALL[request.param]()


def shown(markdown: str) -> str:
    return MarkdownIt("gfm-like", {"linkify": False}).render(markdown)


def test_it_is_short_and_says_the_command(diff: Diff) -> None:
    lines = render_markdown(diff, "normscope diff a b").splitlines()
    assert len(lines) <= 60
    assert lines[0].startswith("### normscope diff: ")
    assert lines[-3:] == ["```console", "$ normscope diff a b", "```"]
    assert "console" not in render_markdown(diff)


def test_many_differences_of_all_parts_stay_short() -> None:
    base = handmade.everything()
    many = tuple(each for each in base.differences for _ in range(30))
    lines = render_markdown(
        Diff(base.a, base.b, base.rows, base.parts, many), "normscope diff a b"
    ).splitlines()
    assert len(lines) <= 60
    assert (
        sum(int(n) for line in lines for n in re.findall(r"^- \*\*\w+\*\*: (\d+) more$", line))
        == len(many) - 28
    )


def test_names_stay_text() -> None:
    page = shown(render_markdown(handmade.hostile(), "normscope diff a b"))
    assert "<script" not in page
    assert not re.search(r"(?<!\w)@here", html.unescape(re.sub("<code>.*?</code>", "", page)))
    assert page.count("<table>") == 1
    assert page.count("<tr>") == 6


def test_the_first_parting_is_the_first_item() -> None:
    lines = [line for line in render_markdown(handmade.everything()).splitlines() if line.startswith("- **")]
    assert lines[0].startswith(
        "- **function** `rotary-layout` (confirmed) at attention of block 0 (transformer.h.0.attn in A, "
    )
    assert lines[0].endswith("A `halves`, B `interleaved`.")
    assert "- **structure** `norm-eps` at blocks 0–11: A `1e-05`, B `1e-06`." in lines
