"""Rules that every declared op keeps on the host: what is looked up, checked, copied and computed, and how often."""

from __future__ import annotations

import pytest
import torch
from op_samples import SHIPPED, WITH_ARRAYS, laid_out, scalars_of, tensors_of
from torch.utils._python_dispatch import TorchDispatchMode

from tilekern.errors import CacheMiss, NoVariant
from tilekern.ops import registration, writing
from tilekern.ops.declaration import arrays_of, names_of
from tilekern.ops.registration import Rows
from tilekern.runtime import dispatch
from tilekern.runtime.plans import InterpretedPlan
from tilekern.spec import Config

every_op = pytest.mark.parametrize("op", SHIPPED.values(), ids=SHIPPED)
# A layer of experts calls other ops between its launches; its own tests say what it launches.
ALONE = {name: op for name, op in SHIPPED.items() if name != "experts"}
every_op_alone = pytest.mark.parametrize("op", ALONE.values(), ids=ALONE)


class Recorded:
    """A plan whose launches are noted."""

    # decode_attention has two pairs of a sequence and a key head, and splits the keys of neither.
    blocks, config = 2, Config(implementation="kernels", chunk=128, splits=1)

    def __init__(self):
        self.launches = []

    def launch(self, _, *arguments):
        self.launches.append(arguments)

    def run(self, _, inputs, allocate):
        self.launches.append(inputs)
        return allocate() or tuple(torch.empty_like(x) for x in inputs[:3])


class Refusing(Recorded):
    """A plan whose kernel has no variant that allows any arguments."""

    def launch(self, *_):
        raise NoVariant("kernel: none of the variants aligned, generic allows the arguments")

    def run(self, *_):
        self.launch()


class OnGpu:
    """An op's functions as they run on a GPU, with one plan for everything, and notes of what was looked up."""

    def __init__(self, op, monkeypatch):
        self.op, self.names, self.plan, self.searches, self.checks = op, names_of(op), Recorded(), [], []
        exec(compile(writing.text_of(op).replace(".is_cuda", ".is_cpu"), op.name, "exec"), self.names)
        if op.gradients:
            self.names["apply"] = self.names[op.title].apply
        self.names["plan_for"] = lambda *_: self.plan
        monkeypatch.setattr(registration, "plan_for", lambda *_: self.plan)
        for part in op.overrides.values():
            if "plan_for" in part.__globals__:
                monkeypatch.setitem(part.__globals__, "plan_for", lambda *_: self.plan)
        for name, notes in (("find", self.searches), ("check", self.checks)):
            self.names[name] = self._noted(self.names[name], notes)

    @staticmethod
    def _noted(function, notes):
        return lambda *given: (notes.append(given), function(*given))[1]

    def __call__(self, given):
        results = self.names[self.op.name](**given, **scalars_of(self.op))
        return results if isinstance(results, tuple) else (results,)


@pytest.fixture
def on_gpu(op, monkeypatch):
    """The op on a GPU whose plans run nothing."""
    return OnGpu(op, monkeypatch)


def graded(op, given, *frozen):
    """Copies of tensors, of which those that can have a gradient need one unless they are frozen."""
    return {name: x.clone().requires_grad_(name in op.gradients and name not in frozen) for name, x in given.items()}


@every_op_alone
def test_plans_are_looked_up_and_tensors_checked_once_for_each_kind_of_call(op, on_gpu):
    given = tensors_of(op)
    for calls in range(1, 4):
        on_gpu(given)
        assert (len(on_gpu.searches), len(on_gpu.checks), len(on_gpu.plan.launches)) == (1, 1, calls)
    kinds = 2 if op.gradients else 1
    for _ in range(2):
        on_gpu(graded(op, given))
        assert (len(on_gpu.searches), len(on_gpu.checks)) == (kinds, kinds), "with gradients"
    with torch.no_grad():
        on_gpu(graded(op, given))
    assert (len(on_gpu.searches), len(on_gpu.checks)) == (kinds, kinds), "and without"


@pytest.fixture
def counted(monkeypatch):
    """Counters and warnings of this test's own."""
    monkeypatch.setattr(dispatch._state, "counters", {})
    yield dispatch.stats
    dispatch.set_miss_policy(None)


@every_op_alone
def test_where_no_variant_allows_the_arguments_torch_does_the_work(op, on_gpu, counted):
    given = tensors_of(op)
    on_gpu.plan = Refusing()
    with pytest.warns(RuntimeWarning, match="none of the variants .*; the model's own op runs"):
        results = on_gpu(given)
    wanted = op.formula(**given, **scalars_of(op))
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for mine, theirs in zip(results, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    assert counted()[op.forward.name]["fallbacks"] == 1
    dispatch.set_miss_policy("error")
    with pytest.raises(CacheMiss, match="none of the variants"):
        on_gpu(given)


@pytest.mark.parametrize("op", [op for op in ALONE.values() if op.backward is not None], ids=lambda op: op.name)
def test_where_no_variant_allows_a_backward_s_arguments_torch_makes_the_gradients(op, counted, monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    given = graded(op, tensors_of(op))
    leaves = [x for x in given.values() if x.requires_grad]
    called = names_of(op) | {"known": {}}
    exec(compile(writing.text_of(op), op.name, "exec"), called)
    called["apply"] = called[op.title].apply
    results, wanted = called[op.name](**given, **scalars_of(op)), op.formula(**given, **scalars_of(op))
    results, wanted = (x if isinstance(x, tuple) else (x,) for x in (results, wanted))
    slopes = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) for y in wanted]
    monkeypatch.setattr(InterpretedPlan, "launch", Refusing().launch)
    with pytest.warns(RuntimeWarning, match="none of the variants .*; the model's own op runs"):
        gradients = torch.autograd.grad(results, leaves, slopes)
    for mine, theirs in zip(gradients, torch.autograd.grad(wanted, leaves, slopes), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    # A formula may call other ops, whose gradients are refused too.
    assert counted()[op.backward.name]["fallbacks"] >= 1


class Elsewhere(torch.Tensor):
    """A tensor that says it is on the second GPU."""

    def get_device(self):
        return 1


@every_op
def test_what_differs_from_a_known_call_in_any_tensor_is_checked_again(op, on_gpu):
    on_gpu.names["find"], on_gpu.names["check"] = lambda *_: (), lambda *given: on_gpu.checks.append(given)
    given = tensors_of(op) | scalars_of(op)
    calls = [given]
    for name in op.tensors:
        x = given[name]
        others = [x.unsqueeze(0), x.to(torch.float64), x.as_subclass(Elsewhere)]
        calls += [given | {name: other} for other in (*others, *([None] if name in op.optional else []))]
    for number, call in enumerate(calls, 1):
        for _ in range(2):
            on_gpu.names["plans_of"](False, *(call[name] for name in op.arguments))
        assert len(on_gpu.checks) == number


def memory(arguments):
    """Return the addresses of a launch's tensors."""
    tensors = [getattr(x, "tensor", x) for x in arguments]
    return {x.data_ptr() for x in tensors if isinstance(x, torch.Tensor)}


@every_op_alone
def test_what_a_kernel_can_read_as_it_is_is_not_copied(op, on_gpu):
    given = graded(op, tensors_of(op))
    results = on_gpu(given)
    taken = {name: x for name, x in given.items() if x.dtype != torch.int64}  # labels, which kernels take as int32
    assert memory(on_gpu.plan.launches[0]) >= {x.data_ptr() for x in taken.values()}
    if not op.gradients:
        return
    slopes = [torch.randn_like(y) for y in results]
    torch.autograd.grad(results, [given[name] for name in op.gradients], slopes)
    known = given | dict(zip(op.slopes, slopes, strict=True)) | dict(zip(op.shown, results, strict=True))
    if op.backward is None:
        return  # the gradients are the formula's
    read = [array.name for array in arrays_of(op.backward, "input")] or [
        name for name in op.tensors[:2] if name in op.saved
    ]
    launched = memory(x for launch in on_gpu.plan.launches[1:] for x in launch)
    assert launched >= {known[name].data_ptr() for name in read if name in taken or name not in given}


OF_ROWS = [op for op in WITH_ARRAYS if "rows" in op.inputs[op.tensors[0]].shape and op.name != "sample"]


@pytest.mark.parametrize("op", OF_ROWS, ids=lambda op: op.name)
@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (1, 2, 3)], ids=str)
def test_rows_are_seen_without_a_view(op, on_gpu, leading):
    """And what has gaps is copied, or seen as it is where rows are at one distance."""
    sizes = {"rows": leading, "columns": (16,)}
    given = {x.name: torch.randn(sum((sizes.get(size, (16,)) for size in x.shape), ())) for x in op.inputs.values()}
    results = on_gpu(given)
    for y, array in zip(results, op.outputs.values(), strict=True):
        assert y.shape == (*leading, 16)[: len(leading) + len(array.shape) - 1]
        assert y._base is None
    arrays = [x for x in on_gpu.plan.launches[0] if not isinstance(x, float)]
    flat = len(leading) == 1
    count = torch.Size(leading).numel()
    for x, array in zip(arrays, arrays_of(op.forward, "input", "output"), strict=True):
        if array.shape[0] == "rows":
            assert isinstance(x, Rows) != flat
            shape = x.shape if flat else x.__cuda_array_interface__["shape"]
            assert tuple(shape) == (count, 16)[: len(array.shape)]
    assert memory(arrays) >= {x.data_ptr() for x in (*given.values(), *results)}
    on_gpu({name: laid_out(x, "spread") for name, x in given.items()})
    assert all(x.stride()[-1] == 1 for x in on_gpu.plan.launches[1] if isinstance(x, torch.Tensor))


class Counted(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def cost_of_the_backward(op, on_gpu, *frozen):
    """Launches, and operations of torch's, of a backward in which some tensors need no gradient."""
    given = graded(op, tensors_of(op), *frozen)
    results, before = on_gpu(given), len(on_gpu.plan.launches)
    with Counted() as counted:
        slopes = [torch.ones_like(y) for y in results]
        torch.autograd.grad(results, [x for x in given.values() if x.requires_grad], slopes)
    return len(on_gpu.plan.launches) - before, counted.count


# Gradients that no kernel makes together with others: sums for vectors, and those that have plans of their own.
APART = {
    f"{op.name} {' '.join(names)}": (op, names)
    for op in ALONE.values()
    for names in (
        tuple(name for name in op.gradients if len(op.inputs[name].shape) == 1), *((name,) for name in op.apart)
    )
    if names
}  # fmt: skip


@pytest.mark.parametrize(("op", "names"), APART.values(), ids=APART)
def test_a_gradient_that_nobody_asks_for_is_not_computed(op, names, on_gpu):
    launches, operations = cost_of_the_backward(op, on_gpu, *names)
    all_launches, all_operations = cost_of_the_backward(op, on_gpu)
    assert launches <= all_launches
    assert operations < all_operations
