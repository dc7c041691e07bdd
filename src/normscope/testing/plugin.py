"""The pytest plugin: the fixture `normscope_check` and the option `--normscope-budget`. PYTEST_DONT_REWRITE

pytest loads it in every run of every suite on the machine, so it imports neither PyTorch nor our other rooms.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from normscope.testing.healthy import assert_healthy

if TYPE_CHECKING:
    from normscope.report import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--normscope-budget`."""
    parser.getgroup("normscope", "normscope: will this model train?").addoption(
        "--normscope-budget",
        choices=("fast", "standard", "deep"),
        default="fast",
        help="What the Jacobians of normscope_check may cost: seconds, a few training steps, minutes.",
    )


@pytest.fixture(scope="session")
def normscope_check(pytestconfig: pytest.Config) -> "Callable[..., Report]":
    """`normscope.testing.assert_healthy` with the budget of the command line."""
    budget = pytestconfig.getoption("--normscope-budget")

    def check(model: Any, batch: Any = None, loss_fn: Any = None, **options: Any) -> "Report":
        __tracebackhide__ = True
        return assert_healthy(model, batch, loss_fn, **{"budget": budget, **options})

    return check
