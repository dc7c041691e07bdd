"""Checks for a user's own test suite: `assert_healthy`, and a pytest plugin with the same as a fixture.

from normscope.testing import assert_healthy

def test_my_model_will_train():
    assert_healthy(MyModel(), lr=3e-4)
"""

from normscope.testing.healthy import assert_healthy

__all__ = ["assert_healthy"]
