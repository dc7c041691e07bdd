"""Checks for a test suite: `assert_healthy`, also as a fixture of a pytest plugin, and `assert_same_model`.

from normscope.testing import assert_healthy, assert_same_model

def test_my_model_will_train():
    assert_healthy(MyModel(), lr=3e-4)

def test_my_port_is_the_same_model():
    assert_same_model(Original(), Port())
"""

from normscope.testing.healthy import assert_healthy
from normscope.testing.same import assert_same_model

__all__ = ["assert_healthy", "assert_same_model"]
