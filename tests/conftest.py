"""What all tests share: hypothesis' profiles and clean counters."""

import os

from hypothesis import HealthCheck, settings

# `default` draws the same examples at every run; `HYPOTHESIS_PROFILE=thorough` draws new ones, and more of them.
settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("thorough", settings.get_profile("default"), derandomize=False, max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
