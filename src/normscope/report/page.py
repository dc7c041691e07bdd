"""Parts that all pages share: colours of both themes, words that stay whole, pictures in those colours."""

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from jinja2 import Environment

_HYPHENATED = re.compile(r"(?:^|(?<=\s))[^\s]*(?:\d[^\s]*[-−]|[-−][^\s]*\d|--)[^\s]*")
"""A word that a browser would break at its hyphen: "1e-3", "(at 9.7e-3)", "--lr"."""
_PAINT = re.compile(r"\b(fill|stroke): ?(#[0-9a-f]{6})\b")


def environment(room: str, **layout: Any) -> "Environment":
    """The templates of the package `room`: everything is escaped, and nothing may be missing.

    A page extends `base.html`, which is for all rooms and has the blocks policy, title, style and body.
    Filters: `whole` keeps numbers and options in one piece, `command` breaks a command at its spaces only,
    `spec` a MODEL at its commas.
    The global `base` is the style sheet that all pages share.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=ChoiceLoader([PackageLoader(room), PackageLoader("normscope.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **layout,
    )
    made.filters |= {"whole": whole, "command": command, "spec": spec}
    made.globals["base"] = Markup(style_sheet("base.css"))
    return made


def style_sheet(name: str) -> str:
    """A style sheet or script of this room's templates."""
    return files("normscope.report").joinpath("templates", name).read_text(encoding="utf-8")


def whole(words: str) -> Markup:
    """`words`, escaped, with each number and option in one piece: no line breaks at its hyphen."""
    parts, end = [], 0
    for found in _HYPHENATED.finditer(words):
        parts += [escape(words[end : found.start()]), _piece(found[0])]
        end = found.end()
    return Markup("").join([*parts, escape(words[end:])])


def command(words: str) -> Markup:
    """A command, escaped, whose lines break at its spaces only; a word longer than a line at its commas."""
    return Markup("\n").join(
        Markup(" ").join(_piece(*word.split(",")) for word in line.split(" ")) for line in words.split("\n")
    )


def spec(model: str) -> Markup:
    """A MODEL, escaped, that a line may break at its commas."""
    return Markup(",<wbr>").join(model.split(","))


def _piece(*parts: str) -> Markup:
    return Markup('<span class="w">{}</span>').format(Markup(",<wbr>").join(parts))


def themed(svg: str, names: Mapping[str, str]) -> str:
    """`svg` with literal colours as variables of the style sheet: "#1d2127" is `var(--ink)` in both themes.

    Args:
        svg: drawn by matplotlib, colours in lower case.
        names: variable by colour; other colours stay as they are.
    """

    def named(found: re.Match[str]) -> str:
        return f"{found[1]}: var(--{names[found[2]]})" if found[2] in names else found[0]

    return _PAINT.sub(named, svg)
