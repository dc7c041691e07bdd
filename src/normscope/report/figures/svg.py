"""Elements of SVG as escaped markup: user input can only ever become text or an attribute's value."""

from collections.abc import Iterable

from markupsafe import Markup, escape

Attribute = str | int | float | None


def tag(name: str, *children: object, **attributes: Attribute) -> Markup:
    """One element. `class_` is `class`, other underscores are hyphens; None drops an attribute.

    Children that are not `Markup` are escaped; so are all attribute values.
    """
    head = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    body = "".join(escape(child) for child in children)
    return Markup(f"<{name}{head}>{body}</{name}>" if body else f"<{name}{head}/>")


def group(*children: object, **attributes: Attribute) -> Markup:
    """A `<g>`, or nothing where there are no children."""
    children = tuple(child for child in children if child)
    return tag("g", *children, **attributes) if children else Markup("")


def picture(width: float, height: float, *children: object, label: str, css: str) -> Markup:
    """An `<svg>` with a view box and a name for screen readers."""
    return tag(
        "svg",
        *children,
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
        aria_label=label,
        class_=css,
    )


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> Markup:
    """A straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=css)


def path(points: Iterable[tuple[float, float]], css: str) -> Markup:
    """A line through points."""
    return tag("path", d="M" + " L".join(f"{number(x)} {number(y)}" for x, y in points), class_=css)


def dots(points: Iterable[tuple[float, float]], radius: float, css: str) -> list[Markup]:
    """A circle at each point."""
    return [tag("circle", cx=x, cy=y, r=radius, class_=css) for x, y in points]


def hit(x: float, y: float, width: float, height: float, *lines: str) -> Markup:
    """An invisible rectangle with a tooltip of some lines."""
    return rect(x, y, width, height, "hit", tag("title", "\n".join(lines)))


def rect(
    x: float, y: float, width: float, height: float, css: str, *children: object, rx: float = 0
) -> Markup:
    """A rectangle, with rounded corners where `rx` > 0."""
    return tag("rect", *children, x=x, y=y, width=width, height=height, rx=rx or None, class_=css)


def text(x: float, y: float, words: object, css: str, *, anchor: str = "start") -> Markup:
    """A line of text whose baseline starts (or is centred, or ends) at (x, y)."""
    return tag("text", words, x=x, y=y, class_=css, text_anchor=None if anchor == "start" else anchor)


def clip(words: str, most: int) -> str:
    """`words` in at most `most` characters; drawings cannot wrap."""
    return words if len(words) <= most else words[: most - 1] + "…"


def number(value: Attribute) -> str:
    """A coordinate with at most two decimals, the shortest way."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
