"""A map in a notebook cell: the main result, the picture, the largest learning rates."""

import sqlite3

from normscope.errors import UsageError
from normscope.maps.page import Sheet, lead, render_png, sheet_of
from normscope.maps.store import Store
from normscope.maps.words import described, largest
from normscope.notebook import fragment, line, picture, table

_DOTS = 110  # an inch: a picture of twice the shown width would make notebooks large
_WIDTH = {"max-width": "100%", "width": "44em", "border-radius": "4px"}


def map_html(sheet: Sheet) -> str:
    """The map as an HTML fragment; `normscope map --output` writes the whole page."""
    found, counts = sheet.table, sheet.counts
    words = lead(found, counts)
    crashed = f", {counts.crashed} crashed" if counts.crashed else ""
    done = f"{counts.done} of {counts.total} cells done, {counts.trains} train, {counts.fails} fail{crashed}"
    said = [done, *(f"{name}: {value}" for name, value in described(sheet.settings))]
    rows = [
        (panel.title, str(panel.warmup), "" if row[0].depth is None else str(row[0].depth), largest(row))
        for panel in found.panels
        for row in panel.points
    ]
    return fragment(
        line(words),
        picture(render_png(sheet, _DOTS), words, _WIDTH),
        table(rows, ("scheme", "warm-up", "depth", "largest rate that trains"), figures=(1, 2, 3)),
        line("; ".join(said), soft=True),
    )


def store_html(store: Store) -> str:
    """The map in a store, or a message if it has none or is closed."""
    try:
        return map_html(sheet_of(store))
    except UsageError as error:
        return fragment(line(str(error)))
    except sqlite3.ProgrammingError:  # a closed connection
        return fragment(line(f"{store.path} is closed; show Store({str(store.path)!r}, reading=True)"))
