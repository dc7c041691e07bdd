"""Parser of pages for tests."""

from html.parser import HTMLParser

VOID = {"meta", "br", "wbr", "input", "img", "link", "hr"}
LOADING = {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "formaction", "background"}
"""Attributes that can load something."""


class Page(HTMLParser):
    """Every tag with its attributes, all text by enclosing tag; asserts that tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: dict[str, str] = {}
        self.words = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        where = self.open[-1] if self.open else ""
        self.text[where] = self.text.get(where, "") + data
        self.words += data if where not in ("script", "style") else ""

    def all_text(self) -> str:
        """The text without scripts and styles, tag by tag."""
        return "\n".join(text for tag, text in self.text.items() if tag not in ("script", "style"))

    @property
    def plain(self) -> str:
        """The text without scripts and styles, in its order."""
        return " ".join(self.words.split())

    def with_class(self, css: str) -> list[dict[str, str]]:
        """Attributes of the tags of a class."""
        return [a for _, a in self.tags if css in a.get("class", "").split()]
