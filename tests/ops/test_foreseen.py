"""What a call asks for, known before it runs: as the call asks itself; hidden from its caller; and remembered."""

import itertools

import pytest
import torch

import tilekern
from tilekern.kernels.fp8.product import SPEC as PRODUCT
from tilekern.kernels.fp8.rows import SPEC as ROWS
from tilekern.ops import foreseen
from tilekern.ops.fp8_block_linear import fp8_block_linears
from tilekern.ops.fp8_gated_mlp import fp8_gated_mlp
from tilekern.ops.fp8_linear import fp8_linears
from tilekern.ops.mxfp8_linear import mxfp8_linears
from tilekern.runtime import dispatch
from tilekern.runtime.plans import Plan
from tilekern.spec.targets import resolve

SHAPES = {"x": (96, 128), "gate": (256, 128), "up": (256, 128), "down": (128, 256), "bias": (256,)}


def gated(x, gate, up, down, _):
    return fp8_gated_mlp(x, gate, up, down)


def linears(op):
    return lambda x, gate, up, _, bias: torch.cat(op(x, [(gate, bias), (up, None)]))


CALLS = {
    "rowwise": linears(fp8_linears), "gated": gated, "blockwise": linears(fp8_block_linears),
    "mxfp8": linears(mxfp8_linears),
}  # fmt: skip


def inputs(wanted, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    return [x.requires_grad_(name in wanted) for name, x in drawn.items()]


def asked_by_the_call(monkeypatch, call, given):
    """The kernels that a call and its backward ask plans for, on the CPU, where there are none."""
    found = []
    with monkeypatch.context() as patched:
        patched.setattr(foreseen, "plan_for", lambda spec, _, *sizes: found.append((spec, sizes)))
        y = call(*given)
        if y.requires_grad:
            y.backward(torch.ones_like(y))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_asks_for_what_was_foreseen(name, dtype, monkeypatch):
    for wanted in (set(chosen) for n in range(3) for chosen in itertools.combinations(("x", "gate", "down"), n)):
        given = inputs(wanted, dtype)
        before = foreseen.asked(CALLS[name], *given)
        assert before
        by_call = set(asked_by_the_call(monkeypatch, CALLS[name], given))
        assert set(before) == by_call, wanted
        # Hopper's torch has a call for products of these sizes with scales of rows, which other GPUs may refuse.
        others = {each for each in by_call if each[0] is not PRODUCT} if dtype == torch.bfloat16 else by_call
        for gpu, dispensed in (("H200", others), ("B200", by_call), ("RTX 5090", by_call)):
            assert set(foreseen.asked(CALLS[name], *given, target=resolve(gpu))) == dispensed, (gpu, wanted)


def test_the_caller_s_hooks_modes_and_gradients_see_nothing():
    given, seen = inputs({"x", "gate"}), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        foreseen.asked(CALLS["rowwise"], *given)
    assert not seen
    assert all(x.grad is None and x.is_leaf for x in given)
    with torch.no_grad():
        assert foreseen.asked(CALLS["rowwise"], *given) == foreseen.asked(CALLS["rowwise"], *inputs(set()))
        assert not torch.is_grad_enabled()


def test_plans_are_asked_for_once_until_they_are_forgotten(monkeypatch):
    given, found = inputs({"x", "gate"}), []

    def ask():
        return foreseen.have_plans("a test's call", CALLS["rowwise"], *given)

    monkeypatch.setattr(foreseen, "plan_for", lambda *problem: found.append(problem))
    assert not ask()
    count = len(found)
    assert count
    assert not ask()
    assert len(found) == count
    dispatch.forget()
    monkeypatch.setattr(foreseen, "plan_for", lambda *problem: found.append(problem) or problem)
    assert ask()
    assert len(found) == 2 * count
    given[0].requires_grad_(False)
    assert ask()
    assert len(found) > 2 * count, "another call"


def test_interpreted_kernels_are_plans_and_torch_s_operations_are_none(monkeypatch):
    for is_on in ("1", "0"):
        monkeypatch.setenv("TILEKERN_INTERPRET", is_on)
        dispatch.forget()
        assert foreseen.have_plans("rowwise", CALLS["rowwise"], *inputs({"x", "gate"})) == (is_on == "1")


def test_a_call_that_torch_has_is_no_miss_and_no_fallback(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    dispatch.forget()
    before, x = tilekern.stats().get(PRODUCT.name, {}), torch.zeros(16, 16)
    sizes = (16, 16, 16, False, False, False, torch.bfloat16)
    assert foreseen.written(PRODUCT, sizes, (x, x), lambda: (x,), lambda *_: lambda a, b: (a @ b,))[0] is not x
    after = tilekern.stats()[PRODUCT.name]
    assert {name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)} == {"launches": 1}


def test_a_plan_is_asked_for_once_on_a_gpu_until_plans_are_forgotten(monkeypatch):
    found, launched = [], []

    class Stub(Plan):
        def __init__(self):
            self.launches = 0

        def launch(self, device, *arrays):
            launched.append((device, *arrays))

    monkeypatch.setattr(foreseen, "plan_for", lambda spec, _, *sizes: found.append((spec.name, *sizes)) or Stub())
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    dispatch.forget()
    x, y, scale = torch.zeros(16, 16), torch.zeros(16, 16), torch.zeros(16)
    for _ in range(2):
        assert foreseen.launch(ROWS, (16, 16, x.dtype), x, y, scale)
        assert foreseen.written(ROWS, (16, 16, x.dtype), (x,), lambda: (y, scale)) == (y, scale)
    assert launched == [(0, x, y, scale)] * 4
    assert foreseen.launch(ROWS, (8, 16, x.dtype), x[:8], y, scale)
    dispatch.forget()
    assert foreseen.launch(ROWS, (16, 16, x.dtype), x, y, scale)
    assert found == [("fp8_rows", rows, 16, x.dtype) for rows in (16, 8, 16)]
    monkeypatch.setattr(foreseen, "plan_for", lambda *_: None)
    dispatch.forget()
    before = tilekern.stats()["fp8_rows"]["fallbacks"]
    assert not foreseen.launch(ROWS, (16, 16, x.dtype), x, y, scale)
    assert tilekern.stats()["fp8_rows"]["fallbacks"] == before + 1
