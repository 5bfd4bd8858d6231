"""Compiles by the command line what a sweep lacks, on a cluster, and measures it on recorded GPUs there.

Prints what the command line printed, the lines of measuring, and where the nodes' code came from. All in one process:
Ray starts a server of its own for each client.

Run as ``python cluster_client.py ray://HOST:PORT FOLDER``.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

import ray
from cluster_samples import RecordedNode

from tilekern.tuning import cli
from tilekern.tuning.executors.cluster import ClusterExecutor
from tilekern.tuning.executors.node import package_folder
from tilekern.tuning.measure.stage import tasks
from tilekern.tuning.sweep.folder import Sweep

if __name__ == "__main__":
    door, folder = sys.argv[1:]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = cli.main(["--stages", "compile", "--executor", door, "--sweep", folder, "--json"])
    if code:
        sys.exit(code)
    sweep = Sweep(Path(folder))
    executor = ClusterExecutor(door, sweep.cache, node=RecordedNode)
    lines = list(executor.run(list(tasks(sweep, sweep.problems(), "race"))))
    came_from = ray.get(ray.remote(package_folder).remote("tilekern"))
    json.dump([said.getvalue(), lines, str(came_from)], sys.stdout)
