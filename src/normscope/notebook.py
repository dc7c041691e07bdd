"""HTML fragments for notebook cells, with inline styles, so that none affects the notebook's own page.

Colours follow the notebook's theme: text inherits its colour, lines are translucent, and a badge brings its
own background. Every text is escaped; there is no script, no style sheet and no link to the network.
"""

import base64
from collections.abc import Iterable, Mapping
from html import escape

_TONES = {"error": "#b3261e", "warning": "#a85a00", "note": "#5a6572", "fine": "#0b7a68"}
_LINE = "1px solid rgba(128,128,128,.35)"
_FRAME = "font:13px/1.45 system-ui,sans-serif;color:inherit;max-width:72em;overflow-wrap:anywhere"
_CELL = f"padding:3px 14px 3px 0;vertical-align:top;border:0;border-bottom:{_LINE};background:none"
_HEAD = f"{_CELL};font-weight:400;opacity:.7"


class Html(str):
    """A piece of HTML; plain strings are escaped when they are inserted."""

    __slots__ = ()


def tag(name: str, *children: str, style: str = "", **attributes: str) -> Html:
    """An element with an inline style; children and attributes are escaped."""
    given = {"style": style, **attributes} if style else attributes
    opening = "".join(f' {key}="{escape(value)}"' for key, value in given.items())
    inside = "".join(child if isinstance(child, Html) else escape(child) for child in children)
    return Html(f"<{name}{opening}>" if name == "img" else f"<{name}{opening}>{inside}</{name}>")


def fragment(*children: str) -> str:
    """The output of one cell: `children` in one `<div>`. Lone surrogates of a path are spelled out."""
    whole = tag("div", *children, style=_FRAME)
    return whole.encode("utf-8", "backslashreplace").decode("utf-8")


def badge(words: str, tone: str) -> Html:
    """Words on a coloured background; `tone` is "error", "warning", "note" or "fine"."""
    style = f"display:inline-block;padding:0 8px;border-radius:9px;background:{_TONES[tone]};color:#fff"
    return tag("span", words, style=f"{style};font-weight:600;white-space:nowrap")


def line(*children: str, soft: bool = False) -> Html:
    """A paragraph; a soft one is paler."""
    return tag("div", *children, style="margin:4px 0;opacity:.75" if soft else "margin:4px 0")


def code(words: str) -> Html:
    """Words in a fixed-width font."""
    return tag("code", words, style="color:inherit;background:none;padding:0")


def table(
    rows: Iterable[Iterable[str]], head: Iterable[str] = (), *, title: str = "", figures: Iterable[int] = ()
) -> Html:
    """A table.

    Args:
        rows: the cells of each row.
        head: the names of the columns.
        title: the line above it.
        figures: the indices of the columns that are flush right.
    """
    right = frozenset(figures)

    def row(cells: Iterable[str], name: str, style: str) -> Html:
        sided = ((cell, "right" if index in right else "left") for index, cell in enumerate(cells))
        inside = (tag(name, cell, style=f"{style};text-align:{side}") for cell, side in sided)
        return tag("tr", *inside, style="background:none")

    names = list(head)
    parts = [tag("thead", row(names, "th", _HEAD))] if names else []
    parts.append(tag("tbody", *(row(cells, "td", _CELL) for cells in rows)))
    style = "border-collapse:collapse;border:0;margin:2px 0 8px;font-size:inherit;color:inherit"
    above = [tag("div", title, style="margin-top:8px;font-weight:600")] if title else []
    return Html("".join([*above, tag("table", *parts, style=style)]))


def picture(png: bytes, words: str, size: Mapping[str, str]) -> Html:
    """A PNG inline.

    Args:
        png: its bytes.
        words: its alternative text.
        size: CSS properties such as width.
    """
    source = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    style = ";".join(f"{name}:{value}" for name, value in size.items())
    return tag("img", src=source, alt=words, style=style)
