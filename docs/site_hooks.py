"""Hooks of the documentation site, named in mkdocs.yml: generated pages, and links out of docs/."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

from mkdocs.plugins import get_plugin_logger

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT / "src"))  # the package of this checkout

_ROW_OF_A_CLAIM = re.compile(r"^\| \[(\w+)\]\(claims\.md#(\w+)\)", flags=re.MULTILINE)
_UNQUOTED = re.compile(r"^(\s*```\w+ )title=([^\s\"]+)$", flags=re.MULTILINE)
_HAN = "[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"
_BROKEN_CHINESE = re.compile(rf"(?<={_HAN})\n *(?={_HAN})")  # a line break would show as a space
_BETWEEN_CHINESE = re.compile(r"(\]\((?!https?:)[^)#\s]+)\.zh\.md(?=[)#])")  # the site has one name for both
_TO_CHINESE = re.compile(r"\[([^\]]+)\]\((?:\.\./)*(\w+)\.zh\.md\)")


def on_config(config: Any) -> Any:
    """List the pages of findings; forget the anchors of the language that was built before."""
    pages = [f"findings/{path.name}" for path in sorted((DOCS / "findings").glob("NS*.md"))]
    (findings,) = (entry["Findings"] for entry in config.nav if "Findings" in entry)
    listed = [entry for entry in findings if entry not in pages]  # it is called once for each language
    findings[:] = [*listed, *(page for page in pages if not page.endswith(".zh.md"))]
    for anchors in ("_primary_url_map", "_secondary_url_map"):
        getattr(config.plugins["autorefs"], anchors).clear()
    return config


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Fill in the pages whose text stands elsewhere; turn links and titles into those of the site."""
    markdown = _UNQUOTED.sub(r'\1title="\2"', _text(markdown, page))
    if page.file.src_uri.endswith(".zh.md"):
        return _BETWEEN_CHINESE.sub(r"\1.md", _BROKEN_CHINESE.sub("", markdown))
    return markdown


def on_page_content(html: str, page: Any, **others: Any) -> None:
    """Warn of a fence that was not read as one: the build then fails."""
    if re.search(r"<(p|pre|code)>```", html):
        get_plugin_logger("site").warning(f"{page.file.src_uri}: a ``` that opens or ends no block of code")


def _text(markdown: str, page: Any) -> str:
    match page.file.src_uri:
        case "reference/cli.md":
            return markdown + runpy.run_path(str(DOCS / "command_line.py"))["command_line"]()
        case "diff.md":
            return markdown + _names_of_differences()
        case "reference/contributing.md":
            text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
            text = re.sub(r"^   (?! \S)", " " * 4, text, flags=re.MULTILINE)  # within an item of a list
            return re.sub(r"\n(?=\d\. )", "\n\n", text)
        case "reference/changelog.md":
            text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
            return _with_chinese(text.replace("](docs/", "](../"), page)
        case "claims.zh.md":  # its links to claims.md would lead to itself; links in HTML are left alone
            markdown = _ROW_OF_A_CLAIM.sub(r'| <a id="\2" href="../../claims/#\2">\1</a>', markdown)
            return markdown.replace("[claims.md](claims.md)", '<a href="../../claims/">claims.md</a>')
        case "claims.md":
            return _with_chinese(_with_contributing(markdown, ""), page)
    return _with_contributing(markdown, "../" * page.file.src_uri.count("/"))


def _names_of_differences() -> str:
    from normscope.compare.facts import NAMES

    rows = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in NAMES.items())
    return f"\n| name | meaning |\n|---|---|\n{rows}\n"


def on_post_build(config: Any) -> None:
    """Put llms.txt at the root of the site, its links as those of the site."""
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/(.*?)(?:index|README)?\.md\)", lambda found: f"]({found[1] or './'})", text)
    text = re.sub(r"\]\(([^)]*[^)/])\)", r"](\1/)", text)
    Path(config.site_dir, "llms.txt").write_text(text, encoding="utf-8")


def _with_contributing(markdown: str, root: str) -> str:
    return re.sub(r"\]\((\.\./)+CONTRIBUTING\.md", f"]({root}reference/contributing.md", markdown)


def _with_chinese(markdown: str, page: Any) -> str:
    """Links to Chinese pages as HTML: in the build of one language those of the other do not exist."""
    root = "../" * page.url.count("/")
    return _TO_CHINESE.sub(rf'<a href="{root}zh/\2/">\1</a>', markdown)
