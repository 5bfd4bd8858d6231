"""``tilekern.TrainerCallback`` patches the model of transformers' Trainer and reports what ran."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
import transformers

from tilekern.errors import InputError
from tilekern.patch.graphs import graphed, graphs_of, ungraphed
from tilekern.patch.patcher import apply_to_model
from tilekern.patch.registry import known_ops
from tilekern.patch.report import because, report
from tilekern.runtime.counting import stats
from tilekern.runtime.dispatch import reasons
from tilekern.runtime.switches import ATTENTION, FP8
from tilekern.warning import tell


class TrainerCallback(transformers.TrainerCallback):
    """Patch the Trainer's model before accelerate wraps it, and print once to stderr which ops serve its modules.

    A model that is already partly patched, for example by ``tilekern.apply``, stays as it is. After training the
    callback prints how often kernels fell back to torch. In a job of several ranks only the first rank of each host
    prints.
    """

    def __init__(self, *, reset: bool = False, graphs: bool = False, **options: Any) -> None:
        """Make a callback for ``Trainer(callbacks=[...])``.

        Args:
            reset: after training, restore the original code of the modules that this callback patched.
            graphs: replay training steps from CUDA graphs, as after :func:`tilekern.graphed`; afterwards the callback
                prints how many.
            options: options of :func:`tilekern.apply_to_model`.
        """
        self.reset, self.graphs, self.options = reset, graphs, options
        self._patched: weakref.ref[torch.nn.Module] | None = None
        self._has_said = False
        self._fallbacks: dict[str, int] = {}
        self._reasons: dict[str, dict[str, int]] = {}

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Patch the model before the Trainer wraps its forward for mixed precision.

        Raises:
            InputError: as :func:`tilekern.apply_to_model`; or the Trainer would run the model with
                ``torch.nn.DataParallel``, which needs ``tilekern.apply``.
        """
        if model is not None:
            self._begin(model, args, state)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Patch the model if it was exchanged meanwhile or if this callback was added late; start counting.

        Raises:
            InputError: as :meth:`on_init_end`.
        """
        self._begin(model, args, state)
        if self.graphs and not graphs_of(model):
            graphed(model)
        self._fallbacks, self._reasons = _fallbacks(), reasons()

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Say what fell back to torch, and with ``reset`` put the model's own code back."""
        before, now = self._fallbacks, _fallbacks()
        counted = {kernel: number - before.get(kernel, 0) for kernel, number in now.items()}
        why = {kernel: Counter(found) - Counter(self._reasons.get(kernel)) for kernel, found in reasons().items()}
        lines = [
            f"{kernel} fell back to torch {number} times{because(why.get(kernel, {}))}"
            for kernel, number in counted.items()
            if number
        ]
        found = graphs_of(model) if model is not None else {}
        _say(state, [*(lines or ["no kernel fell back to torch"]), *(f"graphs: {said}" for said in found.values())])
        patched = None if self._patched is None else self._patched()
        if self.reset and self.graphs and model is not None:
            ungraphed(model)
        if self.reset and patched is not None:
            none: dict[str, Any] = dict.fromkeys(known_ops(), False)
            apply_to_model(patched, **none)
            self._patched = None

    def _begin(self, model: torch.nn.Module, args: Any, state: Any) -> None:
        found = report(model)
        if not any(row.op not in (ATTENTION, FP8) and not row.reason for row in found.rows):
            if args.n_gpu > 1:
                raise InputError(
                    f"the Trainer runs the model by torch.nn.DataParallel on {args.n_gpu} GPUs, and replicas of a "
                    "patched model would run the original; call tilekern.apply() before, or start it with torchrun"
                )
            apply_to_model(model, **self.options)
            self._patched = weakref.ref(model)
            found = report(model)
        if not self._has_said:
            self._has_said = True
            _say(state, str(found).splitlines())


def _fallbacks() -> dict[str, int]:
    return {kernel: counted["fallbacks"] for kernel, counted in stats().items()}


def _say(state: Any, lines: list[str]) -> None:
    if state.is_local_process_zero:
        for line in lines:
            tell(f"tilekern: {line}", err=True)
