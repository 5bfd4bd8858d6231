"""A run and its rows, jobs that are done in this process, and refusals, for the tests of the benchmarks."""

from benchmarks.__main__ import main
from benchmarks.results import Results, Row

RUN = {
    "date": "2026-08-01T12:00:00+00:00", "gpu": "H200", "driver": "580.1", "toolkit": "none (cuda-tile 1.7.0)",
    "torch": "2.11.0", "commit": "abc123", "notes": ["quack left out: ImportError: no"],
}  # fmt: skip


def rows(benchmark, *found):
    """The results of a benchmark from (case, provider, metric, value, unit, and a spread perhaps)."""
    return Results(RUN, [Row(benchmark, *figures) for figures in found])


def is_one_line(capsys, arguments, *words):
    """Return whether a command printed one line with these words on standard error and exited with 2."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert all(word in said.err for word in words), said.err


class Standing:
    """In place of a job's process: it is ready at once, and its work is done by ``work(job)``, which gives lines."""

    limit_s = 240.0

    def __init__(self, job, work):
        self.job, self.work = job, work

    def wait_until_ready(self):
        pass

    def is_waiting(self):
        return False

    def done(self):
        return "", list(self.work(self.job))

    def turn(self):
        return self.done()

    def end(self):
        pass


def answering(monkeypatch, module, *answers):
    """Jobs of a benchmark are done by processes that answer with these (trouble, lines); gives the jobs started."""
    jobs, left = [], iter(answers)

    class Answering(Standing):
        def __init__(self, job):
            jobs.append(job)

        def done(self):
            return next(left)

    monkeypatch.setattr(module, "_start", Answering)
    return jobs
