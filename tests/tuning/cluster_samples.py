"""What runs on the nodes of the tests' cluster: all that does in earnest, but a record in the GPU's place."""

import os
import time
from pathlib import Path

from isolation_samples import RIGHT
from recorded import COPY_US, GPU, RecordedExecutor

from tilekern.cache import Store
from tilekern.runtime.workers import disposable
from tilekern.tuning.executors.node import GpuNode, check_node
from tilekern.tuning.measure import process
from tilekern.tuning.measure.tasks import CUDA, INPUTS, STRATEGY
from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.measure.worker import CHECKED, DONE, RACING, READY, TIMED
from tilekern.tuning.sweep.lines import COPY


def serve(connection, steps, cache, _device):
    """A measuring process that answers with what an H200 measured once."""
    disposable.begin()
    connection.send((READY, None))
    recorded = RecordedExecutor()
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        steps.follow(task)
        for name in (CUDA, INPUTS):
            steps.begin(name)
        for entrant in task.entrants:
            if entrant.key not in task.checks:
                steps.begin(entrant.key)
                connection.send((CHECKED, (entrant.key, RIGHT)))
        steps.begin(STRATEGY)
        connection.send((RACING, True))
        racing = [entrant for entrant in task.entrants if entrant.is_aligned]
        timings = {entrant.key: Timing(recorded.time_us(entrant), 0.1, 20) for entrant in racing}
        connection.send((RACING, False))
        # The time of a copy tells how many records the cache has.
        held = len(list(Store(Path(cache)).entries()))
        connection.send((TIMED, timings | {COPY: Timing(COPY_US + held, 0.1, 20)}))
        connection.send((DONE, {"race": 1.0}))


def no_cuda(connection, steps, _cache, _device):
    """A measuring process that dies when it starts CUDA."""
    disposable.begin()
    connection.send((READY, None))
    steps.follow(connection.recv())
    steps.begin(CUDA)
    os._exit(7)


class RecordedNode(GpuNode):
    """Measures on a GPU that is a record."""

    serve = staticmethod(serve)

    def describe(self, code, target):  # noqa: ARG002
        check_node(code)
        assert os.environ["CUDA_VISIBLE_DEVICES"].isdigit()
        return dict(GPU)

    def begin(self, code, target, pack):
        process.serve = self.serve
        return super().begin(code, target, pack)


class LackingNode(RecordedNode):
    """One on a node where something was not installed."""

    def describe(self, code, target):  # noqa: ARG002
        check_node(code, "torch", "torch_of_tomorrow")


def noting(folder, together=1):
    """Nodes that note in a file who is handed which problem with how many known checks.

    None measures before so many have begun: else one may be done with all before another has started.
    """

    class Noting(RecordedNode):
        def begin(self, code, target, pack):
            self.name, found = super().begin(code, target, pack)
            (folder / f"begun-{self.name}").touch()
            return self.name, found

        def measure(self, task):
            while len(list(folder.glob("begun-*"))) < together:
                time.sleep(0.02)
            with (folder / "handed").open("a") as file:
                print(self.name, task.problem["rows"], len(task.checks), file=file)
            return super().measure(task)

    return Noting


def dying(folder, times, together=1):
    """Nodes whose Ray worker dies, so many times in all, when it is asked for more than its first line."""

    class Dying(noting(folder, together)):
        def measure(self, task):
            self.first = True
            return super().measure(task)

        def more(self):
            if len(list(folder.glob("death-*"))) == times:
                return super().more()
            if not self.first:
                (folder / f"death-{os.getpid()}").touch()
                os._exit(1)
            self.first = False
            return [self._found.get()]

    return Dying


def waiting(folder):
    """Nodes that give one line of a task, and no other before there is a file ``not-NODE`` of another node's name."""

    class Waiting(noting(folder)):
        def measure(self, task):
            self.first = True
            return super().measure(task)

        def more(self):
            if set(folder.glob("not-*")) - {folder / f"not-{self.name}"}:
                return super().more()
            if self.first:
                self.first = False
                return [self._found.get()]
            time.sleep(0.05)
            return []

    return Waiting


def once(folder, mark):
    """Whether this is the first to ask."""
    try:
        (folder / mark).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def of_two_drivers(folder):
    """Nodes of which the first that is to measure has another driver."""

    class Updated(noting(folder)):
        def begin(self, code, target, pack):
            name, found = super().begin(code, target, pack)
            return name, found | ({"driver": "590.1"} if once(folder, "updated") else {})

    return Updated


def broken(folder, *, all_of_them):
    """Nodes of which one, or all, cannot start CUDA."""

    class Broken(noting(folder, 1 if all_of_them else 2)):
        def begin(self, code, target, pack):
            if all_of_them or once(folder, "broken"):
                self.serve = no_cuda
            return super().begin(code, target, pack)

    return Broken


def dying_at_first(folder, times):
    """Nodes whose Ray worker dies when it is asked to ``describe`` or to ``begin``, so many times in all at each."""

    class DyingAtFirst(RecordedNode):
        def _die(self, at):
            if len(list(folder.glob(f"death-{at}-*"))) < times.get(at, 0):
                (folder / f"death-{at}-{os.getpid()}").touch()
                os._exit(1)

        def describe(self, code, target):
            self._die("describe")
            return super().describe(code, target)

        def begin(self, code, target, pack):
            self._die("begin")
            return super().begin(code, target, pack)

    return DyingAtFirst
