"""The page of the claims, one self-contained HTML file."""

from collections.abc import Sequence

from normscope.claims.look import Look
from normscope.claims.tested import Tested


def render_page(tested: Sequence[Tested], look: Look, command: str, seconds: float) -> str:
    """The page: a table of claims by source, each opening to what was measured."""
    raise NotImplementedError
