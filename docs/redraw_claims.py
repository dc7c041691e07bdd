"""Measure the claims with five seeds and write docs/claims.md, docs/claims.zh.md and the README's rows.

    python docs/redraw_claims.py            # or: make claims

What the same code measured before is read from the cache, so that a second call takes seconds.
"""

import re
import subprocess
import sys
from pathlib import Path

from normscope.claims.page import SURPRISING

ROOT = Path(__file__).parents[1]
ROWS = re.compile(r"^\| \| what is said \|.*?\n(?=\n|```|[^|])", re.MULTILINE | re.DOTALL)
"""The table of the README, from its head to the line after its last row."""


def claims(*arguments: str) -> str:
    """Run `normscope claims --seeds 5 …` and return what it prints; raises where it fails."""
    command = [Path(sys.executable).with_name("normscope"), "claims", *arguments, "--seeds", "5"]
    return subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout


def with_rows(readme: str, rows: str) -> str:
    """`readme` with its table replaced by `rows`."""
    assert len(ROWS.findall(readme)) == 1, "one table of claims in README.md"
    return ROWS.sub(lambda found: rows, readme)


if __name__ == "__main__":
    claims("--format", "markdown", "--output", "docs/claims.md")
    claims("--format", "markdown-zh", "--output", "docs/claims.zh.md")
    readme = ROOT / "README.md"
    rows = claims(*SURPRISING, "--format", "markdown")
    readme.write_text(with_rows(readme.read_text(encoding="utf-8"), rows), encoding="utf-8")
