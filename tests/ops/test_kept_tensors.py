"""What ops keep between calls is of no graph, no pool, no mode and no stream; and what need not exist is not made."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilekern import interpreter, ops
from tilekern.kernels.families.placeholders import TYPES, placeholder
from tilekern.ops import labels, registration

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    monkeypatch.setattr(registration, "_rows", {})
    return registration._rows


@pytest.mark.parametrize("dtype", TYPES)
def test_on_a_gpu_a_placeholder_takes_no_memory(dtype):
    found = placeholder(2, getattr(torch, dtype), GPU)
    seen = found.__cuda_array_interface__
    assert seen["shape"] == (1, 1)
    assert seen["data"][0] % 256 == 0 != seen["data"][0]
    assert seen["typestr"] == TYPES[dtype]
    assert placeholder(2, getattr(torch, dtype), torch.device("cuda", 0)) is found
    assert not hasattr(found, "device")


def test_the_interpreter_refuses_to_read_a_placeholder():
    import cuda.tile as ct

    def reads(x, y):
        ct.store(y, (0,), ct.load(x, (0,), shape=(1,)))

    y = torch.zeros(1)
    interpreter.launch(reads, (1,), (torch.ones(1), y))
    assert y == 1
    with pytest.raises(interpreter.OutOfBounds, match="load of array 'x' with shape"):
        interpreter.launch(reads, (1,), (placeholder(1, torch.float32, CPU), y))


def test_a_row_is_made_once(rows):
    x = torch.randn(3, 8)
    row = registration.constant_row(x, 1.0)
    assert torch.equal(row, torch.ones(8))
    assert registration.constant_row(x * 2, 1.0) is row
    assert registration.constant_row(x.bfloat16(), 1.0).dtype == torch.bfloat16
    assert registration.constant_row(x, 0.0).count_nonzero() == 0
    assert len(rows) == 3


def test_a_row_of_inference_mode_serves_training(rows):
    x = torch.randn(3, 8, requires_grad=True)
    with torch.inference_mode():
        ops.rms_norm(x, None)
    assert len(rows) == 1
    ops.rms_norm(x, None).sum().backward()
    assert x.grad is not None


def test_no_fake_tensor_is_kept(rows):
    x = torch.randn(3, 8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert registration.constant_row(x, 1.0).shape == (8,)
    assert not rows
    assert type(registration.constant_row(x, 1.0)) is torch.Tensor


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap], ids=["grad", "vmap"])
def test_nothing_of_a_transform_is_kept(rows, transform):
    def norm(x):
        return (x * registration.constant_row(x, 2.0)).sum()

    x = torch.randn(3, 8) if transform is torch.func.vmap else torch.randn(8)
    transform(norm)(x)
    assert not rows


class OnGpu:
    """The answers of a tensor on a GPU whose allocator has two pools."""

    is_cuda = True

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address

    def get_device(self):
        return 0


SEGMENTS = [
    {"device": 0, "address": 4096, "total_size": 4096, "segment_pool_id": (0, 0)},
    {"device": 0, "address": 8192, "total_size": 4096, "segment_pool_id": (0, 3)},
    {"device": 1, "address": 12288, "total_size": 4096, "segment_pool_id": (0, 0)},
]


@pytest.mark.parametrize(
    ("address", "lasts"), [(4096, True), (8191, True), (8192, False), (12287, False), (12288, False), (99999, False)]
)
def test_what_lies_in_a_pool_of_its_own_is_not_kept(monkeypatch, address, lasts):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: SEGMENTS)
    monkeypatch.setattr(registration, "Tensor", OnGpu)
    assert registration._lasts(OnGpu(address)) == lasts
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not registration._lasts(OnGpu(address))


def test_no_row_is_dropped_and_the_number_kept_is_bounded(rows, monkeypatch):
    monkeypatch.setattr(registration, "_MOST_ROWS", 2)
    kept = [registration.constant_row(torch.ones(1, size), 1.0) for size in (3, 4, 5)]
    assert [x.data_ptr() for x in rows.values()] == [x.data_ptr() for x in kept[:2]]
    assert registration.constant_row(torch.ones(1, 5), 1.0) is not kept[2]
    assert registration.constant_row(torch.ones(1, 3), 1.0) is kept[0]


def test_two_threads_first_losses_leave_labels_in_one_word(monkeypatch):
    monkeypatch.setattr(labels, "_seen", {})
    both, words = threading.Barrier(2), []
    make = labels.Seen.__init__

    def together(self, device):
        make(self, device)
        both.wait(10)

    monkeypatch.setattr(labels.Seen, "__init__", together)
    refuse = labels.dispatch.plan_for

    def noted(*given):
        words.append(labels._seen[-1])
        return refuse(*given)

    monkeypatch.setattr(labels.dispatch, "plan_for", noted)
    target = torch.tensor([0, 1])
    threads = [threading.Thread(target=labels.checked, args=("cross_entropy", target, 4, -100)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(words) == 2
    assert words[0] is words[1] is labels._seen[-1]


def test_a_word_for_labels_lies_on_the_host_whatever_the_default_device(monkeypatch):
    monkeypatch.setattr(labels, "_seen", {})
    with torch.device("meta"):
        seen = labels.Seen(CPU)
    assert seen.array.device == CPU
