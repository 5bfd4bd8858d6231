"""TRL's trainers on :func:`tilekern.ops.linear_log_probs`.

``add_fused_lm_head`` lets TRL's DPO, GRPO, SFT, KTO and RLOO trainers get log-probabilities without logits. It calls
one autograd function, from hidden states and the head's weight to log-probabilities, entropies and some metrics.
:func:`register` replaces this function. The metrics are computed from the same results where possible:

- The mean of the logits is the product with the mean of the weight's rows.
- ``log(sum p^2)`` is ``2 * log p - log p'``, with p' at half the temperature, for any one id.
- An id with more than half of the probability is certainly the likeliest. One with less than ``exp(-entropy)``, a lower
  bound of the largest probability, certainly is not. Only the rows in between need a product of their own.

GRPO and RLOO pad prompts on the left. ``generate`` counts positions from a row's first token, but these trainers give
none, and the model counts from the padding. Rotary embeddings then have the same differences and other roundings, so
:func:`register` also has them pass the positions that ``generate`` had.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from tilekern.errors import needing

with needing(__name__):
    import torch

from tilekern.ops.linear_log_probs import linear_log_probs
from tilekern.ops.registration import is_autocast
from tilekern.warning import warn_once

__all__ = ["calls", "register", "unregister"]

KNOWN_VERSIONS = "1.15 and 1.16"
_MODULE, _NAME = "trl.trainer.utils", "_ChunkedLogProbFunction"
_ARGUMENTS = (
    "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping",
    "logit_scale", "outputs",
)  # fmt: skip
# Trainers whose prompts are padded on the left, and the method that scores completions.
_TRAINERS = (("trl.trainer.grpo_trainer", "GRPOTrainer"), ("trl.trainer.rloo_trainer", "RLOOTrainer"))
_SCORES, _SCORED = "_get_per_token_logps_and_entropies", ("self", "model", "input_ids", "attention_mask")
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# Tolerance for rounding when a log-probability is compared with the bounds for the likeliest id.
_SLACK = 1e-2
# Rows of logits that exist at once, for ids that may be the likeliest.
_ROWS = 1024
_served: Counter[str] = Counter()
_left: Counter[str] = Counter()
Results = tuple[torch.Tensor | None, ...]


def register() -> list[str]:
    """Make TRL's trainers run ``linear_log_probs``, also on models with TRL's fused head; repeating changes nothing.

    GRPO and RLOO count a row's positions from its first token, as ``generate`` does.

    Returns:
        The names in TRL that are now tilekern's. Empty, with a warning, if this version of TRL does not fit.

    Raises:
        ImportError: TRL is not installed.
    """
    module, trainers = importlib.import_module(_MODULE), _trainers()
    theirs = getattr(module, _NAME, None)
    if isinstance(theirs, _Function):
        return _names()
    if problem := _misfit(theirs) or next(filter(None, map(_misfit_of, trainers)), None):
        import trl

        warn_once(
            f"trl {trl.__version__} does not fit and runs its own function: {problem}; tilekern knows {KNOWN_VERSIONS}"
        )
        return []
    setattr(module, _NAME, _Function(theirs))
    for trainer in trainers:
        setattr(trainer, _SCORES, _counting(getattr(trainer, _SCORES)))
    return _names()


def unregister() -> list[str]:
    """Restore TRL's functions; return the names that were tilekern's.

    Raises:
        ImportError: TRL is not installed.
    """
    module = importlib.import_module(_MODULE)
    ours = getattr(module, _NAME, None)
    if not isinstance(ours, _Function):
        return []
    setattr(module, _NAME, ours.original)
    for trainer in _trainers():
        setattr(trainer, _SCORES, getattr(trainer, _SCORES).__wrapped__)
    return _names()


def calls() -> dict[str, Any]:
    """Return how often ``linear_log_probs`` ran (``served``) and how often TRL's function ran, by reason (``left``)."""
    return {"served": _served["calls"], "left": dict(_left)}


def _misfit(theirs: Any) -> str | None:
    """Return why the function cannot be replaced, or None."""
    if theirs is None:
        return f"{_MODULE}.{_NAME} is missing"
    forward = getattr(theirs, "forward", None)
    arguments = tuple(inspect.signature(forward).parameters) if callable(forward) else ()
    if arguments != _ARGUMENTS:
        return f"{_MODULE}.{_NAME} takes ({', '.join(arguments)}), expected ({', '.join(_ARGUMENTS)})"
    return None


def _trainers() -> list[Any]:
    return [getattr(importlib.import_module(module), name) for module, name in _TRAINERS]


def _names() -> list[str]:
    return [f"{_MODULE}.{_NAME}", *(f"{module}.{name}.{_SCORES}" for module, name in _TRAINERS)]


def _misfit_of(trainer: Any) -> str | None:
    """Return why a trainer's method cannot be replaced, or None."""
    arguments = tuple(inspect.signature(getattr(trainer, _SCORES, lambda: None)).parameters)
    if arguments[: len(_SCORED)] != _SCORED:
        return f"{trainer.__name__}.{_SCORES} takes ({', '.join(arguments)}), expected ({', '.join(_SCORED)}, ...)"
    return None


def _counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a trainer's method that calls the model with the positions that ``generate`` counts."""

    @functools.wraps(original)
    def scored(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return original(trainer, functools.partial(_call_counted, model), *args, **kwargs)

    return scored


def _call_counted(model: Any, **given: Any) -> Any:
    """Call a model; where padding stands before a row's tokens, count positions from the first of them."""
    mask = given["attention_mask"]
    if _counts_columns(model) and not mask[:, 0].all():
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return model(**given)


def _counts_columns(model: torch.nn.Module) -> bool:
    """Return whether a model takes positions, and without them counts a row's columns; vision models read the mask."""
    from transformers import PreTrainedModel

    inner = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if inner is None or inner.config.get_text_config() is not inner.config:
        return False
    return "position_ids" in inspect.signature(type(inner).forward).parameters


class _Function:
    """Replacement of TRL's autograd function; only ``apply`` is used."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def apply(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
        temperature: float, chunk_size: int, softcap: float | None = None, logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _OUTPUTS,
    ) -> Results:  # fmt: skip
        """Return the fields of :data:`_OUTPUTS`, [rows] each; None for those that are not requested."""
        if reason := _unserved(hidden, weight, softcap, logit_scale, outputs):
            _left[reason] += 1
            given = (hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs)
            found: Results = self.original.apply(*given)
            return found
        _served["calls"] += 1
        # scale and cap: cap * tanh(scale * x / cap) / T is (cap / scale) * tanh(x / (cap / scale)) / (T / scale).
        cap = None if softcap is None else softcap / logit_scale
        heat = temperature / logit_scale
        log_probs, entropy = linear_log_probs(hidden, weight, targets, bias=bias, temperature=heat, softcap=cap)
        with torch.no_grad():
            made = {
                "log_sum_sq_probs": lambda: (
                    2 * log_probs
                    - linear_log_probs(hidden, weight, targets, bias=bias, temperature=heat / 2, softcap=cap)[0]
                ),
                "mean_logits": lambda: _mean_logits(hidden, weight, bias) / heat,
                "is_top1": lambda: _is_top1(hidden, weight, bias, targets, log_probs, entropy),
            }
            figures = [make() if name in outputs else None for name, make in made.items()]
        return log_probs, entropy if "entropy" in outputs else None, *figures


def _unserved(
    hidden: torch.Tensor, weight: torch.Tensor, softcap: float | None, logit_scale: float, outputs: tuple[str, ...]
) -> str | None:
    """Return why TRL's own function runs, or None."""
    if logit_scale <= 0:
        return "a scale of the logits that is not positive"
    if softcap is not None and "mean_logits" in outputs:
        return "the mean of capped logits"
    if weight.dtype != hidden.dtype and not is_autocast(hidden):
        return "a head of another dtype than the hidden states"
    if hasattr(weight, "ds_id"):
        return "a head that DeepSpeed gathers for each direction"
    unknown = sorted(set(outputs) - set(_OUTPUTS))
    return f"the output {unknown[0]}" if unknown else None


def _mean_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
    return mean if bias is None else mean + bias.mean(dtype=torch.float32)


def _is_top1(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
    log_probs: torch.Tensor, entropy: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return whether each target is its row's likeliest id; [rows] bool."""
    found = log_probs > math.log(0.5) + _SLACK
    (open_rows,) = torch.nonzero(~found & (log_probs >= -entropy - _SLACK), as_tuple=True)
    for rows in open_rows.split(_ROWS):
        best = torch.nn.functional.linear(hidden[rows], weight, bias).argmax(-1)
        found[rows] = best == targets[rows]
    return found
