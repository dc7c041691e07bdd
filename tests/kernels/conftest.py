"""Triton runs in its interpreter where there is no GPU; this has to be set before its kernels are made."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def cheap_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace as `torch.compile` does, without generating code."""
    from normscope.kernels.dispatch import KERNELS

    monkeypatch.setattr(KERNELS["compile"], "compiler", "aot_eager")
