"""Fixtures of the tests of runs."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The store of a run."""
    return tmp_path / "run.db"
