"""Completions of the shell, from Typer, with words split as bash splits them."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from normscope.completion import glue_bash_words

VARIABLE = "_NORMSCOPE_COMPLETE"
"""Set by the shell's script, to "complete_bash" and the like."""


@contextmanager
def as_bash_wants() -> Iterator[None]:
    """Context of a completion for bash, which splits words at colons; nothing changes without one."""
    if os.environ.get(VARIABLE) != "complete_bash":
        yield
        return
    kept = glue_bash_words(os.environ)
    offered = io.StringIO()
    try:
        with redirect_stdout(offered):
            yield
    finally:
        for line in offered.getvalue().splitlines():
            print(line.removeprefix(kept))
