"""The study of precision (`python -m benchmarks.precision`) against its page."""

from pathlib import Path

import pytest
import torch

from benchmarks import precision

PAGE = Path(__file__).parents[2] / "docs" / "kernels-precision.md"


def test_the_page_has_the_table_of_epsilon() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for line in precision.epsilon_table():
        assert "| " + " | ".join(line) + " |" in page


def test_every_table_is_on_the_page_and_every_line_as_long_as_its_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precision, "NUM_ROWS", 2)
    monkeypatch.setattr(precision, "WIDTHS", (8,))
    page = PAGE.read_text(encoding="utf-8")
    for heading, table in precision.tables().items():
        assert f"\n## {heading}\n" in page
        if not heading.startswith("Sequential"):  # these take seconds
            head, *lines = table
            assert lines
            assert all(len(line) == len(head) for line in lines)


def test_only_float32_up_to_the_output_is_as_good_as_the_dtype() -> None:
    x = precision.drawn(256, 100.0, torch.float16)
    exact = torch.nn.functional.layer_norm(x.double(), (256,), eps=1e-5)
    once, statistics = (
        float(precision.relative(norm(x, 1e-5), exact)) for norm in (precision.rounded_once, precision.island)
    )
    assert once < 3e-4
    assert statistics > 3e-3


def test_a_constant_row_in_float16_is_nan_where_epsilon_is_0() -> None:
    row = torch.ones(1, 8, dtype=torch.float16)
    assert bool(precision.in_half(row, 1e-8).isnan().all())
    assert bool((precision.in_half(row, 1e-5) == 0).all())
