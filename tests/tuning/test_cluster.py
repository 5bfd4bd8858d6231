"""A sweep on a real Ray cluster, of a head and two nodes on this host that say to have an H200 each."""

import functools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from cluster_samples import LackingNode, RecordedNode, broken, dying, dying_at_first, noting, of_two_drivers, waiting
from environments import environment, python_path
from recorded import COPY_US, GPU, RecordedExecutor
from tuning_samples import SMALL, THREE, WIDE

from tilekern.compile.toolchain import Toolkit, toolkit
from tilekern.errors import InputError
from tilekern.spec import ALIGNED
from tilekern.spec.targets import here, resolve
from tilekern.tuning import cli
from tilekern.tuning.compile.stage import Compiling, compile_all
from tilekern.tuning.executors import FINISHED
from tilekern.tuning.measure.process import TOOK
from tilekern.tuning.measure.stage import measure_all, tasks
from tilekern.tuning.pipeline import NO_TOOLKIT
from tilekern.tuning.publishing import keep_winners, winners
from tilekern.tuning.sweep.candidates import candidates
from tilekern.tuning.sweep.folder import Sweep

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from tilekern.tuning.executors import cluster, node, ray_measuring, ray_nodes  # noqa: E402
from tilekern.tuning.executors.cluster import ClusterExecutor  # noqa: E402

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.nightly, pytest.mark.xdist_group("cluster")]
ROOT = Path(__file__).parents[2]
STORE_BYTES = 100 << 20
PATIENCE_S = 120
H200 = {"num_cpus": 1, "num_gpus": 1, "resources": {"accelerator_type:H200": 1}, "object_store_memory": STORE_BYTES}
NOTICES_DEATH_SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000}
NOTICES_DEATH_SOON |= {"health_check_failure_threshold": 3}


def processes_of(folder):
    """The command lines of living processes that name a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found


@pytest.fixture(scope="module")
def nodes():
    """The cluster; the port of its head's door for clients is its ``door``."""
    # Short, as sockets lie under it.
    folder = Path(tempfile.mkdtemp(prefix="r"))
    (folder / "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        # The samples are the nodes' own, what is tested comes along with the job.
        patch.setenv("PYTHONPATH", python_path(Path(__file__).parent))
        door = free_port()
        head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, "ray_client_server_port": door}
        found = Cluster(initialize_head=True, head_node_args=head | {"object_store_memory": STORE_BYTES})
        found.door = door
        try:
            for _ in range(2):
                found.add_node(**H200)
            patch.setenv("RAY_ADDRESS", found.address)
            yield found
        finally:
            ray.shutdown()
            found.shutdown()
    deadline = time.monotonic() + PATIENCE_S
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = processes_of(folder)
    shutil.rmtree(folder, ignore_errors=True)
    assert left == []


def free_port():
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def executor(nodes, tmp_path, monkeypatch, h200):
    """Makes an executor on the cluster whose GPUs are nodes of a class; it asks again at once.

    What only ``measures`` knows the GPU already: a worker that is asked for it alone takes a second to start.
    """
    monkeypatch.setattr(ray_nodes, "PAUSE_S", 0.1)

    def made(of=RecordedNode, *, measures=False, **options):
        found = ClusterExecutor(None, tmp_path / "sweep" / "cache", node=of, **options)
        if measures:
            found._described[h200.key] = dict(GPU)
        return found

    return made


@pytest.fixture
def sweep(compiled_sweep, tmp_path):
    found = Sweep(Path(shutil.copytree(compiled_sweep.folder, tmp_path / "sweep")))
    found.begin(found.target, "test", THREE)
    return found


@pytest.fixture
def three(sweep):
    return list(tasks(sweep, THREE, "race"))


def keys(lines):
    return sorted(line["problem"] for journal, line in lines if journal == FINISHED)


def handed(folder):
    """Return which node got which problem with how many known checks, in order."""
    return [(name, int(rows), int(checks)) for name, rows, checks in map(str.split, open(folder / "handed"))]


ALL = sorted(problem.key for _, problem in THREE)


def test_a_sweep_is_compiled_and_measured_as_on_one_host(executor, compiled_sweep, tmp_path, h200):
    sweep, on_cluster = Sweep(tmp_path / "sweep"), executor(noting(tmp_path, together=2))
    # Of each problem some configs are enough.
    few = {one: [item.config for item in candidates(*one, h200)][:8] for one in THREE}
    sweep.begin(h200, "test", THREE, few)
    assert on_cluster.cores == 2
    summary = compile_all(sweep, on_cluster.cores, pool=on_cluster.compile_in_order)
    compiled, expected = sweep.compiled(), compiled_sweep.compiled()
    assert summary.compiled == len(compiled) >= 8
    assert summary.failed == 0
    took = ("frontend_s", "tileiras_s", "reading_s", "seal")
    for key, line in compiled.items():
        assert {n: v for n, v in expected[key].items() if n not in took} == {
            n: v for n, v in line.items() if n not in took
        }
        assert sweep.cubin(line["sha256"]) == compiled_sweep.cubin(line["sha256"])
    measure_all(sweep, on_cluster, keep_winners)
    alone = Sweep(Path(shutil.copytree(compiled_sweep.folder, tmp_path / "alone")))
    alone.begin(h200, "test", THREE, few)
    measure_all(alone, RecordedExecutor(), keep_winners)
    configs = [[winner.record.config for winner, _ in winners(one, NO_TOOLKIT)] for one in (sweep, alone)]
    assert configs[0] == configs[1]
    assert sweep.gpu() == GPU
    # Both nodes had work, and the largest problem was among the first two, which are noted in either order.
    assert len({name for name, _, _ in handed(tmp_path)}) == 2
    assert 1024 in [rows for _, rows, _ in handed(tmp_path)[:2]]


def test_a_cluster_measures_what_it_has_compiled_while_it_compiles_the_rest(executor, tmp_path, h200):
    sweep, on_cluster = Sweep(tmp_path / "sweep"), executor(noting(tmp_path), most=1)
    # Of each problem two configs are enough.
    few = {one: [item.config for item in candidates(*one, h200)][:2] for one in (*THREE, WIDE)}
    sweep.begin(h200, "test", list(few), few)
    assert (on_cluster.spare_cores(h200), executor(noting(tmp_path)).spare_cores(h200)) == (1, 0)
    with Compiling(functools.partial(compile_all, sweep, 1, pool=on_cluster.compile_in_order)) as compiling:
        measure_all(sweep, on_cluster, keep_winners, coming=compiling.problems())
        assert compiling.summary().failed == 0
    won = {(winner.problem, winner.record.provenance) for winner, _ in winners(sweep, NO_TOOLKIT)}
    assert won == {(problem, "measured") for _, problem in [*THREE, WIDE]}


def test_lines_come_in_the_order_of_their_task_and_composites_find_the_winners(executor, sweep, three):
    measure_all(sweep, RecordedExecutor(), keep_winners)
    keep_winners(sweep)
    lines = list(executor(measures=True).run(three))
    assert keys(lines) == ALL
    of = defaultdict(list)
    owners = {entrant.key: task.problem.key for task in three for entrant in task.entrants}
    for journal, line in lines:
        name = line.get("candidate", "")
        of[line.get("problem") or owners.get(name) or name.rpartition("|")[2]].append((journal, line))
    for task in three:
        *checked, took, end = of[task.problem.key]
        assert (took[0], end[0]) == (TOOK, FINISHED)
        said = ["timing" in line for _, line in checked]
        assert said == sorted(said), "checks come before timings"
        assert [line["candidate"] for _, line in checked if "timing" not in line] == [e.key for e in task.entrants]
        timed = {line["candidate"]: line["timing"]["median_us"] for _, line in checked if "timing" in line}
        assert timed.keys() >= {e.key for e in task.entrants if e.candidate.variant == ALIGNED}
        assert timed[f"copy|{task.kernel}|{task.problem.key}"] == COPY_US + len(THREE)


def test_a_worker_that_dies_costs_the_candidate_in_flight(executor, three, tmp_path):
    lines = list(executor(dying(tmp_path, times=1, together=2), measures=True).run(three))
    assert keys(lines) == ALL
    assert not [line for journal, line in lines if journal == "skipped"]
    counts = Counter(rows for _, rows, _ in handed(tmp_path))
    [(lost, _)] = [item for item in counts.items() if item[1] == 2]
    (first, _, none), (second, _, known) = [line for line in handed(tmp_path) if line[1] == lost]
    assert (none, known) == (0, 1), "what was checked is not checked again"
    assert first != second, "it goes to another node"
    checked = Counter(line["candidate"] for _, line in lines if "check" in line and "timing" not in line)
    assert set(checked.values()) == {1}


def test_a_problem_that_nodes_die_of_is_given_up(executor, three, tmp_path):
    lines = list(executor(dying(tmp_path, times=2), measures=True).run(three[:1]))
    [skipped] = [line for journal, line in lines if journal == "skipped"]
    assert skipped["problem"] == three[0].problem.key
    assert "two nodes were lost while it was measured" in skipped["reason"]
    assert keys(lines) == [three[0].problem.key]


def test_a_node_with_another_driver_is_left_out(executor, three, tmp_path):
    with pytest.warns(UserWarning, match=r"left out: it is .*driver 590\.1.* and the others are .*driver 580\.159"):
        lines = list(executor(of_two_drivers(tmp_path), measures=True).run(three))
    assert keys(lines) == ALL
    assert len({name for name, _, _ in handed(tmp_path)}) == 1


def test_a_gpu_that_cannot_be_used_leaves_its_task_to_the_others(executor, three, tmp_path):
    with pytest.warns(UserWarning, match="left out: the measuring process failed at its start of CUDA"):
        lines = list(executor(broken(tmp_path, all_of_them=False), measures=True).run(three))
    assert keys(lines) == ALL
    assert len({name for name, _, _ in handed(tmp_path)}) == 2


def test_a_worker_that_dies_before_it_answers_is_replaced(executor, three, tmp_path):
    """Twice before it tells of its GPU, and twice before it begins to measure on it."""
    nodes = dying_at_first(tmp_path, {"describe": 2, "begin": 2})
    assert keys(executor(nodes, most=1).run(three[:1])) == [three[0].problem.key]
    assert Counter(path.name.split("-")[1] for path in tmp_path.glob("death-*")) == {"describe": 2, "begin": 2}


def test_workers_that_all_die_before_they_answer_are_said(executor, three, tmp_path):
    with pytest.raises(InputError, match="The actor died unexpectedly"):
        list(executor(dying_at_first(tmp_path, {"describe": 9}), most=1).run(three[:1]))
    assert len(list(tmp_path.glob("death-*"))) == ray_nodes.TRIES


def test_where_no_gpu_can_be_used_it_is_said(executor, three, tmp_path):
    with pytest.raises(InputError, match="the measuring process failed at its start of CUDA"):
        list(executor(broken(tmp_path, all_of_them=True), measures=True, most=1).run(three[:1]))


def test_a_cluster_without_the_gpu_says_what_it_has(executor):
    with pytest.raises(InputError, match=r"no node of the cluster has a B200; its GPUs by type: H200 \(2\)"):
        executor().describe_gpu(resolve("B200"))


def test_a_cluster_without_the_gpu_says_so_before_it_compiles(nodes, tmp_path, capsys):
    problem = ["--problem", "swiglu rows=64,columns=48,dtype=bfloat16"]
    assert cli.main([*problem, "--gpu", "B200", "--executor", "ray", "--cache-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "no node of the cluster has a B200; its GPUs by type: H200 (2)" in said
    assert "--stages plan,compile" in said
    [sweep] = map(Sweep, (tmp_path / "sweeps").iterdir())
    assert sweep.problems()
    assert not sweep.compiled()


def test_a_node_names_what_it_is_missing(executor, h200):
    with pytest.raises(InputError, match="torch_of_tomorrow missing on the node"):
        executor(LackingNode).describe_gpu(h200)


@pytest.mark.skipif(here() is not None, reason="this machine has a GPU")
def test_a_node_without_a_gpu_that_is_said_to_have_one_says_so(executor, h200):
    with pytest.raises(InputError, match=r"the node .*: the measure stage needs a GPU"):
        executor(node.GpuNode).describe_gpu(h200)


def test_a_node_that_runs_other_code_says_so(executor, h200, monkeypatch):
    monkeypatch.setattr(cluster, "code_digest", lambda: "0" * 64)
    with pytest.raises(InputError, match=r"runs another tilekern, from .*runtime_resources.*tilekern; take it off"):
        executor().describe_gpu(h200)


def test_a_node_with_another_compiler_says_so(executor, tmp_path, h200, monkeypatch):
    other = Toolkit(Path("tileiras"), "99.1", "9.9")
    monkeypatch.setattr(cluster, "require_toolkit", lambda: other)
    sweep = Sweep(tmp_path / "other")
    sweep.begin(h200, "test", [SMALL])
    with pytest.raises(InputError, match=f"has {toolkit().key}, and the sweep is compiled by {other.key}"):
        compile_all(sweep, 2, pool=executor().compile_in_order)
    assert sweep.compiled() == {}


def test_gpus_that_never_become_free_are_not_waited_for_without_end(executor, h200, three, monkeypatch):
    on_cluster = executor(measures=True)
    monkeypatch.setattr(cluster, "FREE_WITHIN_S", 1.0)
    monkeypatch.setattr(ray_measuring, "FREE_WITHIN_S", 1.0)
    monkeypatch.setattr(ray_measuring, "_PATIENCE_S", 0.5)
    held = [ray_nodes.start_actor(RecordedNode, h200, 1.0) for _ in range(2)]
    ray.get([actor.more.remote() for actor in held])
    for call in (lambda: on_cluster.describe_gpu(h200), lambda: list(on_cluster.run(three))):
        with pytest.raises(InputError, match=r"no H200 .*became free within 1 s"):
            call()
    for actor in held:
        ray.kill(actor)


# What Ray says when a process of its own, one for each client, ended before it was there.
class Door:
    """Stands where Ray connects: it fails with these errors, one after the other, then it is open."""

    def __init__(self, monkeypatch, *errors):
        self._errors, self.asked, self.shut = list(errors), 0, 0
        monkeypatch.setattr(ray_nodes, "PAUSE_S", 0.0)
        monkeypatch.setattr(ray_nodes.ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray_nodes.ray, "init", self._init)
        monkeypatch.setattr(ray_nodes.ray, "shutdown", self._shutdown)

    def _init(self, *_, **__):
        self.asked += 1
        if self._errors:
            raise self._errors.pop(0)

    def _shutdown(self):
        self.shut += 1


def test_a_cluster_that_answers_with_an_error_is_asked_again(monkeypatch):
    door = Door(monkeypatch, ConnectionAbortedError("Starting Ray client server failed"), RuntimeError("PID 7"))
    ray_nodes.connect("ray://127.0.0.1:1")
    assert (door.asked, door.shut) == (3, 2)


@pytest.mark.parametrize(
    ("errors", "asked"),
    [([ConnectionAbortedError("no")] * 9, 3), ([ConnectionError("no")] * 9, 1)],
    ids=["error", "nobody"],
)
def test_a_cluster_that_cannot_be_used_is_named_with_the_reason(monkeypatch, errors, asked):
    door = Door(monkeypatch, *errors)
    with pytest.raises(InputError, match=r"^cannot use the Ray cluster ray://127.0.0.1:1: no$"):
        ray_nodes.connect("ray://127.0.0.1:1")
    assert door.asked == asked


NO_DOOR = "Starting Ray client server failed"


def test_through_the_door_for_clients(nodes, compiled_sweep, tmp_path):
    """As from a host that is not of the cluster: the command line, and measuring on recorded GPUs."""
    env = environment(ROOT, Path(__file__).parent, without=("TILEKERN_", "RAY_ADDRESS"))
    sweep = Sweep(Path(shutil.copytree(compiled_sweep.folder, tmp_path / "sweep")))
    door = f"ray://127.0.0.1:{nodes.door}"
    lacking = sorted({line["sha256"] for line in sweep.compiled().values()})[:3]
    for name in lacking:
        (sweep.folder / "artifacts" / name).unlink()
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cluster_client.py")), door, str(sweep.folder)],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    if NO_DOOR in ran.stderr:
        pytest.skip(f"Ray: {NO_DOOR}, as happens on a machine that is too busy")
    assert ran.returncode == 0, ran.stderr[-2000:]
    said, lines, came_from = json.loads(ran.stdout)
    assert json.loads(said)["compile"]["compiled"] == 3
    assert sweep.lost() == set()
    assert "runtime_resources" in came_from, "the code comes along with the job"
    assert keys(lines) == [SMALL[1].key]
    [task] = tasks(sweep, [SMALL], "race")
    assert {line["candidate"] for _, line in lines if "timing" in line} > {e.key for e in task.entrants if e.is_aligned}


def test_a_node_that_is_lost_costs_the_candidate_in_flight(nodes, executor, three, tmp_path):
    """The last test: the cluster is another one after it."""
    lines = []
    on_cluster = executor(waiting(tmp_path), measures=True)
    running = threading.Thread(target=lambda: lines.extend(on_cluster.run(three)), daemon=True)
    running.start()
    # Each node has given one line.
    deadline = time.monotonic() + PATIENCE_S
    while len(lines) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    lost = handed(tmp_path)[0]
    [victim] = [one for one in nodes.worker_nodes if one.node_id == lost[0]]
    nodes.remove_node(victim, allow_graceful=False)
    (tmp_path / f"not-{lost[0]}").touch()
    running.join(PATIENCE_S)
    assert not running.is_alive()
    assert keys(lines) == ALL
    again = [line for line in handed(tmp_path)[1:] if line[1] == lost[1]]
    assert [(name != lost[0], checks) for name, _, checks in again] == [(True, 1)]
