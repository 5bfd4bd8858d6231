"""Cases on the CPU: torch's formulas equal the specs' references, and a wrong provider is caught before it is timed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases import METRICS, rms_norm_case, rope_case, small_cases, swiglu_case, training_cases
from benchmarks.formulas import rms_norm, rope, swiglu
from benchmarks.kernels import check, clone, entrant, rows_of
from benchmarks.kernels import right_ones as right
from benchmarks.providers import LOADERS, OURS, Provider, load, one_line
from tilekern.errors import InputError
from tuning.timing import Timing

TINY = [
    rms_norm_case(5, 24, "float32"),
    rms_norm_case(9, 64, "bfloat16"),
    swiglu_case(3, 40, "float32"),
    swiglu_case(7, 48, "bfloat16"),
    rope_case(2, 5, 3, 1, 16, "float32"),
    rope_case(1, 9, 4, 2, 32, "bfloat16"),
]
EAGER = Provider("torch 0", {"rms_norm": rms_norm, "swiglu": swiglu, "rope": rope})


@pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.label} {case.dtype}")
def test_torchs_formula_equals_the_specs_reference(case):
    tensors = case.tensors("cpu")
    check(case, tensors, case.expected(tensors), EAGER)


@pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.label} {case.dtype}")
def test_a_wrong_peer_is_noted_and_left_out(case):
    broken = {name: lambda *given: EAGER.calls[case.op](given[1], *given[1:]) for name in EAGER.calls}
    tensors, notes = case.tensors("cpu"), []
    assert right(case, tensors, [EAGER, Provider("broken 1", broken), Provider("lacks it", {})], notes) == [EAGER]
    assert len(notes) == 1
    assert "broken 1 left out" in notes[0]


def test_tilekern_being_wrong_is_fatal():
    case = swiglu_case(3, 40, "float32")
    tensors = case.tensors("cpu")
    with pytest.raises(AssertionError, match="tilekern is wrong"):
        right(case, tensors, [Provider(OURS, {"swiglu": lambda gate, up: gate * up})], [])


def test_arguments_keep_their_strides_and_start_anew():
    case = rope_case(2, 5, 3, 1, 16, "float32")
    tensors = case.tensors("cpu")
    mine = clone(tensors)
    assert [x.stride() for x in mine.inputs] == [x.stride() for x in tensors.inputs]
    assert tensors.inputs[0].stride() == (5 * 3 * 16, 16, 3 * 16, 1)
    assert all(x.requires_grad and x.is_leaf for x in mine.inputs)
    assert torch.equal(tensors.constants[0][..., :8], tensors.constants[0][..., 8:])


@pytest.mark.parametrize("metric", METRICS)
def test_an_entrant_gives_the_same_each_time_although_it_overwrites_its_arguments(metric):
    def overwriting(gate, up):
        out = swiglu(gate, up)
        gate.data.zero_()
        return out

    case = swiglu_case(3, 40, "float32")
    runner = entrant(case, case.tensors("cpu"), Provider("rude 1", {"swiglu": overwriting}), metric)
    found = []
    for _ in range(2):
        runner.prepare()
        found.append([x.detach().clone() for x in runner.run()])
    assert all(map(torch.equal, *found))


def test_bytes_are_the_specs():
    case = swiglu_case(8192, 12288)
    matrix = 8192 * 12288 * 2
    assert [case.bytes_of(metric) for metric in METRICS] == [3 * matrix, 5 * matrix, 8 * matrix]
    assert len({case.label for case in training_cases()}) == 7
    assert {case.op for case in small_cases()} == {"rms_norm", "swiglu", "rope"}


def test_rows_hold_times_and_shares_of_the_copy():
    rows = rows_of("a", "forward", {"tilekern": Timing(50.0, 1.0, 60), "copy": Timing(45.0, 0.5, 60)})
    assert [(row.provider, row.metric, row.value) for row in rows] == [
        ("tilekern", "forward", 50.0),
        ("tilekern", "forward_share_of_copy", 0.9),
        ("copy", "forward", 45.0),
    ]


def test_an_unknown_provider_is_named():
    with pytest.raises(InputError, match="nobody"):
        load(["nobody"], [])


def test_a_peer_that_is_not_there_is_noted(monkeypatch):
    def missing():
        raise ImportError("no module of that name\nreally")

    monkeypatch.setitem(LOADERS, "quack", missing)
    notes = []
    assert [provider.name.split()[0] for provider in load(["torch", "quack"], notes)] == ["torch"]
    assert notes == ["quack left out: ImportError: no module of that name really"]
    assert len(one_line(ValueError("x" * 1000))) == 300
