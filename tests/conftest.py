"""Tests use at most two threads: `make test` runs two workers of one thread each."""

import os
import signal

import pytest
import torch

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `make test &` of a script starts with Ctrl-C ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
