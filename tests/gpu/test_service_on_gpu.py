"""On the GPU: the service measures what a running job missed, and the job takes it with no restart."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_processes import clean_environment

from tilekern.cache import Store, read_wanted
from tilekern.compile.toolchain import toolkit

PATIENCE_S = 300
pytestmark = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")

# No prebuilt pack serves a model of 48 columns. The optimizer's step is when a training job takes what was found.
JOB = """
import sys, time, warnings
import torch
import tilekern
from tilekern.ops.swiglu import swiglu

warnings.simplefilter("ignore")
gate, up = (torch.randn(64, 48, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(2))
weight = torch.nn.Parameter(torch.ones((), device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.0)
expected = torch.nn.functional.silu(gate.detach().float()) * up.detach().float()
steps = launches = 0
end = time.monotonic() + float(sys.argv[1])
while not launches and time.monotonic() < end:
    y = swiglu(gate, up)
    (y * weight).sum().backward()
    torch.testing.assert_close(y.detach().float(), expected, rtol=2e-2, atol=2e-2)
    optimizer.step()
    steps += 1
    counted = tilekern.stats()
    launches = min(counted.get(f"swiglu_{way}", {}).get("launches", 0) for way in ("forward", "backward"))
    time.sleep(0.01)
print(launches > 0, counted["swiglu_forward"]["fallbacks"] > 0, flush=True)
"""


def environment(root: Path) -> dict[str, str]:
    settings = {"TILEKERN_CACHE_DIR": str(root), "TILEKERN_ON_MISS": "fallback", "TILEKERN_LOOKUP_AGAIN_S": "0.2"}
    return clean_environment() | settings


def until(holds):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_training_job_takes_what_the_service_measures(tmp_path: Path):
    """The forward is wanted first; with it in place the job misses the backward, and gets that too."""
    serve = [sys.executable, "-m", "tilekern.tune", "serve", "--poll", "0.2"]
    env = environment(tmp_path)
    job = subprocess.Popen([sys.executable, "-c", JOB, str(PATIENCE_S)], env=env, stdout=subprocess.PIPE, text=True)
    service = subprocess.Popen(serve, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said = job.communicate(timeout=PATIENCE_S)[0]
        until(lambda: not read_wanted(tmp_path))
        service.send_signal(signal.SIGTERM)
        errors = service.communicate(timeout=60)[1]
    finally:
        for process in (job, service):
            process.kill()
    assert said == "True True\n"
    assert service.returncode == 0, errors
    records = {entry.record.kernel: entry.record for entry in Store(tmp_path).entries()}
    assert {"swiglu_forward", "swiglu_backward"} <= set(records)
    for record in records.values():
        assert record.provenance == "measured"
        assert record.measurement["median_us"] > 0
        assert record.check["passed"]
    history = [json.loads(line) for line in (tmp_path / "service" / "history.jsonl").read_text().splitlines()]
    assert {line["event"] for line in history} == {"published"}
