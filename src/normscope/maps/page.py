"""The page of a map, one self-contained HTML file, and its picture as PNG."""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from normscope.errors import UsageError
from normscope.maps.curves import draw_curves, rate_colours
from normscope.maps.draw import THEMED, draw_map, key_words, style
from normscope.maps.record import Counts, Record
from normscope.maps.store import Store
from normscope.maps.table import Panel, Table, edge, excess, tabulate
from normscope.maps.words import described, largest, short, signed, told
from normscope.report.page import environment, themed
from normscope.report.words import criterion_in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PNG_DOTS = 180  # per inch
MOST_PIXELS = 120  # per inch of a figure on the page
NARROW = 3.9  # inches of the figures on a phone


@dataclass(frozen=True)
class Sheet:
    """Contents of a map's page.

    Attributes:
        records: records of the cells.
        settings: settings that the cells share.
        counts: progress of the map.
        stack: number of cells trained at once, and the cost measured for it.
        command: commands that make the same map, one per line, or "".
    """

    records: Sequence[Record]
    settings: Mapping[str, Any]
    counts: Counts
    stack: Mapping[str, Any] | None = None
    command: str = ""

    @property
    def table(self) -> Table:
        """The cells by scheme, warm-up, depth and learning rate."""
        return tabulate(self.records)

    def _repr_html_(self) -> str:
        """The map in a notebook cell."""
        from normscope.maps.notebook import map_html  # it reads Sheet: imported where it is needed

        return map_html(self)

    @property
    def versions(self) -> list[str]:
        """Versions of the software that the cells were trained with."""
        found = (record.result.versions for record in self.records if record.result)
        return sorted({", ".join(f"{name} {version}" for name, version in each.items()) for each in found})


def sheet_of(store: Store) -> Sheet:
    """The current contents of a store.

    Raises:
        UsageError: the store has no map yet.
    """
    with store.one_moment():
        settings, counts, records = store.note("settings"), store.counts(), store.records()
        stack, commands = store.note("stack"), store.note("command") or ""
    if settings is None:
        raise UsageError(
            f'store "{store.path}" (empty)', "a store with cells", "name a grid, for example with --schemes"
        )
    return Sheet(records, settings, counts, stack, commands)


def render_png(sheet: Sheet, dots: int = PNG_DOTS) -> bytes:
    """The picture as PNG, with `dots` pixels per inch."""
    from matplotlib import rc_context

    with rc_context(style()):
        figure = draw_map(sheet.table)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=dots, metadata={"Software": None})
    return picture.getvalue()


def render_page(sheet: Sheet) -> str:
    """The page: picture (each cell's details under the pointer), largest learning rates, curves, table.

    The same map gives the same text. Every name is escaped; the page has no script and loads nothing.
    """
    from markupsafe import Markup
    from matplotlib import rc_context

    table = sheet.table
    with rc_context(style()):
        wide = _pictures(table, draw_map(table, key=False), draw_curves(table))
        narrow = _pictures(table, draw_map(table, NARROW, key=False), draw_curves(table, NARROW))
    narrow = [picture and _with_ids(picture, "narrow-") for picture in narrow]
    return (
        environment("normscope.maps")
        .get_template("map.html")
        .render(
            sheet=sheet,
            table=table,
            lead=lead(table, sheet.counts),
            facts=described(sheet.settings),
            rates=Markup(rate_style(table)),
            pictures=[Markup(wide[0]), Markup(narrow[0])],
            curves=[Markup(each) for each in (wide[1], narrow[1]) if each],
            key=key_words(table),
            notes=notes(sheet),
            criterion=criterion_in_words("Trains", table.unigram_entropy),
            edge=edge,
            excess=excess,
            largest=largest,
            short=short,
            signed=signed,
        )
    )


def notes(sheet: Sheet) -> list[str]:
    """Notes at the foot of the page, one sentence each."""
    wrong, went_on = sheet.table.stops_that_were_wrong
    found = [f"{'; '.join(sheet.versions)}."] if sheet.versions else []
    if sheet.stack is not None:
        found.append(f"Cells trained at once: {sheet.stack['size']}.")
    if went_on:
        found.append(
            f"Stopping early would have been wrong for {wrong} of the {went_on} cells that went on "
            "after they were certain to fail."
        )
    return [*found, "A cell's losses depend on the other cells of its stack only by rounding."]


def lead(table: Table, counts: Counts) -> str:
    """The main result: the depth to which each scheme trains at any learning rate."""
    if not counts.done:
        return "No cell is done yet."
    begun = [panel for panel in table.panels if any(point.done for row in panel.points for point in row)]
    said = ", ".join(map(_deepest, begun))
    left = "" if counts.is_finished else f" {counts.waiting + counts.claimed} cells are still to be trained."
    return f"Deepest model that trains at any tested learning rate: {said}.{left}"


def _deepest(panel: Panel) -> str:
    """A panel's name, the largest depth that trains, and the largest learning rate that trains there."""
    name = panel.title + (f" with {panel.subtitle}" if panel.warmup else "")
    found = [(row[0].depth, rate) for row in panel.points if (rate := edge(row)) is not None]
    if not found:
        return f"{name} none"
    depth, rate = found[-1]
    return f"{name} {'' if depth is None else f'{depth} blocks '}(at up to {short(rate)})"


def _svg(figure: "Figure", table: Table) -> str:
    """A figure as an SVG element in the page's colours, with letters no larger than the page's text."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    _, _, element = text.getvalue().partition("<svg")
    width = f'style="width: 100%; max-width: {MOST_PIXELS * figure.get_size_inches()[0]:.0f}px"'
    element = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', width, "<svg" + element, count=1)
    return themed(element, THEMED | {light: name for name, light, _ in rate_colours(table)})


def _pictures(table: Table, picture: "Figure", curves: "Figure | None") -> list[str]:
    """The map with what is known of each cell, and the curves, "" where none are drawn."""
    return [
        _with_titles(_svg(picture, table), table),
        "" if curves is None else _with_ids(_svg(curves, table), "curves-"),
    ]


def _with_ids(svg: str, prefix: str) -> str:
    """The same with `prefix` before each id, so that two pictures share none."""
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    return re.sub(r'(url\(|href=")#', rf"\1#{prefix}", svg)


def rate_style(table: Table) -> str:
    """Style sheet with the colour of each learning rate's curves, in both themes."""
    light, dark = (" ".join(f"--{each[0]}: {each[side]};" for each in rate_colours(table)) for side in (1, 2))
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def _with_titles(svg: str, table: Table) -> str:
    """Add each cell's details, which a browser shows under the pointer."""
    words = [told(panel, point) for panel in table.panels for row in panel.points for point in row]

    def titled(match: re.Match) -> str:
        return f"{match[0]}<title>{escape(words[int(match[1])])}</title>"

    return re.sub(r'<g id="cell-(\d+)">', titled, svg)
