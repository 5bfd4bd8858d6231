"""What the compiler makes of a kernel for a GPU that need not be here."""

import pytest
from spec_samples import resources_of

from tilekern.compile.cubin import code_of
from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.spec import ALIGNED
from tilekern.spec.targets import resolve
from tilekern.tuning.compile.machine_code import read_machine_code

# Opcodes of products of 8-bit floats by architecture.
FP8_PRODUCTS = {"sm_90": "QGMMA", "sm_100": "UTCHMMA", "sm_103": "UTCHMMA", "sm_120": "QMMA"}
needs_compiler = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")


def made_of(spec, problem, arch, variant=ALIGNED, **changes):
    """Compile the default or the generic config, and return its resources, machine code and opcodes."""
    target = resolve(arch)
    config = (spec.default(problem, target) if variant == ALIGNED else spec.generic(problem)).but(**changes)
    made = compile_candidate(spec, problem, config, target, variant)
    code = code_of(made.cubin, made.symbol)
    opcodes = [int.from_bytes(code[place : place + 2], "little") & 0x1FF for place in range(0, len(code), 16)]
    return resources_of(spec, problem, made, target), read_machine_code(code, target.capability), opcodes
