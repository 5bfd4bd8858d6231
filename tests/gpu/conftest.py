"""Tests that need an NVIDIA GPU: ``python -m pytest -m gpu tests/gpu``.

Kernels come out of the cache (``TILEKERN_CACHE_DIR``); what it lacks is compiled where a compiler is. On a GPU host
without one, carry a cache that was filled elsewhere: ``python tests/gpu/fill_cache.py --gpu H200 FOLDER``.
"""

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / name) for name in ("kernels", "ops", "liger", "patch")]

import gpu_samples  # noqa: E402 (found through the path above)

from tilekern.compile import toolchain  # noqa: E402
from tilekern.errors import CacheMiss  # noqa: E402
from tilekern.runtime import dispatch  # noqa: E402


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    try:
        return (yield)
    except CacheMiss as error:
        pytest.skip(f"no compiler is here, and {error}")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Plans and counters of one test are not those of another; a kernel that is lacking is compiled or skips."""
    monkeypatch.delenv("TILEKERN_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch._state, "counters", {})
    dispatch.set_miss_policy("error" if toolchain.toolkit() is None else "compile")
    dispatch.forget()
    torch.cuda.empty_cache()
    yield
    dispatch.set_miss_policy(None)
    dispatch.forget()


@pytest.fixture
def full_float32():
    """Products of float32 in float32. By hand: what monkeypatch puts back, torch's module of flags cannot delete."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def variants(monkeypatch):
    """The names of the variants that the launcher asks for, in order.

    It asks once for each signature of a kernel object, so those of earlier tests are put aside.
    """
    monkeypatch.setattr(dispatch._state, "kernels", {})
    return gpu_samples.watch_variants(monkeypatch)
