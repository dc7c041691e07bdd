"""A cheap compiler for the tests of the kernels."""

import pytest


@pytest.fixture
def cheap_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace as `torch.compile` does, without generating code."""
    from normscope.kernels.dispatch import KERNELS

    monkeypatch.setattr(KERNELS["compile"], "compiler", "aot_eager")
