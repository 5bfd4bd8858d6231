"""A recording without a GPU: what was recorded runs again, and its results go to the memory of the first run's."""

import torch

from tilekern.patch import captured, graphs


class Rerun:
    def record(self, run):
        self._run, self._results = run, run()
        return self._results

    def replay(self):
        # The first results may be part of a tape that the run makes anew.
        kept = [None if x is None else x.detach() for x in self._results]
        with torch.enable_grad():
            results = self._run()
        for mine, new in zip(kept, results, strict=True):
            if new is not None:
                mine.copy_(new.detach())


def use(monkeypatch):
    """Let graphs of models on the CPU be such recordings."""
    monkeypatch.setattr(captured.Room, "recording", lambda *_: Rerun())
    monkeypatch.setattr(graphs, "DEVICES", ("cpu", "cuda"))


def poisoned(monkeypatch, value=float("nan")):
    """Fill inputs and gradients of a captured step after each backward, as the next owner of a graph's memory may."""
    original = captured.CapturedStep.replay_backward

    def replay_backward(self, turn, slopes, **how):
        found = original(self, turn, slopes, **how)
        for x in self._inputs.values():
            if x.is_floating_point():
                x.detach().fill_(value)
        return found

    monkeypatch.setattr(captured.CapturedStep, "replay_backward", replay_backward)


def losses(model, batches, optimizer=None, **more):
    """Train a few steps; return the losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for ids in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, **more).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
