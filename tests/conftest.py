"""What all tests share: hypothesis' profiles and clean counters."""

import os

import pytest
from hypothesis import HealthCheck, settings

# `default` draws the same examples at every run; `HYPOTHESIS_PROFILE=thorough` draws new ones, and more of them.
settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("thorough", settings.get_profile("default"), derandomize=False, max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session", autouse=True)
def settings_of_these_tests(tmp_path_factory):
    """Settings of their own: sweeps are sealed with a secret that lies there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        yield


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A cache with the default of the one problem of ``one_record.py``."""
    from one_record import H200, PROBLEM, SPEC

    from tilekern import dispatch

    root = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEKERN_CACHE_DIR", str(root))
        dispatch.compile_default(SPEC, PROBLEM, H200)
    return root
