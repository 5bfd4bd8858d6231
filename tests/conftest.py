"""What all tests share: hypothesis' profiles, and settings of their own."""

import datetime
import os
import zlib
from random import Random

# Before numpy and torch are imported. Arrays are so small here that their threads only wait for each other: the tests
# of two kernels of products took 123 s of the processor's time on two busy cores, and take 10 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from examples import load_profile, profile

load_profile()
# What takes long goes first, so that no worker is left alone with it at the end.
LONG = ("xdist_group", "slow", "processes")
# `TEST_PARAMETERS`: where a test has more parameters than so many, one in so many of them is tried. tests/run.sh says
# which; without it, as for who runs one file, all are.
SHARES = {"few": (6, 10), "quarter": (8, 4)}


def pytest_collection_modifyitems(config, items):
    take_turns(config, items)
    if share := SHARES.get(os.environ.get("TEST_PARAMETERS", "")):
        keep_a_share(config, items, *share)
    items.sort(key=lambda item: next((at for at, mark in enumerate(LONG) if item.get_closest_marker(mark)), len(LONG)))


def keep_a_share(config, items, many, of):
    """Keep one in ``of`` parameters of each test that has ``many``: each day others, alike in all workers.

    A test marked ``daily`` keeps all of them.
    """
    tests, kept = {}, set()
    for item in items:
        if item.get_closest_marker("daily"):
            kept.add(item)
        else:
            tests.setdefault((item.path, item.cls, getattr(item, "originalname", item.name)), []).append(item)
    draw, day = Random(), today().isoformat()
    for test, mine in tests.items():
        draw.seed(f"{day} {test[0].name} {test[2]}")
        kept.update(draw.sample(mine, max(many, len(mine) // of)) if len(mine) > many else mine)
    leave(config, items, kept)


def take_turns(config, items):
    """Leave out the parameters of a test marked ``in_turn(DAYS)`` whose day it is not; each has its own in so many.

    Tests without parameters have other days than one another.

    None is left out by the profile ``thorough``, nor where the command line names it, so that one that failed runs
    again on any day.
    """
    named = {arg.rpartition("::")[2] for arg in config.args}
    tests = {}
    for item in items:
        if (mark := item.get_closest_marker("in_turn")) and profile != "thorough":
            tests.setdefault((item.path, item.originalname, *mark.args), []).append(item)
    turn = today().toordinal()
    off = {
        item
        for (_, name, days), mine in tests.items()
        for at, item in enumerate(mine)
        if (at + zlib.crc32(name.encode()) - turn) % days
    }
    leave(config, items, {item for item in items if item not in off or item.name in named})


def today():
    """The same in all workers, wherever they are."""
    return datetime.datetime.now(datetime.UTC).date()


def leave(config, items, kept):
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session", autouse=True)
def settings_of_these_tests(tmp_path_factory):
    """Settings of their own: sweeps are sealed with a secret that lies there; tests that a test runs are all run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TEST_PARAMETERS", raising=False)
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        yield


@pytest.fixture(autouse=True)
def numbers_of_this_test(request):
    """What a test draws hangs on its name alone, so that one that fails does so again, in any order and alone."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


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
