"""Shared by all tests: hypothesis' profiles, and settings apart from the user's."""

import gc
import os
import zlib
from random import Random

# Before numpy and torch are imported. Arrays are so small here that their threads only wait for each other: the tests
# of two kernels of products took 123 s of the processor's time on two busy cores, and take 10 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from examples import load_profile
from rooms import changed_since, is_reached, reached

load_profile()
# What takes long goes first, so that no worker is left alone with it at the end.
LONG = ("xdist_group", "slow", "processes")
# `TEST_PARAMETERS`: where a test has more parameters than so many, one in so many of them is tried, the same ones in
# every run. tests/run.sh says which; without it, as for who runs one file, all are.
SHARES = {"few": (1, 40), "some": (6, 6)}


def pytest_collection_modifyitems(config, items):
    if commit := os.environ.get("TEST_CHANGES_SINCE", ""):
        tests = config.rootpath / "tests"
        rooms = reached(changed_since(commit, config.rootpath))
        leave(config, items, {item for item in items if is_reached(item.path.relative_to(tests).parts[0], rooms)})
    if share := SHARES.get(os.environ.get("TEST_PARAMETERS", "")):
        keep_a_share(config, items, *share)
    items.sort(key=lambda item: next((at for at, mark in enumerate(LONG) if item.get_closest_marker(mark)), len(LONG)))


def pytest_collection_finish():
    # All that is imported and collected stays; to look through it takes each collection of garbage a second.
    gc.freeze()


def keep_a_share(config, items, many, of):
    """Keep one in ``of`` parameters of each test that has more than ``many``, drawn by its name.

    A test marked ``share(N)`` keeps one in N, however few it has.
    """
    tests, kept = {}, set()
    for item in items:
        share = next((mark.args[0] for mark in item.iter_markers("share")), None)
        tests.setdefault((item.path, item.cls, getattr(item, "originalname", item.name), share), []).append(item)
    for (path, _, name, share), mine in tests.items():
        count = max(1, len(mine) // share) if share else max(many, len(mine) // of)
        kept.update(Random(f"{path.name} {name}").sample(mine, min(count, len(mine))))
    leave(config, items, kept)


def leave(config, items, kept):
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session", autouse=True)
def settings_of_these_tests(tmp_path_factory):
    """Settings of their own: sweeps are sealed with a secret that lies there; tests that a test runs are all run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TEST_PARAMETERS", "TEST_CHANGES_SINCE"):
            patch.delenv(name, raising=False)
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        yield


@pytest.fixture(autouse=True)
def numbers_of_this_test(request):
    """Seed a test's random numbers by its name alone, so that a failure repeats alone and in any order."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def nothing_said():
    """Let warnings that come once in a process come in each test, whichever ran before it."""
    from tilekern import warning

    warning._said.clear()
    warning._registry.clear()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A cache with the default of the one problem of ``one_record.py``."""
    from one_record import H200, PROBLEM, SPEC

    from tilekern.runtime import dispatch

    root = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEKERN_CACHE_DIR", str(root))
        dispatch.compile_default(SPEC, PROBLEM, H200)
    return root


@pytest.fixture
def unpatched():
    """A test that starts and ends with nothing patched and no plan remembered."""
    import tilekern
    from tilekern.runtime import dispatch

    torch.set_num_threads(1)
    tilekern.reset()
    dispatch.forget()
    yield
    tilekern.reset()
    dispatch.set_miss_policy(None)
    dispatch.forget()
