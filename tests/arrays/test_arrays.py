"""Launches on arrays without torch: real cubins of the wheel's packs, on a stub of the driver that reads them.

Every process here has tilekern's declared dependencies alone. The stub reads a launch's parameters by the sizes that
the cubin states, as the driver does, so a wrong layout gives wrong numbers. What no stub can tell is what a kernel
computes: tests/gpu/test_arrays_on_gpu.py does.
"""

import json
import re
import shutil
import struct
import textwrap
import tomllib

import pytest
from environments import ROOT, BarePython, stub_of_the_driver
from marks import needs_compiler

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("arrays"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="cc is not installed, which compiles the driver's stub"),
]
CLUSTER, DEPENDENT = "4", "6"
# Runs each piece of code in a fork, which has not touched the driver.
JOB = """
import json, os, sys
from tilekern import arrays
from tilekern.errors import TilekernError
from tilekern.kernels import all_specs, spec_named
from tilekern.runtime import dispatch, driver
from tilekern.spec.targets import resolve

def show(value):
    print(json.dumps(value), flush=True)

def error_of(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except (TilekernError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None

def record_of(plan):
    spec = spec_named(plan.kernel)
    return dispatch.find(spec, spec.bucketed(plan.problem), plan.device.target).record

def swiglu(rows=64, columns=12288, **more):
    return arrays.plan("swiglu_forward", rows=rows, columns=columns, dtype="bfloat16", **more)

def three(stream, rows=64, columns=12288):
    return [arrays.empty((rows, columns), "bfloat16", stream) for _ in range(3)]

all_specs()
for number, code in enumerate(sys.argv[2:]):
    child = os.fork()
    if not child:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[1]}/{name}.{number}", os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
        exec(code)
        assert "torch" not in sys.modules
        sys.exit()
    if os.waitpid(child, 0)[1]:
        sys.exit(open(f"{sys.argv[1]}/err.{number}").read())
"""
CASES = {}


def case(name, code):
    """Register a piece of code; return its name."""
    CASES[name] = textwrap.dedent(code)
    return name


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return BarePython(tmp_path_factory.mktemp("bare"), project["dependencies"])


@pytest.fixture(scope="module")
def ran(bare, tmp_path_factory):
    """By the names of cases, what the code showed, the launches, and other calls of the driver."""
    folder = tmp_path_factory.mktemp("driver")
    variables = {"TILEKERN_CACHE_DIR": str(folder / "cache"), "STUB_WITHOUT_CONTEXT": "1", "STUB_GPUS": "2"}
    job = bare.run("-c", JOB, folder, *CASES.values(), **stub_of_the_driver(folder), **variables)
    assert job.returncode == 0, job.stderr

    def outcome(number, name):
        lines = (folder / f"out.{number}").read_text().splitlines()
        shown = lines if name == PAGE else [json.loads(line) for line in lines]
        calls = [json.loads(line) for line in (folder / f"err.{number}").read_text().splitlines() if line[0] == "{"]
        return shown, [one for one in calls if "grid" in one], [one for one in calls if "call" in one]

    return {name: outcome(number, name) for number, name in enumerate(CASES)}


def parameters_of(*arguments):
    """The parameters of a launch by the convention of cuTile's cubins: of an array its address, sizes and strides."""
    found = []
    for one in arguments:
        if isinstance(one, float):
            found.append([4, struct.unpack("<I", struct.pack("<f", one))[0]])
        else:
            address, shape, strides = one
            found += [[8, address], *([4, size] for size in (*shape, *strides))]
    return found


LAUNCH = case("launch", """
    stream = arrays.device(0).stream()
    plan, given = swiglu(), three(stream)
    plan.launch(stream, *given)
    plan.launch(stream.handle, *given)
    record = record_of(plan)
    show([[a.address for a in given], plan.blocks, stream.handle, record.artifacts["aligned"].symbol])
    show([dict(plan.config) == record.config, str(plan), dispatch.stats()["swiglu_forward"]])
    for rows, problem in ((64, plan.problem), (3, swiglu(rows=3).problem)):
        spec = spec_named("swiglu_forward")
        show(dispatch.find(spec, spec.bucketed(problem), plan.device.target).exact_bucket)
    show(dispatch.stats()["swiglu_forward"])
    """)  # fmt: skip


def test_a_launch_gives_the_kernel_of_the_record_its_arrays(ran):
    shown, launches, _ = ran[LAUNCH]
    (addresses, blocks, handle, symbol), (is_winner, words, counts), *is_exact, after = shown
    assert len(launches) == 2
    for one in launches:
        assert (one["cubin"], one["kernel"]) == ("ELF", symbol)
        assert (one["grid"], one["stream"], one["device"], one["attributes"]) == (blocks, handle, 0, {})
        assert one["parameters"] == parameters_of(*((address, (64, 12288), (12288, 1)) for address in addresses))
    assert is_winner
    shape = "bfloat16[64, 12288]"
    assert words == f"swiglu_forward(gate {shape}, up {shape}, y {shape}) on GPU 0"
    nearest = [not one for one in is_exact]
    none = {"misses": 0, "substitutes": 0, "fallbacks": 0, "compiled": 0, "launches": 2}
    assert counts == {"hits": 1, "nearest": nearest[0]} | none
    assert after == {"hits": 2, "nearest": sum(nearest)} | none


VARIANTS = case("variants", """
    stream = arrays.device(0).stream()
    plan, (gate, up, y) = swiglu(), three(stream, columns=12290)
    moved = gate.view((64, 12288), (12290, 1), offset=1)
    up, y = (x.view((64, 12288), (12290, 1)) for x in (up, y))
    plan.launch(stream, moved, up, y)
    artifacts = record_of(plan).artifacts
    show([gate.address, moved.address, up.address, y.address, artifacts["generic"].symbol])
    """)  # fmt: skip


def test_rows_apart_at_an_odd_address_run_the_generic_variant(ran):
    ((start, *addresses, symbol),), (launch,), _ = ran[VARIANTS]
    assert addresses[0] == start + 2
    assert launch["kernel"] == symbol
    assert launch["parameters"] == parameters_of(*((address, (64, 12288), (12290, 1)) for address in addresses))


SCALAR = case("scalar", """
    stream = arrays.device(0).stream()
    plan = arrays.plan("rms_norm_forward", rows=4096, columns=4096, dtype="bfloat16", weight_dtype="bfloat16")
    x, weight = arrays.empty((4096, 4096), "bfloat16", stream), arrays.empty((4096,), "bfloat16", stream)
    y = plan.outputs(stream)["y"]
    plan.launch(stream, x, weight, y, 1e-6)
    show([x.address, weight.address, y.address])
    """)  # fmt: skip


def test_a_scalar_is_a_float_of_32_bits(ran):
    ((x, weight, y),), (launch,), _ = ran[SCALAR]
    matrix = ((4096, 4096), (4096, 1))
    assert launch["parameters"] == parameters_of((x, *matrix), (weight, (4096,), (1,)), (y, *matrix), 1e-6)


ATTRIBUTES = case("attributes", """
    # Plans of each kind, whose arrays are made by what they say of their parameters.
    from tilekern.spec import ScalarParameter

    stream = arrays.device(0).stream()
    norm = dict(columns=4096, dtype="bfloat16", weight_dtype="bfloat16")
    head = dict(rows=4096, vocabulary=32768, dtype="bfloat16")
    for kernel, sizes in (("fused_add_rms_norm_forward", dict(rows=4096, **norm)),
                          ("rms_norm_backward", dict(rows=4096, **norm)), ("cross_entropy_fused", head)):
        plan = arrays.plan(kernel, **sizes)
        given = []
        for parameter, shape in zip(plan.parameters, plan._shapes):
            scalar = isinstance(parameter, ScalarParameter)
            dtype = parameter.dtype
            given.append((1.0 if dtype == "float32" else 1) if scalar else arrays.empty(shape, dtype, stream))
        plan.launch(stream, *given)
        launch = record_of(plan).artifacts["aligned"].launch
        said = launch and [list(launch.block), launch.cluster, launch.shared_bytes]
        show([plan.blocks, said, spec_named(kernel).device(plan.problem, plan.config).dependent])
    """)  # fmt: skip


def test_block_cluster_shared_memory_and_dependence_are_those_of_the_record(ran):
    """The wheel's records have them all; kernels of cuTile state their blocks, those of CuTe DSL are given theirs."""
    shown, launches, _ = ran[ATTRIBUTES]
    assert len(launches) == len(shown) == 3
    for (blocks, said, is_dependent), launch in zip(shown, launches, strict=True):
        block, cluster, shared = said or [launch["block"], 1, 0]
        expected = ({CLUSTER: cluster} if cluster > 1 else {}) | ({DEPENDENT: 1} if is_dependent else {})
        assert launch["attributes"] == expected
        assert (launch["grid"], launch["block"], launch["shared"]) == (blocks, block, shared)
        assert launch["allowed"] >= shared
    assert any(is_dependent for _, _, is_dependent in shown)
    assert any(said is not None for _, said, _ in shown)


BEST_KERNEL = case("best kernel", """
    plan = arrays.plan("matmul", rows=4096, inner=4096, columns=4096, b_transposed=True, dtype="bfloat16")
    record = record_of(plan)
    show([record.config["implementation"], dict(plan.config) == record.best_kernel.config])
    stream = arrays.device(0).stream()
    a, b = (arrays.empty((4096, 4096), "bfloat16", stream) for _ in range(2))
    plan.launch(stream, a, b, *plan.outputs(stream).values())
    """)  # fmt: skip


def test_where_a_library_won_the_best_kernel_runs(ran):
    shown, launches, _ = ran[BEST_KERNEL]
    assert shown == [["cublas", True]]
    assert len(launches) == 1


MEMORY = case("memory", """
    gpu = arrays.device(0)
    stream, other = gpu.stream(), gpu.stream()
    a = arrays.empty((3, 5), "float32", stream)
    a.write(bytes(range(60)))
    show([a.read() == bytes(range(60)), gpu.pooled_bytes()])
    address = a.address
    view = a.view((5,), offset=5)
    del a
    show([gpu.pooled_bytes(), view.address - address])
    del view
    show([gpu.pooled_bytes(), arrays.empty((60,), "uint8", other).address != address])
    b = arrays.empty((4, 4), "float32", stream)
    show(b.address == address)
    b.fill(7)
    show(b.read() == bytes([7] * 64))
    part = b.view((2, 4), offset=4)
    part.write(bytes(range(32)))
    show(b.read() == bytes([7] * 16 + [*range(32)] + [7] * 16) and part.read() == bytes(range(32)))
    show([error_of(b.write, b"short"), error_of(b.view, (4, 5)), error_of(b.view((4, 2), (4, 1)).read)])
    show([error_of(arrays.empty, (2,), "float64", stream), error_of(arrays.empty, (-2,), "float32", stream)])
    empty = arrays.empty((0, 4), "int64", stream)
    show([empty.read() == b"", error_of(empty.fill)])
    del b, empty, part
    gpu.trim()
    show(gpu.pooled_bytes())
    """)  # fmt: skip


def test_memory_returns_to_the_pool_and_serves_the_same_stream_again(ran):
    shown, _, calls = ran[MEMORY]
    assert shown[:6] == [[True, 0], [0, 20], [512, True], True, True, True]
    short, outside, part = shown[6]
    assert short == "ValueError: the data has 5 bytes, and the array 64"
    assert outside.startswith("InputError: a view of shape (4, 5) and strides (5, 1) from element 0 on ends after the")
    assert part == "InputError: only contiguous elements are copied and filled; these have the strides (4, 1)"
    for text in shown[7]:
        assert text.endswith("known dtypes: bfloat16, float16, float32, int8, int32, int64, uint8")
    assert shown[8:] == [[True, None], 0]
    taken = [one["bytes"] for one in calls if one["call"] == "alloc"]
    assert taken == [512, 512, 512]
    assert [one["bytes"] for one in calls if one["call"] == "free"] == taken


CIRCLE = case("circle", """
    import gc

    gpu = arrays.device(0)

    class Owner:
        pass

    gc.disable()
    for _ in range(2):
        owner = Owner()
        owner.stream = gpu.stream()
        owner.arrays = [arrays.empty((5,), "float32", owner.stream) for _ in range(3)]
        # Garbage whose parts end in any order: here the stream first.
        owner.stream.__del__()
        del owner.arrays, owner
    show(gpu.pooled_bytes())
    """)  # fmt: skip


def test_memory_that_outlives_its_stream_returns_to_the_driver(ran):
    shown, _, calls = ran[CIRCLE]
    assert shown == [0]
    sizes = [[one["bytes"] for one in calls if one["call"] == call] for call in ("alloc", "free")]
    assert sizes[0] == sizes[1] == [512] * 6


FULL = case("full", """
    os.environ["STUB_MEMORY"] = str(10 << 20)
    gpu = arrays.device(0)
    stream = gpu.stream()
    arrays.empty((6 << 20,), "uint8", stream)
    show([gpu.pooled_bytes() >> 20, arrays.empty((10 << 20,), "uint8", stream).shape, gpu.free_bytes()])
    show(error_of(arrays.empty, (11 << 20,), "uint8", stream))
    """)  # fmt: skip


def test_the_pool_gives_memory_back_before_there_is_none(ran):
    shown, _, calls = ran[FULL]
    assert shown[0] == [6, [10 << 20], 0]
    name = "the CUDA driver's cuMemAlloc_v2 failed with error 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory"
    assert shown[1] == f"DriverError: {name}"
    assert [one["call"] for one in calls if one["call"] in ("alloc", "free")] == ["alloc", "free", "alloc", "free"]


GRAPH = case("graph", """
    import gc

    gpu = arrays.device(0)
    stream = gpu.stream()
    plan, given = swiglu(), three(stream)
    inside = []

    def body():
        middle = arrays.empty((64, 12288), "bfloat16", stream)
        inside.append(middle.address)
        plan.launch(stream, *given[:2], middle)
        del middle
        plan.launch(stream, *given[:2], given[2])
        inside.append(arrays.empty((64, 12288), "bfloat16", stream).address)

    def broken():
        arrays.empty((64, 12288), "bfloat16", stream)
        raise ValueError("in the middle")

    graph = stream.capture(body)
    graph.launch(stream)
    graph.launch(stream)
    show([gpu.pooled_bytes(), arrays.empty((64, 12288), "bfloat16", stream).address != inside[0] == inside[1]])
    show([error_of(stream.capture, broken), error_of(stream.capture, lambda: stream.capture(body))])
    show(error_of(stream.capture, lambda: plan.launch(stream, *given)))
    before = gpu.pooled_bytes()
    del graph
    show(gpu.pooled_bytes() - before)
    first = stream.record()
    other = gpu.stream()
    other.wait(first)
    show(stream.record().ms_since(first))
    """)  # fmt: skip


def test_a_graph_repeats_what_was_captured_and_owns_its_memory(ran):
    shown, _, calls = ran[GRAPH]
    assert [one["nodes"] for one in calls if one["call"] == "graph"] == [2, 2]
    assert shown[0] == [0, True]
    again = "CannotRun: this stream is being captured already; end that capture first"
    assert shown[1] == ["ValueError: in the middle", again]
    assert shown[2] is None, "a capture that failed does not hinder the next"
    assert shown[3:] == [2 << 20, 1.5]


DEVICES = case("devices", """
    import ctypes

    first, second = arrays.device(0), arrays.device(1)
    one, two = first.stream(), second.stream()
    plan, here, there = swiglu(device=1), three(one), three(two)
    show([error_of(plan.launch, two, here[0], *there[1:]), error_of(plan.launch, one, *there)])
    plan.launch(two, *there)
    show(first.is_current)
    swiglu(device=first).launch(one, *here)
    show([first.is_current, error_of(arrays.device, 2)])
    """)  # fmt: skip


def test_each_gpu_has_its_context_and_its_arrays(ran):
    shown, launches, _ = ran[DEVICES]
    where, whose = shown[0]
    assert where == "InputError: swiglu_forward: gate is on GPU 0, and the plan is for GPU 1"
    assert whose == "InputError: swiglu_forward: the stream is of GPU 0, and the plan is for GPU 1"
    assert [one["device"] for one in launches] == [1, 0]
    assert shown[1:] == [True, [True, "CannotRun: there is no GPU 2: the driver gives 2, counted from 0"]]


FOREIGN = case("foreign", """
    class Other:
        '''An array of another library.'''

        def __init__(self, array, **changes):
            self.keeps = array
            self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **changes}

    class Theirs:
        '''A stream of another library.'''

    stream = arrays.device(0).stream()
    plan, (gate, up, y) = swiglu(), three(stream)
    plan.launch(stream, Other(gate, strides=None), up, Other(y))
    show([x.address for x in (gate, up, y)])
    for name in ("cuda_stream", "ptr"):
        theirs = Theirs()
        setattr(theirs, name, stream.handle)
        plan.launch(theirs, gate, up, y)
    Theirs.__cuda_stream__ = lambda self: (0, stream.handle)
    plan.launch(Theirs(), gate, up, y)
    show([stream.handle, dispatch.stats()["swiglu_forward"]["launches"]])
    host = (12345 << 12, False)
    faults = [
        (Other(gate, typestr="<f8"), up, y), (Other(gate, data=host), up, y),
        (gate, up, Other(y, data=(y.address, True))),
        (Other(gate, strides=(24576, 3)), up, y), (gate, 1.0, y), (gate, up),
        (arrays.empty((64, 12288), "float16", stream), up, y), (arrays.empty((65, 12288), "bfloat16", stream), up, y),
        (arrays.empty((64 * 12288,), "bfloat16", stream), up, y), (Other(gate, strides=(-24576, 2)), up, y),
    ]
    show([error_of(plan.launch, stream, *given) for given in faults])
    show([error_of(plan.launch, None, gate, up, y), dispatch.stats()["swiglu_forward"]["launches"]])
    norm = arrays.plan("rms_norm_forward", rows=64, columns=4096, dtype="bfloat16", weight_dtype="bfloat16")
    x, weight = arrays.empty((64, 4096), "bfloat16", stream), arrays.empty((4096,), "bfloat16", stream)
    show([error_of(norm.launch, stream, x, weight, x, eps) for eps in (True, "1e-6", weight, 1)])
    """)  # fmt: skip


def test_arrays_and_streams_of_other_libraries_are_taken_and_what_does_not_fit_is_one_line(ran):
    shown, launches, _ = ran[FOREIGN]
    expected = parameters_of(*((address, (64, 12288), (12288, 1)) for address in shown[0]))
    assert all(one["parameters"] == expected for one in launches[:4])
    handle, count = shown[1]
    assert [one["stream"] for one in launches[:4]] == [handle] * 4
    assert count == 4
    dtypes = "kernels take bfloat16, float16, float32, int8, int32, int64, uint8"
    said = "swiglu_forward(gate bfloat16[64, 12288], up bfloat16[64, 12288], y bfloat16[64, 12288]) on GPU 0"
    problem = "rows=64,columns=12288,dtype=bfloat16"
    neither = "it has neither __cuda_array_interface__ nor DLPack"
    lines = (
        f"gate has elements of type '<f8'; {dtypes}",
        "gate is not in the memory of a GPU; copy it there first",
        "y is read-only, and the kernel writes it",
        "gate has strides of (24576, 3) bytes, which are not whole elements of bfloat16",
        f"up is of type builtins.float, not an array on a GPU: {neither}",
        f"{said} takes 3 arguments, got 2",
        "gate is float16, and must be bfloat16",
        f"gate has the shape [65, 12288], and must have [64, 12288] for {problem}",
        f"gate has the shape [786432], and must have [64, 12288] for {problem}",
        "gate has the strides [-12288, 1], and kernels take no negative ones",
    )
    for got, line in zip(shown[2], lines, strict=True):
        assert got in (f"InputError: swiglu_forward: {line}", f"InputError: {line}")
    assert shown[3] == ["InputError: swiglu_forward: launch takes a stream first, got NoneType", 4]
    number = "InputError: rms_norm_forward: eps"
    assert shown[4] == [
        f"{number} must be a number of Python, got bool", f"{number} must be a number of Python, got str",
        f"{number} is an array, and must be a number of Python", None,
    ]  # fmt: skip


CAPSULES = """
import ctypes, struct, threading

api = ctypes.pythonapi
api.PyCapsule_GetName.restype = ctypes.c_char_p
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetName.argtypes = (ctypes.py_object,)
api.PyCapsule_GetPointer.argtypes = api.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)
USED = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}
delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

class Consumed:
    '''What a consumer reads of a capsule, by the layout in dlpack.h.'''

    def __init__(self, capsule):
        name = api.PyCapsule_GetName(capsule)
        self.name, self.pointer = name.decode(), api.PyCapsule_GetPointer(capsule, name)
        api.PyCapsule_SetName(capsule, USED[name])
        head, tail = ("IIPPQ", "") if name.endswith(b"versioned") else ("", "PP")
        layout = f"@{head}PiiiBBHPPQ{tail}"
        all = struct.unpack(layout, ctypes.string_at(self.pointer, struct.calcsize(layout)))
        self.head, all = all[: len(head)], all[len(head) :]
        self.address, self.device, ndim, self.dtype = all[0], all[1:3], all[3], all[4:7]
        self.shape, self.strides = (struct.unpack(f"@{ndim}q", ctypes.string_at(at, ndim * 8)) for at in all[7:9])
        self.offset, self.deleter = all[9], self.head[3] if head else all[11]

    def free(self):
        delete(self.deleter)(self.pointer)

"""
LENT = case("lent", CAPSULES + textwrap.dedent("""
    stream = arrays.device(1).stream()
    for dtype in ("bfloat16", "float16", "float32", "int8", "int32", "int64", "uint8"):
        whole = arrays.empty((4, 6), dtype, stream)
        for array in (whole, whole.view((3, 2), (6, 1), offset=7), whole.view((), (), offset=3), whole.view((4, 0))):
            for version in (None, (0, 8), (1, 0), (1, 3)):
                seen = Consumed(array.__dlpack__(stream=-1, max_version=version))
                assert seen.name == ("dltensor_versioned" if version and version[0] else "dltensor")
                assert seen.head in ((), (1, 0, 0, seen.deleter, 0))
                assert (seen.address, seen.offset) == (array.address, 0)
                assert (seen.shape, seen.strides) == (array.shape, array.strides)
                assert seen.device == array.__dlpack_device__() == (2, 1)
                seen.free()
        show([dtype, seen.dtype])
    """))  # fmt: skip


def test_a_capsule_says_what_the_array_is(ran):
    codes = {"bfloat16": (4, 16), "float16": (2, 16), "float32": (2, 32), "int8": (0, 8), "int32": (0, 32)}
    codes |= {"int64": (0, 64), "uint8": (1, 8)}
    assert ran[LENT][0] == [[dtype, [code, bits, 1]] for dtype, (code, bits) in codes.items()]


LIVES = case("lives", CAPSULES + textwrap.dedent("""
    gpu = arrays.device(0)
    stream = gpu.stream()

    def pooled():
        return gpu.pooled_bytes() // 512

    def four():
        return arrays.empty((4,), "float32", stream)

    # Two consumers, the last of which is freed in a thread.
    for version in (None, (1, 0)):
        array = four()
        address, before = array.address, pooled()
        first, last = (Consumed(array.__dlpack__(stream=-1, max_version=version)) for _ in range(2))
        del array
        first.free()
        show([pooled() - before, four().address != address])
        kept = pooled()
        thread = threading.Thread(target=last.free)
        thread.start()
        thread.join()
        show(pooled() - kept)
    # Freed before the array.
    array = four()
    before = pooled()
    Consumed(array.__dlpack__(stream=-1)).free()
    array.write(bytes(range(16)))
    show([pooled() - before, array.read() == bytes(range(16))])
    # Never consumed: kept as long as the capsule.
    capsule = array.__dlpack__(stream=-1)
    del array
    held = pooled() - before
    del capsule
    show([held, pooled() - before])
    # A consumer may keep the capsule, or drop it long before the array.
    for drops in (False, True):
        capsule = four().__dlpack__(stream=-1)
        before = pooled()
        seen = Consumed(capsule)
        if drops:
            del capsule
        held = pooled() - before
        seen.free()
        show([held, pooled() - before, len(gpu._loans)])
    # The next array takes the memory, although nobody asked how much there is.
    for _ in range(3):
        Consumed(arrays.empty((5 << 20,), "uint8", stream).__dlpack__(stream=-1)).free()
    """))  # fmt: skip


def test_memory_lives_as_long_as_its_consumer_and_returns_to_the_pool(ran):
    shown, _, calls = ran[LIVES]
    assert shown[:4] == [[0, True], 1] * 2
    assert shown[4:] == [[0, True], [0, 1], [0, 1, 0], [0, 1, 0]]
    assert [one["bytes"] >> 20 for one in calls if one["call"] == "alloc" and one["bytes"] > 512] == [6]


ORDERED = case("ordered", """
    gpu = arrays.device(0)
    stream, other, ended = gpu.stream(), gpu.stream(), gpu.stream()
    handle = ended.handle
    del ended

    def part(name):
        print(json.dumps({"call": "part", "name": name}), file=sys.stderr, flush=True)

    def refusal(**options):
        try:
            array.__dlpack__(**options)
        except (BufferError, TilekernError) as error:
            return f"{type(error).__name__}: {error}"

    show([stream.handle, other.handle])
    array = arrays.empty((4,), "float32", stream)
    for consumer in (None, 1, 2, other.handle, stream.handle, -1):
        part(f"export {consumer}")
        array.__dlpack__(stream=consumer)
    part("refused")
    show([refusal(stream=bad) for bad in (0, -2, True, "1", handle)])
    show([refusal(copy=True), refusal(dl_device=(1, 0)), refusal(dl_device=(2, 1))])
    show([refusal(copy=False), refusal(dl_device=(2, 0), stream=-1)])
    refusals = []
    stream.capture(lambda: refusals.extend(refusal(stream=one) for one in (None, other.handle, -1, stream.handle)))
    show(refusals)
    for consumers in ((None, 1), (1, other.handle), (-1,)):
        array = arrays.empty((4,), "float32", stream)
        for consumer in consumers:
            array.__dlpack__(stream=consumer)
        gpu.pooled_bytes()
        part(f"drop after {consumers}")
        del array
        part("next")
    kept = [arrays.empty((4,), "float32", stream)]
    kept[0].__dlpack__()
    gpu.pooled_bytes()
    part("drop in a capture")
    stream.capture(kept.clear)
    part("end")
    """)  # fmt: skip


def test_the_consumer_s_stream_waits_and_what_cannot_be_exported_is_one_line(ran):
    shown, _, calls = ran[ORDERED]
    (own, other), bad, elsewhere, fine, refusals = shown
    parts = {}
    for call in calls:
        if call["call"] == "part":
            current = parts[call["name"]] = []
        elif call["call"] in ("record", "wait", "synchronize") and parts:
            current.append((call["call"], call.get("stream")))
    for consumer, waiting in ((None, 1), (1, 1), (2, 2), (other, other)):
        assert parts[f"export {consumer}"] == [("record", own), ("wait", waiting)]
    assert parts[f"export {own}"] == parts["export -1"] == []
    behind = [("record", 1), ("wait", own)]
    assert parts["drop after (None, 1)"] == behind
    assert parts[f"drop after (1, {other})"] == [("synchronize", None)], "that stream may be gone"
    assert parts["drop after (-1,)"] == []
    assert parts["drop in a capture"] == behind[:1], "it waits on the host"
    stream = "BufferError: the stream of __dlpack__ is a handle, 1, 2, -1 or None, not"
    assert bad[:4] == [f"{stream} 0", f"{stream} -2", f"{stream} True", f"{stream} '1'"]
    assert bad[4].startswith("DriverError: the CUDA driver's cuStreamWaitEvent failed with error 400")
    assert elsewhere[0] == "BufferError: arrays are exported without a copy; copy what the consumer returns"
    for text, where in zip(elsewhere[1:], ((1, 0), (2, 1)), strict=True):
        here = "<float32[4] on GPU 0> stays on its GPU, DLPack's device (2, 0)"
        assert text == f"BufferError: {here}, not {where}"
    assert fine == [None, None]
    captured = "BufferError: the array's stream is being captured, so that no other can wait for it; export it later"
    assert refusals == [captured, captured, None, None]


HIDDEN = case("hidden streams", """
    class Jax:
        '''As an array of JAX, which takes -1 for the handle of a stream.'''

        def __init__(self, array):
            self.array, self.__dlpack_device__ = array, array.__dlpack_device__
            facts = {**array.__cuda_array_interface__, "data": (array.address, True), "version": 2}
            del facts["stream"]
            self.__cuda_array_interface__ = facts

        def __dlpack__(self, *, stream=None, max_version=None):
            if stream == -1:
                raise RuntimeError("INTERNAL: CUDA error: : CUDA_ERROR_INVALID_HANDLE: invalid resource handle")
            return self.array.__dlpack__(stream=stream)

    gpu = arrays.device(0)
    stream, hidden = gpu.stream(), gpu.stream()
    plan, (gate, up), y = swiglu(), map(Jax, three(hidden)[:2]), three(stream)[2]
    plan.launch(stream, gate, up, y)
    plan.launch(0, gate, up, y)
    # In a capture nothing outside can be waited for.
    stream.capture(lambda: plan.launch(stream, gate, up, y))
    show([stream.handle, hidden.handle, gate.array.address, up.array.address, y.address])
    show(error_of(plan.launch, stream, gate.array, up.array, Jax(y)))
    Jax.__dlpack__ = lambda self, **options: 1 / 0
    show([error_of(plan.launch, stream, gate, up, y), dispatch.stats()["swiglu_forward"]["launches"]])
    # cuda.tile asks for DLPack first, if it can, in each launch.
    arrays.Array.__dlpack__ = lambda self, **options: 1 / 0
    plan.launch(stream, gate.array, up.array, y)
    """)  # fmt: skip


def test_a_library_that_hides_its_streams_makes_the_launch_s_wait(ran):
    shown, launches, calls = ran[HIDDEN]
    (own, hidden, *addresses), read_only, (error, count) = shown
    assert len(launches) == 4
    expected = parameters_of(*((address, (64, 12288), (12288, 1)) for address in addresses))
    assert all(one["parameters"] == expected for one in launches)
    ordered = [(one["call"], one["stream"]) for one in calls if one["call"] in ("record", "wait")]
    assert ordered == [("record", hidden), ("wait", own)] * 2 + [("record", hidden), ("wait", 1)] * 4
    assert read_only == "InputError: swiglu_forward: y is read-only, and the kernel writes it"
    assert error.startswith("InputError: swiglu_forward: gate, of type ")
    assert error.endswith("Jax, cannot be read: ZeroDivisionError: division by zero")
    assert count == 3


FAULTS = case("faults", """
    gpu = arrays.device(0)
    stream = gpu.stream()
    plan, given = swiglu(), three(stream)
    os.environ["STUB_FAIL"] = "cuLaunchKernelEx:719"
    show([error_of(plan.launch, stream, *given), dispatch.stats()["swiglu_forward"]["launches"]])
    for call, use in (("cuStreamSynchronize", stream.synchronize), ("cuStreamCreate", gpu.stream),
                      ("cuMemcpyHtoDAsync_v2", lambda: given[0].write(bytes(64 * 12288 * 2))),
                      ("cuGraphInstantiateWithFlags", lambda: stream.capture(lambda: None))):
        os.environ["STUB_FAIL"] = f"{call}:719"
        show([call, error_of(use)])
    del os.environ["STUB_FAIL"]
    plan.launch(stream, *given)
    show(dispatch.stats()["swiglu_forward"]["launches"])
    """)  # fmt: skip


def test_an_error_of_the_driver_names_the_call_and_the_error(ran):
    shown, launches, _ = ran[FAULTS]
    text, launched = shown[0]
    assert text.startswith("DriverError: swiglu_forward cannot be launched on GPU 0 (H200): ")
    assert "unspecified launch failure" in text or "CUDA_ERROR_LAUNCH_FAILED" in text
    assert launched == 0
    for call, line in shown[1:-1]:
        error = "error 719 (CUDA_ERROR_LAUNCH_FAILED): unspecified launch failure"
        assert line == f"DriverError: the CUDA driver's {call} failed with {error}"
    assert shown[-1] == len(launches) == 1


REFUSED = case("refused code", """
    os.environ["STUB_FAIL"] = "cuLibraryLoadData:200"
    show([error_of(swiglu), len(dispatch._state.plans), len(dispatch._state.kernels)])
    del os.environ["STUB_FAIL"]
    show([error_of(swiglu), len(dispatch._state.plans)])
    """)  # fmt: skip


def test_a_cubin_that_the_driver_refuses_leaves_nothing_behind(ran):
    (text, plans, kernels), after = ran[REFUSED][0]
    assert text.startswith("CacheMiss: this machine cannot run swiglu_forward for rows=")
    assert "cuLibraryLoadData failed with error 200 (CUDA_ERROR_INVALID_IMAGE)" in text
    assert (plans, kernels) == (0, 0)
    assert after == [None, 1]


MISSES = case("misses", """
    show(error_of(arrays.plan, "swiglu", rows=64, columns=12288, dtype="bfloat16"))
    show(error_of(arrays.plan, "swiglu_forward", rows=64, columns=12288))
    show(error_of(arrays.plan, "swiglu_forward", rows=64, columns=12288, dtype="float64"))
    show(error_of(arrays.plan, "swiglu_forward", rows=0, columns=12288, dtype="bfloat16"))
    for policy in ("error", "fallback", "compile"):
        os.environ["TILEKERN_ON_MISS"] = policy
        show(error_of(swiglu, columns=776))
    show(dispatch.stats()["swiglu_forward"])
    from tilekern import cache
    show([item["kernel"] for item in cache.read_wanted(cache.user_root())])
    os.environ["STUB_NAME"] = "NVIDIA H30"
    other = driver.Device(0)
    show([other.target.key, swiglu(device=other).blocks > 0])
    """)  # fmt: skip


def test_a_miss_is_one_line_by_the_rules_of_misses_and_is_wanted(ran):
    unknown, missing, dtype, rows, error, fallback, compiling, counts, wanted, nearest = ran[MISSES][0]
    assert unknown.startswith("InputError: unknown kernel 'swiglu'; known: ")
    assert missing == "InputError: swiglu_forward: expected the dimensions rows, columns, dtype: dtype missing"
    assert dtype.startswith(
        "InputError: swiglu_forward: dtype must be one of bfloat16, float16, float32, got 'float64'"
    )
    assert rows == "InputError: swiglu_forward: rows must be a whole number from 1 to 999999999999999999, got 0"
    problem = "no cache holds swiglu_forward for rows=64,columns=776,dtype=bfloat16 on H200"
    tune = "tune it with: python -m tilekern.tune MODEL --gpu H200"
    for line in (error, fallback):
        assert line == f"CacheMiss: {problem}; {tune} (compiler here: none; driver: none)"
    assert compiling.startswith(f"CacheMiss: {problem} and its default config could not be compiled (the tile compiler")
    assert compiling.endswith(f"pip install 'tilekern[compile]'); {tune}")
    none = {"hits": 0, "nearest": 0, "substitutes": 0, "fallbacks": 0, "compiled": 0, "launches": 0}
    assert counts == none | {"misses": 3}
    assert wanted == ["swiglu_forward"]
    assert nearest == ["sm_90-h30-132", True]


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"STUB_CUDA": "12080"}, "CannotRun: the driver serves CUDA 12.8, and kernels need CUDA 13.0: update the"),
        ({"STUB_GPUS": "0"}, "CannotRun: the CUDA driver's cuInit failed with error 100 (CUDA_ERROR_NO_DEVICE)"),
        (None, "CannotRun: the CUDA driver is missing (libcuda.so.1: "),
    ],
)
def test_a_machine_that_cannot_launch_says_what_it_lacks(bare, tmp_path, variables, line):
    code = "from tilekern import arrays; arrays.plan('swiglu_forward', rows=64, columns=12288, dtype='bfloat16')"
    stub = {} if variables is None else stub_of_the_driver(tmp_path) | variables
    ran = bare.run("-c", code, TILEKERN_CACHE_DIR=str(tmp_path / "cache"), **stub)
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert last.removeprefix("tilekern.errors.").replace("DriverError", "CannotRun").startswith(line), last


INVARIANT = case("invariant", """
    dispatch.set_invariant(on=True)
    stream = arrays.device(0).stream()
    plan = arrays.plan("rms_norm_forward", rows=64, columns=4096, dtype="bfloat16", weight_dtype="bfloat16")
    facts = record_of(plan).measurement["invariant"]
    show([dict(plan.config) == facts["config"], facts["generic"]])
    x, y = (arrays.empty((64 * 4104,), "bfloat16", stream) for _ in range(2))
    weight = arrays.empty((4096,), "bfloat16", stream)
    y = y.view((64, 4096))
    whole = x.view((64, 4096))
    for view in (whole.view((64, 4096), offset=1), x.view((64, 4096), (4100, 1)), x.view((64, 4096), (1, 64)), whole):
        show(error_of(plan.launch, stream, view, weight, y, 1e-6))
    show([view.address, dispatch.stats()["rms_norm_forward"]["launches"]])
    """)  # fmt: skip


def test_what_no_variant_allows_is_named_with_what_it_would_take(ran):
    """In the invariant mode the generic variant may have other bits, and then it does not run."""
    (is_invariant, has_generic), odd, apart, columns, none, (address, launches) = ran[INVARIANT][0]
    assert is_invariant
    assert not has_generic
    start = "NoVariant: rms_norm_forward: x must"
    assert odd == f"{start} begin at a multiple of 16 bytes, and begins at {address + 2:#x}"
    assert apart == f"{start} have strides that 8 divides, not 4100"
    assert columns == f"{start} have neighbours along its last axis, and its strides are [1, 64]"
    assert (none, launches) == (None, 1)


HERE = case("here", """
    from tilekern.doctor.machine import devices
    from tilekern.spec.targets import here

    show([here().key, here(1).key, here(2), [target.key for target in devices().gpus]])
    os.environ["STUB_GPUS"] = "0"
    show(here())
    """)  # fmt: skip


def test_without_torch_the_driver_says_which_gpu_is_here(ran):
    key = "sm_90-h200-132"
    assert ran[HERE][0] == [[key, key, None, [key, key]], None]


CODE = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "arrays.md").read_text(), re.M | re.S)
PAGE = case("page", "\n".join(CODE))


def test_the_code_of_the_page_runs(ran):
    shown, launches, calls = ran[PAGE]
    assert shown == ["1.5 ms"]
    assert len(launches) == 2, "the second is captured"
    assert [one["nodes"] for one in calls if one["call"] == "graph"] == [1]


COMPILED = """
import sys
from tilekern import arrays
from tilekern.runtime import dispatch

stream = arrays.device(0).stream()
plan = arrays.plan("swiglu_forward", rows=64, columns=776, dtype="bfloat16")
plan.launch(stream, *(arrays.empty((64, 776), "bfloat16", stream) for _ in range(3)))
assert dispatch.stats()["swiglu_forward"]["compiled"] == 1
assert "torch" not in sys.modules
"""


@needs_compiler
def test_a_miss_is_compiled_without_torch_where_a_compiler_is(tmp_path):
    """cuda-tile's front end loads torch where it is, and does without where it is not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    compiler = ["nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm", "pyelftools"]
    (tmp_path / "bare").mkdir()
    python = BarePython(tmp_path / "bare", [*project["dependencies"], *compiler])
    variables = {"TILEKERN_CACHE_DIR": str(tmp_path / "cache"), **stub_of_the_driver(tmp_path)}
    ran = python.run("-c", COMPILED, **variables)
    assert ran.returncode == 0, ran.stderr
    assert '"kernel": "swiglu_forward_' in ran.stderr
