"""Measures a compiled sweep on recorded GPUs of a cluster; prints the lines, and where the nodes' code came from.

Run as ``python cluster_client.py ray://HOST:PORT FOLDER``.
"""

import json
import sys
from pathlib import Path

import ray
from cluster_samples import RecordedNode

from tuning.executors.cluster import ClusterExecutor
from tuning.executors.node import package_folder
from tuning.measure.stage import tasks
from tuning.sweep.folder import Sweep

if __name__ == "__main__":
    sweep = Sweep(Path(sys.argv[2]))
    executor = ClusterExecutor(sys.argv[1], sweep.cache, node=RecordedNode)
    lines = list(executor.run(list(tasks(sweep, sweep.problems(), "race"))))
    came_from = ray.get(ray.remote(package_folder).remote("tilekern"))
    json.dump([lines, str(came_from)], sys.stdout)
