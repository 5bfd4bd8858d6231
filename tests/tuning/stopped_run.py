"""Measures MANY problems of a sweep from the record, then waits to be stopped: ``stopped_run.py SWEEP CACHE MANY``."""

import sys
import time

from recorded import RecordedExecutor

from tilekern.tuning import cli
from tilekern.tuning.executors import FINISHED, local
from tilekern.warning import tell

folder, cache, many = sys.argv[1:]


class Waiting(RecordedExecutor):
    def __init__(self, *_):
        super().__init__()

    def run(self, tasks):
        finished = 0
        for line in super().run(tasks):
            yield line
            finished += line[0] == FINISHED
            if finished == int(many):
                tell("waiting")
                time.sleep(600)


local.LocalExecutor = Waiting
sys.exit(cli.main(["--stages", "measure", "--sweep", folder, "--cache-dir", cache]))
