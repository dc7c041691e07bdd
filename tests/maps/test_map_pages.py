"""Outputs of a map: table, picture, page, JSON, Parquet."""

import json
import math
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from small_maps import EDGE, UNIGRAM, made_up, small_grid

from normscope.cli.map_progress import Clock, duration
from normscope.maps import Counts, Record, Result
from normscope.maps.curves import MOST_VERTICES, rate_colours, thinned
from normscope.maps.draw import (
    DIVERGING,
    MOST_WIDTH,
    ON_DARK,
    ON_LIGHT,
    THEMED,
    arrangement,
    draw_map,
    key_words,
    palette,
    scale,
    style,
)
from normscope.maps.export import to_dict, to_json, write_parquet
from normscope.maps.page import Sheet, render_page, render_png
from normscope.maps.table import Panel, edge, excess, tabulate
from normscope.maps.words import short, signed, summary, terminal_table, told, width_of

GRID = small_grid(depths=[1, 2], seeds=[0, 1], warmups=[0, 5])
RECORDS = [made_up(cell) for cell in GRID.cells]
SETTINGS = {
    "model": "nn:<decoder>", "model width": 8, "optimizer": "adamw", "steps": 26, "device": "cpu",
    "data": "a text, 2 sequences of 8 tokens, 0123456789abcdef", "schedule": "constant", "clip": 1.0,
    "precision": "bfloat16", "accumulation": 2,
}  # fmt: skip


def sheet(records: list[Record] = RECORDS) -> Sheet:
    verdicts = [record.result.verdict for record in records if record.result]
    counts = Counts(
        done=len(verdicts), waiting=sum(r.state == "waiting" for r in records),
        crashed=sum(r.state == "crashed" for r in records),
        trains=verdicts.count("trains"), fails=verdicts.count("fails"),
    )  # fmt: skip
    return Sheet(records, SETTINGS, counts, {"size": 2}, "normscope map --text 'a <b>.txt'")


def test_the_table_is_the_records_by_place() -> None:
    table = tabulate(RECORDS)
    assert [(p.scheme, p.warmup) for p in table.panels] == [
        ("post", 0), ("pre", 0), ("post", 5), ("pre", 5),
    ]  # fmt: skip
    assert (table.depths, table.rates, table.seeds) == ((1, 2), (1e-3, 3e-3, 1e-2, 3e-2), (0, 1))
    for panel in table.panels:
        for row in panel.points:
            for point in row:
                found = [
                    r for r in RECORDS
                    if (r.cell.scheme, r.cell.warmup, r.cell.depth, r.cell.lr)
                    == (panel.scheme, panel.warmup, point.depth, point.lr)
                ]  # fmt: skip
                assert list(point.records) == found
                trained = [r.result.verdict == "trains" for r in found]
                assert point.verdict == ("trains" if all(trained) else "mixed" if any(trained) else "fails")


def test_the_edge_is_the_largest_rate_that_trains_with_every_seed() -> None:
    below = {3e-3: 1e-3, 1e-2: 3e-3, 3e-2: 1e-2, None: None}
    for panel in tabulate(RECORDS).panels:
        for row in panel.points:
            limit = EDGE[panel.scheme, row[0].depth]
            assert edge(row) == (limit if panel.warmup == 5 else below[limit])


def test_a_point_trains_once_all_its_seeds_do() -> None:
    for state in ("waiting", "crashed"):
        records = [made_up(c, state) if c.seed == 1 else made_up(c) for c in GRID.cells if c.scheme == "pre"]
        (panel, *_) = tabulate(records).panels
        assert [point.verdict for point in panel.points[0]] == ["mixed"] * 4
        assert edge(panel.points[0]) is None


def test_excess_is_of_the_last_twenty_losses() -> None:
    record = made_up(GRID.cells[0])
    losses = (9.0, *range(20))
    changed = Record(record.cell, "done", Result(**vars(record.result) | {"losses": losses}))
    assert excess(changed) == pytest.approx(9.5 - UNIGRAM)
    assert excess(made_up(next(c for c in GRID.cells if c.scheme == "post" and c.lr == 3e-2))) == math.inf


def test_what_is_missing_or_crashed_is_told_apart_from_what_fails() -> None:
    records = [made_up(cell) for cell in GRID.cells[4:]]
    records += [made_up(GRID.cells[0], "waiting"), made_up(GRID.cells[2], "crashed")]
    (row, *_), *_ = (panel.points for panel in tabulate(records).panels if panel.scheme == "post")
    assert [point.verdict for point in row][:2] == ["missing", "crashed"]


def test_losses_under_and_over_the_unigram_entropy_differ_for_every_eye() -> None:
    """A person without red or green cones still sees luminance, and blue against red and green."""
    colours, norm = palette(), scale(tabulate(RECORDS).points)
    assert norm(0.0) == pytest.approx(0.5)
    under, over = colours(norm(-0.3)), colours(norm(0.3))
    assert under[2] > under[0] + 0.2
    assert over[0] > over[2] + 0.2
    assert len(DIVERGING) % 2 == 1, "one colour is the middle"


def test_the_picture_has_every_cell_and_the_line_of_every_panel() -> None:
    from matplotlib import rc_context
    from matplotlib.patches import Rectangle

    table = tabulate(RECORDS)
    with rc_context(style()):
        figure = draw_map(table)
    ids = [
        patch.get_gid() for place in figure.axes for patch in place.patches if isinstance(patch, Rectangle)
    ]
    cells = [name for name in ids if name and name.startswith("cell-")]
    assert cells == [f"cell-{i}" for i in range(len(table.points))]
    for place, panel in zip(figure.axes, table.panels, strict=False):
        line = place.lines[-1]
        for y, row in enumerate(panel.points):
            largest = edge(row)
            x = -0.5 if largest is None else table.rates.index(largest) + 0.5
            assert set(line.get_xdata()[2 * y : 2 * y + 2]) == {x}
    few = sheet(RECORDS[:4])
    png = render_png(few)
    assert png.startswith(b"\x89PNG")
    assert png == render_png(few), "the same map, the same picture"


@pytest.mark.parametrize("schemes", range(1, 8))
@pytest.mark.parametrize("warmups", [(0,), (0, 200)])
def test_panels_have_places_of_their_own_and_letters_that_can_be_read(schemes: int, warmups: tuple) -> None:
    panels = [Panel(f"{i}", None, warmup, ()) for warmup in warmups for i in range(schemes)]
    rows, columns, places = arrangement(panels, width=3.3)
    assert len(set(places)) == len(panels)
    assert max(places) < rows * columns
    assert columns * 3.3 <= MOST_WIDTH
    columns_of = [place % columns for place in places]
    assert columns_of == columns_of[:schemes] * len(warmups), "a scheme is under itself"
    assert arrangement(panels, width=100.0)[1] == 1


CRASHED = [*RECORDS[:-1], made_up(GRID.cells[-1], "crashed")]


@pytest.fixture(scope="module")
def page() -> str:
    return render_page(sheet(CRASHED))


def test_the_same_map_gives_the_same_page() -> None:
    few = RECORDS[:4]
    assert render_page(sheet(few)) == render_page(sheet(few))


def test_the_page_is_one_file_that_loads_nothing_and_escapes_names(page: str) -> None:
    assert "<script" not in page
    assert "nn:&lt;decoder&gt;" in page
    assert "&lt;b&gt;its reason" in page
    assert "<b>its reason" not in page
    assert set(re.findall(r'(?:src|href)="(?!#|data:)([^"]*)"', page)) == set()
    assert "normscope map --text &#39;a &lt;b&gt;.txt&#39;" in re.sub("</?span[^>]*>", "", page)


def test_each_cell_of_the_page_tells_its_own_story(page: str) -> None:
    table = tabulate(CRASHED)
    svg = re.search(r"<svg.*?</svg>", page, flags=re.DOTALL)[0]
    tree = ET.fromstring(svg)
    titles = {
        group.get("id"): group.find("{http://www.w3.org/2000/svg}title").text
        for group in tree.iter("{http://www.w3.org/2000/svg}g")
        if (group.get("id") or "").startswith("cell-")
    }
    words = [told(panel, point) for panel in table.panels for row in panel.points for point in row]
    assert titles == {f"cell-{i}": said for i, said in enumerate(words)}


def test_a_map_without_a_result_has_a_page_too() -> None:
    page = render_page(sheet([made_up(cell, "waiting") for cell in GRID.cells[:4]]))
    assert "No cell is done yet" in page


def test_what_is_not_known_yet_is_not_said_to_fail() -> None:
    records = [made_up(c, "done" if c.scheme == "pre" else "waiting") for c in GRID.cells if not c.warmup]
    page = render_page(sheet(records))
    assert "post none" not in page
    assert "pre 2 blocks (at up to" in page
    row = re.search(r"<tr><th>1</th>(.*?)</tr>", page, flags=re.DOTALL)[1]
    assert re.findall(r">([^<\s]+)</td>", row) == ["·", "1e-2"]


def test_json_holds_every_cell_and_no_number_that_json_does_not_know(tmp_path: Path) -> None:
    written = json.loads(to_json(sheet()), parse_constant=lambda word: pytest.fail(word))
    assert written == json.loads(json.dumps(to_dict(sheet())))
    assert [cell["key"] for cell in written["cells"]] == [cell.key for cell in GRID.cells]
    assert {cell["loss"] for cell in written["cells"] if cell["certain"]} == {None}
    assert {(e["scheme"], e["depth"]): e["largest_rate"] for e in written["edges"] if e["warmup"]} == EDGE


def test_parquet_holds_cells_and_curves_bit_for_bit(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [*RECORDS[:-1], made_up(GRID.cells[-1], "waiting")]
    write_parquet(sheet(records), tmp_path / "map.parquet")
    rows = parquet.read_table(tmp_path / "map.parquet").to_pylist()
    assert len(rows) == len(records)
    for row, record in zip(rows, records, strict=True):
        assert json.loads(row["config"]) == record.cell.config.to_dict()
        assert row["lr"] == record.cell.lr
        if record.result is None:
            assert row["losses"] is row["verdict"] is None
        else:
            assert repr(tuple(row["losses"])) == repr(record.result.losses)


def test_the_terminal_shows_every_figure() -> None:
    from rich.console import Console

    table = tabulate(RECORDS)
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(terminal_table(table))
    lines = console.export_text().splitlines()
    console.file.close()
    assert len(lines) >= 1 + sum(len(panel.points) for panel in table.panels)
    first = next(line for line in lines if line.startswith("post"))
    assert first.split()[:3] == ["post", "0", "1"]
    assert first.split()[3:] == ["●−0.50", "◐−0.25", "○+0.01", "○nan", "1e-3"]
    assert "64 of 64" in "\n".join(summary(table, sheet().counts, SETTINGS))


@pytest.mark.parametrize("width", [40, 50, 60])
def test_in_a_narrow_terminal_no_figure_is_cut(width: int) -> None:
    from normscope.report.console import as_text

    table = tabulate(RECORDS)
    whole = as_text(lambda _: [terminal_table(table)], width)
    assert max(map(len, whole.splitlines())) <= width
    for figure in ("●−0.50", "◐−0.25", "○+0.01"):
        assert figure in whole.split()
    assert "…" not in whole


@pytest.mark.parametrize("figures", [True, False])
def test_nothing_of_the_table_is_cut_off(figures: bool) -> None:
    from rich.console import Console

    table = tabulate(RECORDS)
    with open(os.devnull, "w") as nowhere:
        console = Console(width=width_of(table) if figures else 64, record=True, file=nowhere)
        console.print(terminal_table(table, figures=figures))
    assert "…" not in console.export_text()


@pytest.mark.parametrize(
    ("value", "words"), [(1e-4, "1e-4"), (0.00259, "2.6e-3"), (0.03, "3e-2"), (0.5, "0.5"), (3.0, "3")]
)
def test_rates_are_short(value: float, words: str) -> None:
    assert short(value) == words
    assert float(words) == pytest.approx(value, rel=0.01)


def test_signs_are_always_there() -> None:
    assert [signed(v) for v in (0.123, -0.5, math.inf)] == ["+0.12", "−0.50", "not finite"]


def test_a_thinned_curve_keeps_its_mean_and_leaves_out_what_is_not_finite() -> None:
    losses = [float(i % 7) for i in range(300)]
    steps, means = thinned([*losses, math.inf])
    assert len(steps) == len(means) == MOST_VERTICES
    assert sum(means) / len(means) == pytest.approx(sum(losses) / len(losses))
    assert sum(steps) / len(steps) == pytest.approx(150.5)
    assert thinned([math.nan]) == ([], [])


def test_the_time_left_follows_the_work_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    clock = Clock()
    assert "left" not in clock.line(Counts(waiting=4, share=0.2))
    now = 129.0
    assert "left" not in clock.line(Counts(waiting=4, share=0.201)), "too little to tell from"
    now = 130.0
    assert "about 90 s left" in clock.line(Counts(waiting=3, done=1, share=0.4, trains=1))
    assert duration(600) == "10 min"
    assert duration(7200) == "2.0 h"


def test_the_page_has_a_dark_theme_and_its_pictures_follow_it(page: str) -> None:
    light, dark = (dict(re.findall(r"--(rate-\d+): (#\w+)", part)) for part in page.split("scheme: dark")[1:])
    assert light.keys() == dark.keys()
    assert light != dark
    assert 'content="light dark"' in page
    assert "var(--ink)" in page
    pictures = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    for colour in (*THEMED, *(light for _, light, _ in rate_colours(sheet(CRASHED).table))):
        assert not re.search(rf"(fill|stroke): ?{colour}", pictures), colour
    assert set(re.findall(r"var\(--(rate-\d+)\)", pictures)) == light.keys()


def test_marks_in_a_cell_keep_their_colour_in_both_themes(page: str) -> None:
    assert re.search(rf"(fill|stroke): ?({ON_LIGHT}|{ON_DARK})", page)


def test_numbers_and_commands_break_at_spaces_only(page: str) -> None:
    assert re.search(r'<p class="lead">[^<]*<span class="w">[\d.]+e-\d', page)
    assert '<span class="w">normscope</span> <span class="w">map</span>' in page


def test_a_narrow_page_has_pictures_of_its_own_width(page: str) -> None:
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#([^")]*)', page)) <= set(ids)
    widths = [
        int(px) for px in re.findall(r"max-width: (\d+)px\" ?", "".join(re.findall("<svg[^>]*>", page)))
    ]
    assert len(widths) == 4
    assert widths[1] < 0.8 * widths[0]
    assert widths[1] <= 120 * 4.2
    cells = re.findall(r'id="((?:narrow-)?)cell-\d+"', page)
    assert cells.count("") == cells.count("narrow-") > 0
    for words in key_words(sheet(CRASHED).table).splitlines():
        assert words[1:] in page, "the key is text: it wraps, and nothing of it is cut"
