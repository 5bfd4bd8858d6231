"""Labels outside the vocabulary: NaN, and the next call raises."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilekern
from tilekern.ops import cross_entropy, fused_linear_cross_entropy, labels, linear_log_probs
from tilekern.runtime import dispatch

ROWS, HIDDEN, VOCABULARY = 6, 16, 12


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch):
    monkeypatch.setattr(labels, "_seen", {})


def tensors():
    torch.manual_seed(0)
    return torch.randn(ROWS, HIDDEN), torch.randn(VOCABULARY, HIDDEN), torch.arange(ROWS)


def of_logits(ids, **options):
    hidden, weight, _ = tensors()
    return cross_entropy((hidden @ weight.t()).requires_grad_(), ids, reduction="none", **options)


def of_head(ids, **options):
    hidden, weight, _ = tensors()
    return fused_linear_cross_entropy(hidden.requires_grad_(), weight, ids, reduction="none", **options)


def of_probabilities(ids, **options):
    hidden, weight, _ = tensors()
    return -linear_log_probs(hidden.requires_grad_(), weight, ids, **options)[0]


OPS = {
    "cross_entropy": of_logits, "fused_linear_cross_entropy": of_head, "linear_log_probs": of_probabilities,
}  # fmt: skip
every_op = pytest.mark.parametrize("op", OPS)


def wrong(label, dtype=torch.int64):
    ids = tensors()[2].to(dtype)
    ids[2] = label
    return ids


@every_op
@pytest.mark.parametrize("after", OPS)
def test_the_next_call_of_any_op_raises_and_the_one_after_it_does_not(op, after):
    good = tensors()[2]
    assert OPS[op](wrong(VOCABULARY)).isnan().nonzero().tolist() == [[2]]
    with pytest.raises(ValueError, match=f"^{op} got the label {VOCABULARY} in an earlier call on cpu, which is outs"):
        OPS[after](good)
    assert bool(OPS[after](good).isfinite().all())


@every_op
@pytest.mark.parametrize("label", [VOCABULARY, VOCABULARY + 1, -1, -99, 2**31 - 1, -(2**31), 2**32 + 1, -(2**40)])
def test_labels_outside_make_their_row_nan_and_are_named(op, label):
    assert OPS[op](wrong(label)).isnan().nonzero().tolist() == [[2]]
    with pytest.raises(ValueError, match=f"{op} got the label {label} in"):
        tilekern.check_labels()
    tilekern.check_labels()


@every_op
def test_the_ignored_label_is_not_outside_and_the_usual_one_is_where_another_is_ignored(op):
    for ignored in (-100, -1, 7, VOCABULARY):
        assert float(OPS[op](wrong(ignored), ignore_index=ignored)[2].detach()) == 0
        tilekern.check_labels()
    assert bool(OPS[op](wrong(-100), ignore_index=-1)[2].isnan())
    with pytest.raises(ValueError, match="got the label -100"):
        tilekern.check_labels()


@every_op
@pytest.mark.parametrize(
    ("dtype", "label"), [(torch.int32, -3), (torch.int16, 300), (torch.int8, -3), (torch.uint8, 99)]
)
def test_labels_of_any_integer_dtype_and_any_strides(op, dtype, label):
    ids = torch.stack([wrong(label, dtype)] * 2, 1)[:, 1]
    assert OPS[op](ids).isnan().nonzero().tolist() == [[2]]
    with pytest.raises(ValueError, match=f"got the label {label} in"):
        tilekern.check_labels()


def test_the_mean_is_nan_and_so_is_what_is_given_beside_it():
    hidden, weight, _ = tensors()
    found = fused_linear_cross_entropy(hidden, weight, wrong(-5), return_token_accuracy=True, bias=weight[:, 0])
    assert bool(found.loss.isnan())
    with pytest.raises(ValueError, match="fused_linear_cross_entropy got the label -5"):
        cross_entropy(hidden @ weight.t(), wrong(1), return_z_loss=True)
    found = cross_entropy(hidden @ weight.t(), wrong(99), return_predicted_tokens=True, weight=torch.ones(VOCABULARY))
    assert bool(found.loss.isnan())
    with pytest.raises(ValueError, match="cross_entropy got the label 99"):
        tilekern.check_labels()


@pytest.mark.parametrize("op", ["cross_entropy", "linear_log_probs"])
def test_compiled_code_raises_too(op):
    """Both are opaque to torch.compile; the head's loss is torch's own there."""
    hidden, weight, good = tensors()

    def step(x, ids):
        return (
            cross_entropy(x @ weight.t(), ids) if op == "cross_entropy" else -linear_log_probs(x, weight, ids)[0].mean()
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, good), step(hidden, good))
    assert bool(compiled(hidden, wrong(VOCABULARY)).isnan())
    with pytest.raises(ValueError, match=f"{op} got the label {VOCABULARY} in"):
        compiled(hidden, good)
    assert bool(compiled(hidden, good).isfinite())


def test_each_device_has_a_word_of_its_own(monkeypatch):
    other = labels.Seen(torch.device("cpu"))
    monkeypatch.setitem(labels._seen, 7, other)
    other.word.value = 2 * labels.kernels.SPAN - 5
    of_logits(tensors()[2])
    with pytest.raises(ValueError, match="fused_linear_cross_entropy got the label -5"):
        tilekern.check_labels(wait=False)
    assert other.word.value == 0


class Operations(TorchDispatchMode):
    """Notes the names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(6,), (2, 3), ()])
def test_one_launch_makes_int32_of_labels_and_counts_them(shape, monkeypatch):
    class Noted:
        blocks, arguments = 1, None

        def launch(self, _, *arguments):
            self.arguments = arguments

    plan = Noted()
    monkeypatch.setattr(labels, "_plan", lambda *_: plan)
    ids = torch.zeros(shape, dtype=torch.int64)
    labels.checked("cross_entropy", ids, VOCABULARY, -100)
    with Operations() as noted:
        found, counted = labels.checked("cross_entropy", ids, VOCABULARY, -100)
        labels.total(counted)
    assert set(noted.names) <= {"empty", "view", "_unsafe_view", "resize_"}
    assert plan.arguments[0].data_ptr() == ids.data_ptr()
    assert found.shape == (ids.numel(),)


@pytest.mark.parametrize("rows", [1, 9, 20_000])
def test_the_number_of_labels_that_count_is_that_of_torch(rows):
    ids = torch.arange(rows) % VOCABULARY
    ids[::3] = -100
    found, counted = labels.checked("cross_entropy", ids, VOCABULARY, -100)
    assert torch.equal(found, ids.to(torch.int32))
    number = labels.total(counted)
    assert (number.dtype, number.shape, int(number)) == (torch.int64, (), int((ids != -100).sum()))


@every_op
def test_without_the_kernel_torch_makes_the_labels_and_refuses_at_once(op, monkeypatch):
    expected = OPS[op](wrong(-100))
    monkeypatch.setattr(labels, "_plan", lambda *_: None)
    before = dispatch.counters("labels").fallbacks
    torch.testing.assert_close(OPS[op](wrong(-100)), expected)
    assert dispatch.counters("labels").fallbacks == before + 1
    with pytest.raises(ValueError, match=rf"^{op} got the label -1, which is not from 0 to {VOCABULARY - 1}, and not"):
        OPS[op](wrong(-1))


@pytest.mark.parametrize(("op", "error"), [("linear_log_probs", ValueError), ("cross_entropy", IndexError)])
def test_torch_s_own_operations_refuse_at_once_on_the_cpu(op, error, monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    with pytest.raises(error, match=r"label -1|Target -1"):
        OPS[op](wrong(-1))
