"""Counts in machine code, compared with nvdisasm and the compiler's own remarks."""

import importlib.util
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from environments import without_kept_cubins
from tuning_samples import needs_compiler

from tilekern.compile.cubin import code_of
from tilekern.compile.toolchain import compile_candidate
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, GENERIC
from tilekern.spec.targets import resolve
from tilekern.tuning.compile.machine_code import BRANCH, OPCODES, Counts, MachineCode, branch_target, read_machine_code

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
LDG, FADD, BRA, NOP = 0x981, 0x221, 0x947, 0x918


def made(name, arch, **config):
    spec, target = spec_named(name), resolve(arch)
    problem = {
        "fp8_matmul": {"rows": 4096, "inner": 4096, "columns": 4096, "dtype": "bfloat16"},
        "matmul": {"rows": 4096, "inner": 4096, "columns": 4096, "dtype": "bfloat16", "b_transposed": True},
        "rms_norm_forward": {"rows": 4096, "columns": 4096, "dtype": "bfloat16", "weight_dtype": "bfloat16"},
    }[name]
    flags = {d.name: False for d in spec.dimensions if d.kind == "flag"}
    problem = spec.problem(**flags | problem)
    return compile_candidate(spec, problem, spec.default(problem, target).but(**config), target, ALIGNED)


def instruction(opcode, *, cycles=1, releases=7, waits=0, width=4, word=0):
    """One instruction's two halves; ``releases`` 7 is none."""
    return opcode | word << 16, width << 9 | cycles << 41 | releases << 46 | waits << 52


def assembled(*instructions):
    return b"".join(struct.pack("<QQ", *pair) for pair in instructions)


def branch(words):
    """A branch of sm_90 by so many words of 4 bytes."""
    encoded = (words >> 8 & (1 << 48) - 1) << 34 | (words & 0xFF) << 16
    return BRA | encoded & (1 << 64) - 1, encoded >> 64 | 7 << 46


def test_loads_in_flight_together_are_waited_for_once():
    together = assembled(
        instruction(LDG, releases=0),
        instruction(LDG, releases=1),
        instruction(FADD, waits=1),
        instruction(FADD, waits=2),
    )
    in_turn = assembled(
        instruction(LDG, releases=0),
        instruction(FADD, waits=1),
        instruction(LDG, releases=0),
        instruction(FADD, waits=1),
    )
    assert read_machine_code(together, 90).whole.load_waits == 1
    assert read_machine_code(in_turn, 90).whole.load_waits == 2


def test_widths_cycles_and_padding():
    code = assembled(
        instruction(LDG, width=6, cycles=3),
        instruction(LDG, width=5),
        instruction(0x986, width=4),
        instruction(0x983),
        instruction(NOP),
    )
    found = read_machine_code(code, 90).whole
    assert (found.load_bytes, found.store_bytes, found.global_loads, found.global_stores) == (24, 4, 2, 1)
    assert (found.instructions, found.cycles, found.local_accesses) == (4, 7, 1)


def test_a_loop_with_traffic_is_separated_from_the_code_around_it():
    code = assembled(
        instruction(FADD), instruction(LDG, releases=0), instruction(FADD, waits=1), branch(-12), instruction(FADD)
    )
    found = read_machine_code(code, 90)
    assert [(loop.instructions, loop.global_loads, loop.load_waits) for loop in found.loops] == [(3, 1, 1)]
    assert found.whole.instructions == 5


def test_a_load_for_the_next_turn_of_a_loop_is_waited_for_in_it():
    code = assembled(instruction(FADD, waits=1), instruction(LDG, releases=0), branch(-12))
    found = read_machine_code(code, 90)
    assert (found.whole.load_waits, found.loops[0].load_waits) == (0, 1)


def test_a_loop_without_traffic_does_not_count():
    assert read_machine_code(assembled(instruction(FADD), branch(-8)), 90).loops == ()


def test_counts_add_up_and_are_kept_whole():
    one, other = Counts(instructions=3, cycles=5), Counts(instructions=4, barriers=1)
    assert Counts.total([one, other]) == Counts(instructions=7, cycles=5, barriers=1)
    code = MachineCode(one, (other, Counts()))
    assert MachineCode.from_dict(code.as_dict()) == code
    assert code.as_dict() == {
        "whole": {"instructions": 3, "cycles": 5},
        "loops": [{"instructions": 4, "barriers": 1}, {}],
    }


@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.share(2)
@pytest.mark.slow
def test_products_and_their_loop_are_found_on_every_architecture(arch):
    found = made("matmul", arch)
    code = read_machine_code(code_of(found.cubin, found.symbol), resolve(arch).capability)
    assert code.whole.products > 0
    assert any(loop.products for loop in code.loops)


@needs_compiler
def test_the_compiler_s_remarks_say_the_same_of_tma(tmp_path, monkeypatch):
    from tilekern.compile import cutile

    monkeypatch.setenv("PATH", without_kept_cubins())  # a cubin that was kept comes without remarks
    run = cutile._run

    def with_remarks(command, environment, timeout_s):
        options = ["--remark-format=yaml", "--remarks=all"]
        monkeypatch.chdir(tmp_path)
        return run([*command, *options], environment, timeout_s)

    monkeypatch.setattr(cutile, "_run", with_remarks)
    for tma in (True, False):
        found = made("rms_norm_forward", "sm_90", tma=tma)
        said = (tmp_path / "tileir_remarks.yaml").read_text()
        code = read_machine_code(code_of(found.cubin, found.symbol), 90)
        assert (code.whole.bulk_loads > 0) == ("TMA Load instruction" in said) == tma, said[:2000]
        assert (code.whole.global_loads > 0) == ("Global-memory load instruction" in said) == (not tma)


def disassembler():
    package = importlib.util.find_spec("nvidia")
    roots = package.submodule_search_locations if package else []
    tool = next((p for root in roots for p in Path(root).glob("cu*/bin/nvdisasm")), shutil.which("nvdisasm"))
    tool = os.environ.get("NVDISASM", tool)
    if tool is None:
        pytest.skip("nvdisasm is not installed")
    return tool


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["matmul", "rms_norm_forward", "fp8_matmul"])
@pytest.mark.nightly
def test_nvdisasm_reads_the_same_opcodes_and_branches(kernel, arch, tmp_path):
    if kernel == "fp8_matmul" and arch == "sm_80":
        pytest.skip("there are no 8-bit floats on sm_80")
    found = made(kernel, arch)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(found.cubin)
    text = subprocess.run([disassembler(), "-hex", "-c", path], capture_output=True, text=True, check=True).stdout
    names = {opcode: name for opcodes in OPCODES.values() for opcode, name in opcodes.items()}
    labels, branches, place, seen = {}, [], 0, set()
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = place
        if half := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*/\* 0x([0-9a-f]{16}) \*/", line):
            words, low = half[1].replace("{", "").split(), int(half[2], 16)
            name = words[1 if words[0].startswith("@") else 0].rstrip(";").split(".")[0]
            # They share an opcode.
            name = {"UTCQMMA": "UTCHMMA"}.get(name, name)
            place += 1
            if low & 0x1FF in names or name in names.values():
                assert names.get(low & 0x1FF) == name, line
                seen.add(name)
            if low & 0x1FF == BRANCH and (to := re.search(r"`\((\.L_\w+)\)", half[1])):
                branches.append((place - 1, low, to[1]))
        elif (high := re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/", line)) and branches and branches[-1][0] == place - 1:
            branches[-1] = (*branches[-1][:3], int(high[1], 16))
    assert seen
    assert branches
    for at, low, label, high in branches:
        assert branch_target(at, low, high, resolve(arch).capability) == labels[label]


@pytest.mark.nightly
@needs_compiler
def test_a_tile_that_registers_cannot_hold_shows_as_local_accesses():
    spec, target = spec_named("rms_norm_forward"), resolve("sm_90")
    problem = spec.problem(rows=64, columns=8192, dtype="float32", weight_dtype="float32")
    config = spec.generic(problem).but(passes=1, tile_n=8192, occupancy=8, num_worker_warps=4)
    spilling = compile_candidate(spec, problem, config, target, GENERIC)
    assert read_machine_code(code_of(spilling.cubin, spilling.symbol), 90).whole.local_accesses > 0
