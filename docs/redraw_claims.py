"""Measure the claims with five seeds and write docs/claims.md and docs/claims.zh.md.

    python docs/redraw_claims.py            # or: make claims

What the same code measured before is read from the cache, so that a second call takes seconds.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NORMSCOPE = Path(sys.executable).with_name("normscope")

if __name__ == "__main__":
    for style, page in (("markdown", "docs/claims.md"), ("markdown-zh", "docs/claims.zh.md")):
        command = [NORMSCOPE, "claims", "--seeds", "5", "--format", style, "--output", page]
        subprocess.run(command, check=True, cwd=ROOT)
