"""The odd claims, where a test asks for them."""

import os
from pathlib import Path

import odd_claims
import pytest

from normscope.claims import CLAIMS, Claim


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> dict[str, Claim]:
    """Claims Z1 … of every verdict, known to `CLAIMS` here and to workers."""
    path = [str(Path(odd_claims.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    for id, claim in odd_claims.ODD.items():
        monkeypatch.setitem(CLAIMS, id, claim)
    return odd_claims.ODD
