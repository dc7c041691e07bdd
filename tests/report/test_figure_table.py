"""Tables in any width: no figure is cut, shortened or broken over two lines."""

import io

import pytest
from handmade_reports import report
from rich.console import Console
from rich.text import Text

from normscope.cli.output import spell_out
from normscope.report import terminal
from normscope.report.console import as_text, show
from normscope.report.figure_table import FigureTable

HEAD = ("rate", "outcome", "σ_max", "diversity")
ROWS = [
    ("0.00548", "trains largest that trains", "123.4567", "2.61e-05"),
    ("1e-3", "collapses", "–", "7.45e-12"),
    ("⋮ 84 more", "⋮", "⋮", "⋮"),
]


def table(**options: object) -> FigureTable:
    made = FigureTable(*HEAD, figures=HEAD[2:], **options)
    for row in ROWS:
        made.add_row(Text(row[0]), *row[1:])
    return made


def shown(width: int, **options: object) -> str:
    return as_text(lambda width: [table(**options)], width)


@pytest.mark.parametrize("box", [None, FigureTable("a").box])
@pytest.mark.parametrize("width", range(20, 80, 3))
def test_each_figure_stands_whole_on_one_line(width: int, box: object) -> None:
    text = shown(width, box=box)
    words = text.split()
    for _, _, *figures in ROWS[:2]:
        assert all(figure in words for figure in figures)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_the_columns_stay_where_they_fit() -> None:
    lines = shown(61).splitlines()
    assert lines[0].split() == list(HEAD)
    assert lines[2].split() == [*ROWS[0][0].split(), *ROWS[0][1].split(), *ROWS[0][2:]]
    assert len({len(lines[0]), len(lines[2]), len(lines[3])}) == 1  # flush right


def test_a_list_names_each_figure_and_leaves_out_empty_cells() -> None:
    assert shown(30).splitlines() == [
        "rate",
        "0.00548",
        "  outcome trains largest that",
        "  trains",
        "  σ_max 123.4567",
        "  diversity 2.61e-05",
        "1e-3",
        "  outcome collapses · σ_max –",
        "  diversity 7.45e-12",
        "⋮ 84 more",
    ]


def test_words_may_wrap_beside_figures() -> None:
    lines = shown(52, wraps=(1,)).splitlines()
    assert lines[0].split() == list(HEAD)
    assert "largest that trains" not in "\n".join(lines)
    assert "123.4567" in lines[2]


class Ascii(io.TextIOWrapper):
    """An output of a terminal without UTF-8, as `spell_out` leaves it."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii", errors="normscope")


def test_spelled_characters_do_not_shift_the_columns() -> None:
    spell_out()
    stream = Ascii()
    lines = as_text(lambda width: [table()], 70, stream).splitlines()
    assert "sigma_max" in lines[0]
    assert len({len(lines[0]), len(lines[2]), len(lines[3])}) == 1
    Console(file=stream, width=30, highlight=False).print(table())
    stream.flush()
    printed = stream.buffer.getvalue().decode("ascii")
    assert "sigma_max 123.4567" in printed
    assert "..." not in printed


@pytest.mark.parametrize("width", [40, 60, 72])
def test_a_spelled_report_keeps_within_the_width(width: int) -> None:
    spell_out()
    stream = Ascii()
    show(
        lambda columns: terminal._parts(report(12), columns),
        Console(file=stream, width=width, highlight=False),
    )
    stream.flush()
    lines = stream.buffer.getvalue().decode("ascii").splitlines()
    assert any("->" in line for line in lines)
    assert max(map(len, lines)) <= width
