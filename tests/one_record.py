"""One problem of SwiGLU's forward for an H200, on which lookups are tried with no GPU."""

import contextlib
from pathlib import Path

import torch

from tilekern.kernels import spec_named
from tilekern.runtime import dispatch
from tilekern.spec.targets import resolve

GPU = torch.device("cuda", 0)
H200 = resolve("H200")
SPEC = spec_named("swiglu_forward")
# No prebuilt pack serves a model of 48 columns.
PROBLEM = SPEC.problem(rows=64, columns=48, dtype="bfloat16")
SIZES = (50, 48, torch.bfloat16)


@contextlib.contextmanager
def asked_for_nothing(root, monkeypatch):
    """An empty cache of the user, an H200 that is not there, and a process that has asked for nothing yet."""
    for name in ("TILEKERN_CACHE_PATH", "TILEKERN_ON_MISS", "TILEKERN_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(root))
    monkeypatch.setattr(dispatch, "here", lambda _device=None: H200)
    monkeypatch.setattr(dispatch._state, "counters", {})
    monkeypatch.setattr(dispatch._state, "kernels", {})
    dispatch.set_miss_policy(None)
    dispatch.forget()
    yield root
    dispatch.set_miss_policy(None)
    dispatch.forget()


def numbers(**expected):
    """The counters of a kernel, those that are not named at 0."""
    return dict.fromkeys(dispatch.COUNTED, 0) | expected


def record_of(root):
    """The file of the one record of a cache."""
    (path,) = [path for path in Path(root).rglob("*.json") if SPEC.name in path.parts]
    return path
