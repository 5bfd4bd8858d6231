"""Composites look their kernels up; in these tests the kernels run on the CPU."""

import pytest

from tilekern.runtime import dispatch


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEKERN_INTERPRET", "1")
        dispatch.forget()
        yield
    dispatch.forget()
