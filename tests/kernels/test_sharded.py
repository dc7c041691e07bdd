"""Sharded norms on 2 and 4 gloo ranks; the cases are in `sharded_cases.py`."""

import pytest

from tests.kernels.sharded_cases import run_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_norms_on_gloo_ranks(ranks: int) -> None:
    run_ranks(ranks)
