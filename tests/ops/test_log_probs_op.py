"""log_probs: of a sampler's logits, what linear_log_probs says of the head's."""

import pytest
import torch

import tilekern
from tilekern import ops
from tilekern.ops.operation import DECLARED
from tilekern.runtime.dispatch import counters

VOCABULARY = 83
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def drawn(*rows, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, rows, generator=generator)
    return (3 * torch.randn(*rows, VOCABULARY, generator=generator)).to(dtype), ids


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("rows", [(1,), (2, 5), (0,), ()], ids=str)
@pytest.mark.parametrize("more", [{}, {"temperature": 0.7, "softcap": 4.0, "ignore_index": 3}])
def test_both_results_are_near_float64(rows, more):
    for dtype in DTYPES:
        logits, ids = drawn(*rows, dtype=dtype)
        ids.view(-1)[:1] = more.get("ignore_index", 0)
        found = ops.log_probs(logits, ids, **more)
        z = logits.double()
        z = (4.0 * torch.tanh(z / 4.0) if "softcap" in more else z) / more.get("temperature", 1.0)
        known = z.log_softmax(-1)
        counted = ids != more.get("ignore_index", -100)
        wanted = known.gather(-1, ids[..., None])[..., 0], -(known.exp() * known).sum(-1)
        for one, other in zip(found, wanted, strict=True):
            assert (one.dtype, one.shape) == (torch.float32, ids.shape)
            torch.testing.assert_close(one.double(), other.where(counted, 0), rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("interpreted")
def test_a_kernel_serves_rows_of_any_stride_and_torch_float64():
    logits, ids = drawn(6)
    before = counters("log_probs_forward").launches
    wide = torch.empty(6, 2 * VOCABULARY, dtype=logits.dtype)[:, ::2].copy_(logits)
    assert all(map(torch.equal, ops.log_probs(wide, ids), ops.log_probs(logits, ids)))
    assert counters("log_probs_forward").launches == before + 2
    assert ops.log_probs(logits.double(), ids)[0].dtype == torch.float64


@pytest.mark.usefixtures("interpreted")
def test_an_id_outside_the_vocabulary_is_said_in_the_next_call():
    logits, ids = drawn(4)
    ids[2] = VOCABULARY
    assert ops.log_probs(logits, ids)[0].isnan().tolist() == [False, False, True, False]
    with pytest.raises(ValueError, match=f"log_probs got the label {VOCABULARY} in an earlier call"):
        tilekern.check_labels()


def test_what_does_not_fit_is_refused():
    logits, ids = drawn(4)
    with pytest.raises(ValueError, match=r"ids must be \[4\]"):
        ops.log_probs(logits, ids[:3])
    with pytest.raises(ValueError, match="at least one token"):
        ops.log_probs(logits[:, :0], ids)
    with pytest.raises(ValueError, match="temperature"):
        ops.log_probs(logits, ids, temperature=0.0)
    with pytest.raises(RuntimeError, match=r"log_probs has no gradient.*linear_log_probs"):
        ops.log_probs(logits.requires_grad_(), ids)


def test_it_compiles_whole():
    logits, ids = drawn(4, dtype=torch.float32)
    found = torch.compile(ops.log_probs, fullgraph=True, backend="eager")(logits, ids)
    assert all(map(torch.equal, found, ops.log_probs(logits, ids)))
    assert "log_probs" in DECLARED
