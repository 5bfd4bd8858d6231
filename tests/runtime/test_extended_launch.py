"""Launches that say their block and cluster, by cuda-tile's own launcher, on a stub of the driver."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from environments import stub_of_the_driver

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("extended launch"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="cc is not installed, which compiles the driver's stub"),
]
COOPERATIVE, CLUSTER, DEPENDENT = "2", "4", "6"
JOB = """
import torch
from tilekern.cache import Launch
from tilekern.kernels import spec_named
from tilekern.runtime.launcher import PrebuiltKernel, Variant
from tilekern.runtime.plans import DependentPlan, ExtendedPlan, Plan
from tilekern.spec import Config
from tilekern.compile.toolchain import assumptions

class OnGpu:
    '''A CPU tensor that says of itself that it lies on a GPU.'''

    def __init__(self, tensor):
        self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype
        self.stride, self.data_ptr, self.dim = tensor.stride, tensor.data_ptr, tensor.dim

    @property
    def __cuda_array_interface__(self):
        x = self.tensor
        strides = tuple(stride * x.element_size() for stride in x.stride())
        return dict(shape=tuple(x.shape), strides=strides, typestr="<f2", data=(x.data_ptr(), False), version=3,
                    stream=None)

spec = spec_named("rms_norm_forward")
problem = spec.problem(rows=64, columns=64, dtype="float16", weight_dtype="float16")
made = spec.device(problem, spec.generic(problem))

def kernel(name, launch=None, otherwise=None):
    variant = Variant(name, "symbol", assumptions(made, name), name.encode, launch)
    return PrebuiltKernel(made.function, [variant], otherwise)

torch._C._cuda_getCurrentRawStream = torch._C._cuda_getDevice = lambda *device: 0  # torch without CUDA has neither
memory = torch.zeros(64 * 96 + 1, dtype=torch.float16)
whole, moved = (OnGpu(memory[at : at + 64 * 96].view(64, 96)[:, :64]) for at in (0, 1))
weight = OnGpu(torch.zeros(64, dtype=torch.float16))

def plan(launch, dependent=False, otherwise=None):
    return ExtendedPlan(kernel("aligned", launch, otherwise), Config(), 8, dependent=dependent)

def of_each_kind():
    own = kernel("own")
    return Plan(own, Config(), 8), DependentPlan(own, Config(), 8), plan(Launch((256, 1, 1), 1, False, 0))

import os, sys
for number, calls in enumerate(sys.argv[2:]):
    if not os.fork():
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[1]}/{name}.{number}", os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
        print(whole.data_ptr(), moved.data_ptr())
        exec(calls)
        sys.exit()
    assert os.wait()[1] == 0, open(f"{sys.argv[1]}/err.{number}").read()
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return, by calls, both matrices' addresses, the launches and the output; each in a fork of one process."""
    folder = tmp_path_factory.mktemp("driver")
    environment = {**os.environ, **stub_of_the_driver(folder)}
    every = [ATTRIBUTES, CONTEXT, DEVICE]
    command = [sys.executable, "-c", JOB, folder, *map(textwrap.dedent, every)]
    job = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=120)
    assert job.returncode == 0, job.stderr

    def outcome(number):
        addresses, *printed = (folder / f"out.{number}").read_text().splitlines()
        lines = (folder / f"err.{number}").read_text().splitlines()
        launches = [json.loads(line) for line in lines if line.startswith("{")]
        return [int(one) for one in addresses.split()], launches, printed

    return {calls: outcome(number) for number, calls in enumerate(every)}


ATTRIBUTES = """
    launch = Launch((128, 2, 1), 2, False, 0)
    plan(Launch((256, 1, 1), 1, False, 0)).launch(0, whole, weight, whole, 1e-6)
    plan(launch, dependent=True).launch(0, whole, weight, whole, 1e-6)
    plan(Launch((64, 1, 1), 1, True, 0)).launch(0, whole, weight, whole, 1e-6)
    plan(Launch((64, 1, 1), 1, False, 98304)).launch(0, whole, weight, whole, 1e-6)
    both = plan(launch, otherwise=kernel("generic"))
    both.launch(0, moved, weight, whole, 1e-6)
    both.launch(0, whole, weight, whole, 1e-6)
    print(both.launches)
    try:
        plan(launch).launch(0, moved, weight, whole, 1e-6)
    except Exception as error:
        print(type(error).__name__)
"""


CONTEXT = """
    os.environ["STUB_WITHOUT_CONTEXT"] = "1"
    for made in of_each_kind():
        made.launch(0, whole, weight, whole, 1e-6)
        print(made.launches)
        import ctypes
        ctypes.CDLL("libcuda.so.1").cuCtxSetCurrent(None)
"""
DEVICE = """
    current = [0]
    torch._C._cuda_getDevice = lambda: current[0]
    seen = []
    torch._C._cuda_getCurrentRawStream = lambda device: seen.append((current[0], device)) or 0

    class Device:
        def __init__(self, number):
            self.number = number

        def __enter__(self):
            self.before, current[0] = current[0], self.number

        def __exit__(self, *_):
            current[0] = self.before

    torch.cuda.device = Device
    for made in of_each_kind():
        made.launch(1, whole, weight, whole, 1e-6)
        made.launch(0, whole, weight, whole, 1e-6)
        print(*seen, current[0], made.launches)
        seen.clear()
"""


def test_launches_are_as_the_record_says_and_what_its_cubin_does_not_allow_runs_the_generic_variant(ran):
    (whole, moved), launches, printed = ran[ATTRIBUTES]
    assert [one["block"] for one in launches[:3]] == [[256, 1, 1], [128, 2, 1], [64, 1, 1]]
    assert [one["attributes"] for one in launches[:3]] == [{}, {CLUSTER: 2, DEPENDENT: 1}, {COOPERATIVE: 1}]
    assert [one["shared"] for one in launches] == [0, 0, 0, 98304, 0, 0]
    assert launches[3]["allowed"] >= 98304
    assert [one["cubin"] for one in launches] == ["aligned", "aligned", "aligned", "aligned", "generic", "aligned"]
    assert [one["address"] for one in launches] == [whole, whole, whole, whole, moved, whole]
    for one in launches:
        assert one["grid"] == 8
        assert one["numbers"] == [64, 64, 96, 1]  # sizes, then strides in elements
    assert printed == ["2", "NoVariant"]


def test_a_launch_makes_sure_of_its_context(ran):
    """Autograd's threads have none before they allocate, under expandable segments also after it."""
    _, launches, printed = ran[CONTEXT]
    assert [one["cubin"] for one in launches] == ["own", "own", "aligned"]
    assert printed == ["1", "1", "1"]


def test_a_launch_is_on_the_device_of_its_tensors(ran):
    """The number of a default stream is 0 on every device: it names one of the current context."""
    _, launches, printed = ran[DEVICE]
    assert len(launches) == 6
    assert printed == ["(1, 1) (0, 0) 0 2"] * 3
