"""Tests use at most two threads: `make test` runs two workers of one thread each."""

import os

import pytest
import torch

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
