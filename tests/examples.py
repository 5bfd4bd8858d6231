"""How much is tried: a test says how many examples it would like, and the profile scales them.

``HYPOTHESIS_PROFILE``: ``default`` draws the same examples at every run, ``quick`` a part of them; ``thorough`` draws
new ones and more, and puts the cache under the whole stress of which the others take a share.

What takes seconds for each spec goes over a share of its dtypes, flags and configs: ``spec_samples.draws_of``.
"""

import os

from hypothesis import HealthCheck, settings

SCALES = {"quick": 0.2, "default": 0.5, "thorough": 4.0}
FEWEST = 3
profile = os.environ.get("HYPOTHESIS_PROFILE", "default")


def scaled(count: int) -> int:
    """A number of examples in this profile."""
    return max(min(count, FEWEST), round(count * SCALES[profile]))


def examples(count: int, **more: object) -> settings:
    """Settings of a test that would like this many examples, and whatever else they say."""
    return settings(max_examples=scaled(count), **more)


def stressed(count: int, least: int = 1) -> int:
    """How many seconds, kills or mutations of a stress are tried: all in ``thorough``, a twentieth elsewhere."""
    return count if profile == "thorough" else max(least, count // 20)


def load_profile() -> None:
    """Load the profile of tests without settings of their own."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings.register_profile(
        profile, deadline=None, derandomize=profile != "thorough", suppress_health_check=slow, max_examples=scaled(100)
    )
    settings.load_profile(profile)
