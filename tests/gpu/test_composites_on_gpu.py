"""Attention's backward on a GPU where records are missing, of the whole or of its pieces, and no compiler is here."""

import pytest
import torch

from tilekern.compile import cutile
from tilekern.ops import attention
from tilekern.runtime import dispatch

WHOLE, PIECES = "attention_backward", ("attention_dkdv_kept", "attention_dq_kept", "attention_sums")


def gradients():
    """dq, dk and dv of Qwen3-8B's heads, whose records ship for some GPUs."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, 4096, heads, 128, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        for heads in (32, 8, 8)
    )
    out = attention(q, k, v, deterministic=True)
    out.backward(torch.randn(out.shape, device="cuda", dtype=out.dtype, generator=generator))
    return q.grad, k.grad, v.grad


@pytest.fixture
def without(monkeypatch):
    """Begin again without the records of some kernels, and without a compiler."""
    real = dispatch._hits

    def hide(*names):
        def hits(spec, *rest, **options):
            return iter(()) if spec.name in names else real(spec, *rest, **options)

        monkeypatch.setattr(dispatch, "_hits", hits)
        monkeypatch.setattr(cutile, "_tileiras", lambda: None)
        monkeypatch.setattr(dispatch._state, "counters", {})
        cutile.toolkit.cache_clear()
        dispatch.set_miss_policy("compile")
        dispatch.forget()

    yield hide
    cutile.toolkit.cache_clear()


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
@pytest.mark.parametrize("hidden", [(WHOLE,), PIECES], ids=["the whole", "pieces"])
def test_its_kernels_run_and_it_says_so(hidden, without):
    expected = gradients()
    without(*hidden)
    found, counts = gradients(), dispatch.stats()
    if hidden == PIECES and (counts["attention_forward"]["fallbacks"] or not dispatch.substitutes()):
        pytest.skip("no cache here holds the kernels of whole heads, or no record names pieces")
    assert not any(count["fallbacks"] for count in counts.values())
    assert (counts[WHOLE]["substitutes"], counts[WHOLE]["launches"]) == (1, 1)
    assert list(dispatch.substitutes()) == [WHOLE]
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).norm() <= 4e-3 * other.float().norm()
