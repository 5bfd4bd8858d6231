"""Ops run their kernels on the CPU in these tests."""

from operator import attrgetter

import pytest
import torch

from tilekern.ops import adamw
from tilekern.runtime import dispatch


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEKERN_INTERPRET", "1")
        dispatch.forget()
        yield
    dispatch.forget()


@pytest.fixture
def without_interpreter(monkeypatch):
    monkeypatch.delenv("TILEKERN_INTERPRET")
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.fixture
def on_cpu(monkeypatch):
    """tilekern.AdamW sorts parameters on the CPU as on a GPU, and 64 elements are many.

    Torch's fused step is its CPU's, and refuses tensors that are not alike, as its GPU's does.
    """
    goes_together, fused = adamw._goes_together, torch._fused_adamw_

    def fits(*tensors):
        return goes_together(*(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors))

    def refusing(*columns, **options):
        for four in zip(*columns[:4], strict=True):
            has_gaps = torch.empty_like(four[0]).stride() != four[0].stride()
            if has_gaps or len({(x.dtype, x.stride()) for x in four}) > 1:
                raise RuntimeError("params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout")
        return fused(*columns, **options)

    monkeypatch.setattr(adamw, "MOST_TOGETHER", 64)
    monkeypatch.setattr(adamw, "_goes_together", fits)
    monkeypatch.setattr(adamw, "_is_on_gpu", attrgetter("is_cpu"))
    monkeypatch.setattr(torch, "_fused_adamw_", refusing)
