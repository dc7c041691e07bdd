"""Combinations of parameters, of which a part is run always."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def thinned(*axes: Iterable[Any], every: int = 2) -> list[Any]:
    """All combinations; one of `every` is run always, as on a chessboard, the others by `pytest -m slow`.

    Each value of an axis that is as long as `every` meets others of the next axes than its neighbours do.
    """
    return [
        pytest.param(*values, marks=() if sum(place) % every == 0 else pytest.mark.slow)
        for place, values in (tuple(zip(*each, strict=True)) for each in product(*map(enumerate, axes)))
    ]
