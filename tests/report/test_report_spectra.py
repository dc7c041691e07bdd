"""The charts of spectra: which there are, and that every figure of theirs is on them."""

import math
import re
from dataclasses import replace

import pytest
import synthetic_reports as synthetic

from normscope.probes import QUANTILES, Measurement
from normscope.report.figures.layout import Layout, lay_out
from normscope.report.figures.ledger import Ledger
from normscope.report.figures.spectra import spectra
from normscope.report.html import render_html

ONE = "jacobian/token-singular-values"
SPREAD = "jacobian/log-sigma"


@pytest.fixture
def layout() -> Layout:
    return lay_out(synthetic.post_ln().anatomy)


def titles(layout: Layout, *rows: Measurement) -> list[str]:
    return [picture.title for picture in spectra(Ledger(rows), layout)]


def test_without_figures_there_are_no_charts(layout: Layout) -> None:
    assert titles(layout) == []


def test_one_token_of_the_stack_and_of_its_first_middle_and_last_block(layout: Layout) -> None:
    stack = layout.stacks[0]
    sites = [stack.stack.name, *(place.block.site for place in stack.blocks)]
    rows = [Measurement(ONE, site, (3.0, 1.0, 1e-9)) for site in sites]
    (picture,) = spectra(Ledger(rows), layout)
    count = len(stack.blocks)
    for name in ("stack", "block 0", f"block {count // 2}", f"block {count - 1}"):
        assert name in picture.drawing
    assert "block 1<" not in picture.drawing


def test_quantiles_by_depth_and_of_the_stack(layout: Layout) -> None:
    stack = layout.stacks[0]
    values = tuple(-math.inf if share == 0 else share - 1 for share in QUANTILES)
    blocks = [Measurement(SPREAD, place.block.site, values, "log10") for place in stack.blocks]
    assert titles(layout, *blocks) == ["Spectrum by depth"]
    assert titles(layout, blocks[0]) == []  # one block is no profile
    whole = Measurement(SPREAD, stack.stack.name, values, "log10")
    assert titles(layout, whole) == ["Spectrum of the stack"]
    by_depth = spectra(Ledger(blocks), layout)[0].drawing
    for name in ("largest", "90%", "median", "10%"):
        assert name in by_depth


def test_the_page_says_the_budget() -> None:
    budget = {
        "name": "deep",
        "limit": 4000,
        "forwards": 12.5,
        "parts": {"branches": {"forwards": 12.5, "seconds": 1.0}},
        "left_out": {"density": "no"},
    }
    words = re.sub("</?span[^>]*>", "", render_html(replace(synthetic.post_ln(), budget=budget)))
    assert "deep: 12 of 4000 forwards (branches 12)." in words
    assert words.count("--budget deep leaves out: density.<") == 1
