"""Names of reasons are in the table of names, which users read."""

import re
from pathlib import Path

from normscope.compare import reasons
from normscope.compare.facts import NAMES


def test_every_reason_has_a_meaning() -> None:
    found = set()
    for path in Path(reasons.__file__).parent.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        found |= set(re.findall(r'[Rr]eason\(\s*"([a-z-]+)"', source))
        found |= set(re.findall(r'name = "([a-z-]+)"', source))
    assert len(found) > 30
    assert sorted(found - set(NAMES) - {"unknown"}) == []
