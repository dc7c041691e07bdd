"""Garbage collection: off inside, and as it was afterwards."""

import gc

import pytest

from normscope.collecting import collection_paused


def test_collection_is_paused_and_goes_on_afterwards() -> None:
    assert gc.isenabled()
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled(), "the inner pause must not end the outer one"
    assert gc.isenabled()


def test_collection_goes_on_after_an_exception() -> None:
    with pytest.raises(KeyError), collection_paused():
        raise KeyError
    assert gc.isenabled()


def test_collection_that_the_user_switched_off_stays_off() -> None:
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
