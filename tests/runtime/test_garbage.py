"""The search for garbage is as it was after it was put off."""

import gc

import pytest

from tilekern.compile.garbage import search_put_off


@search_put_off()
@search_put_off()
def fail():
    assert not gc.isenabled()
    raise ValueError("inside")


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_off_inside_and_as_it_was_after(enabled):
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError, match="inside"):
            fail()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
