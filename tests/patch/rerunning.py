"""A recording without a GPU: what was recorded runs again, and its results go to the memory of the first run's."""

import weakref

import torch

from tilekern.patch import captured, graphs


class Rerun:
    with_gradient = True

    def record(self, run):
        before = torch.get_rng_state()
        self._run, self._results = run, run()
        torch.set_rng_state(before)  # as of a capture, which draws nothing
        return self._results

    def replay(self):
        # The first results may be part of a tape that the run makes anew.
        kept = [None if x is None else x.detach() for x in self._results]
        with torch.set_grad_enabled(self.with_gradient):
            results = self._run()
        for mine, new in zip(kept, results, strict=True):
            if new is not None:
                mine.copy_(new.detach())


def overwrite(monkeypatch):
    """Let each forward write over the gradients of all forms, as it may where they share a pool of memory."""
    steps, record, set_aside = weakref.WeakSet(), captured.CapturedStep._record, captured.CapturedStep._set_aside

    def recorded(self, model):
        record(self, model)
        steps.add(self)

    def aside(self):
        set_aside(self)
        for step in steps:
            for x in step._gradients if step._room is self._room else ():
                if x is not None:
                    x.detach().fill_(torch.nan)

    monkeypatch.setattr(captured.CapturedStep, "_record", recorded)
    monkeypatch.setattr(captured.CapturedStep, "_set_aside", aside)


def use(monkeypatch, recording=Rerun):
    """Let graphs of models on the CPU be such recordings, or others."""
    overwrite(monkeypatch)
    monkeypatch.setattr(captured.Room, "recording", lambda *_: recording())
    monkeypatch.setattr(graphs, "DEVICES", ("cpu", "cuda"))
