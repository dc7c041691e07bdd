"""The comparison as one self-contained HTML page, without a script."""

from normscope.compare.types import Diff
from normscope.compare.words import headline, reason
from normscope.report.page import environment


def render_html(diff: Diff, command: str | None = None) -> str:
    """The page; every word in it is escaped.

    Args:
        command: the shell command that made the comparison, shown as the way to run it again.
    """
    template = environment("normscope.compare").get_template("diff.html")
    page = template.render(diff=diff, headline=headline(diff), reason=reason(diff), rerun=command or "")
    return page.encode("utf-8", "backslashreplace").decode("utf-8")
