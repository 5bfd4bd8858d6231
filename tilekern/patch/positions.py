"""Find the sequences in a row by the ``position_ids`` that the model was given.

A flattening collator puts several sequences into one row; their positions restart in each. Only in some families does
transformers pass positions to the function that makes a mask, and with a cache or a mask of ones it ignores them. This
module reads them once per forward, from the frame of the model's code that requested the mask.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from tilekern.ops.packing import LastReads
from tilekern.patch.guards import constant_in_graphs

_NAMES = ("text_position_ids", "position_ids")


class Sequences(NamedTuple):
    """Consecutive sequences in a row.

    Attributes:
        starts: [sequences + 1] int32 on the row's device, as ``cu_seqlens`` of attention.
        longest: at least the length of the longest one; takes few different values, since each needs its own plans.
    """

    starts: torch.Tensor
    longest: int

    def to(self, device: torch.device | str | None) -> Sequences:
        """Return the same on a device; None keeps the current device."""
        return self._replace(starts=self.starts.to(device))


class Positions(NamedTuple):
    """The positions that a model was given, as seen when it requests a mask.

    Attributes:
        ids: ``position_ids``, [batch, tokens], or [axes, batch, tokens] if a token has several; None if absent.
        are_seen: whether transformers evaluates them itself.
        are_given: whether they are the user's; False if the model counted them itself because it got none.
        starts: the ``cu_seq_lens_q`` given with them; None if absent.
    """

    ids: torch.Tensor | None = None
    are_seen: bool = False
    are_given: bool = True
    starts: torch.Tensor | None = None


def has_values(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor has values, and not only a shape."""
    fake = torch._subclasses.FakeTensor
    return tensor is None or not (tensor.device.type == "meta" or isinstance(tensor, fake))


def positions_of_call() -> Positions:
    """Return the positions of the model whose forward requests a mask now, from the frames of that call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (ids := _ids(frame)) is None:
        if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), torch.nn.Module):
            break
        frame = frame.f_back
    if frame is None:
        return Positions()
    values = frame.f_locals
    maker = frame.f_globals.get("__name__") == "transformers.masking_utils"
    cache = values.get("cache", values.get("past_key_values"))
    seen = maker and cache is None and values.get("attention_mask") is None
    return Positions(ids, seen, *_told(frame))


def _ids(frame: FrameType) -> torch.Tensor | None:
    code = frame.f_code
    names = [name for name in _NAMES if name in code.co_varnames or name in code.co_cellvars]
    values = [frame.f_locals.get(name) for name in names]
    return next((x for x in values if isinstance(x, torch.Tensor)), None)


def _told(frame: FrameType | None) -> tuple[bool, torch.Tensor | None]:
    """Return whether the outermost model above a frame was called with positions, and its ``cu_seq_lens_q``.

    If this is unknown, positions count as given.
    """
    from transformers import PreTrainedModel

    given, starts = True, None
    while frame is not None:
        code = frame.f_code
        if code.co_name in {"forward", "_call_impl"} and isinstance(frame.f_locals.get("self"), PreTrainedModel):
            given = _names_positions(code, frame.f_locals, given)
            starts = frame.f_locals.get("kwargs", {}).get("cu_seq_lens_q", starts)
        frame = frame.f_back
    return given, starts


def _names_positions(code: CodeType, values: Any, otherwise: bool) -> bool:
    """Return whether a call passes positions, from the arguments of a forward or of ``Module.__call__``."""
    if code.co_name == "_call_impl":
        # As positional arguments they follow the ids and the mask.
        named, placed = values.get("kwargs"), values.get("args")
        return (
            otherwise if named is None or placed is None else named.get("position_ids") is not None or len(placed) > 2
        )
    if "position_ids" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return values.get("position_ids") is not None
    return otherwise


@constant_in_graphs
def are_given_in_graph() -> bool:
    """Return the same for a model that torch.compile traces as a whole; False if it traces less than a model.

    A layer that is compiled alone gets its mask from a model that is not compiled and whose positions were read.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from transformers import PreTrainedModel

    try:
        root = InstructionTranslator.current_tx()
    except AttributeError:  # torch.export runs the code as Python
        return _told(sys._getframe(1))[0]
    level, models = getattr(root.output, "current_tx", root), []
    while level is not None:
        values = root.f_locals if level is root else level.symbolic_locals
        if level.f_code.co_name == "forward" and isinstance(_value(values.get("self")), PreTrainedModel):
            models.append((level.f_code, {name: _value(x) for name, x in values.items() if name == "position_ids"}))
        level = level.parent
    if models:
        return _names_positions(*models[-1], True)
    traced = root.f_locals.get("self")
    if isinstance(traced, torch.nn.Module) and not isinstance(traced, PreTrainedModel):
        return False
    # The graph was broken above this part of a model, so its caller runs as Python.
    return _told(sys._getframe(1))[0]


def _value(variable: Any) -> Any:
    """Return the value of a torch.compile variable, accurate enough to distinguish None from other values."""
    if hasattr(variable, "is_realized"):
        if not variable.is_realized():
            return variable.original_value()
        variable = variable.realize()
    if hasattr(variable, "is_python_constant") and variable.is_python_constant():
        return variable.as_python_constant()
    return getattr(variable, "value", variable)


def number_of_sequences(ids: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
    """Return each token's sequence number, [tokens], from a row's positions, without synchronizing.

    A sequence begins at each occurrence of the row's lowest position, as in FlashAttention's integration, and where
    positions fall. Padding, hidden by ``visible`` [1, tokens], belongs to the sequence before it.
    """
    rows = ids.reshape(-1, ids.shape[-1]).long()
    if visible is None:
        lowest, before = rows.amin(1, keepdim=True), rows[0].roll(1)
        begins = ((rows == lowest).all(0) | (rows[0] < before)).int()
        return begins.cumsum(0) - begins[0]
    shown = visible.reshape(-1).to(device=rows.device, dtype=torch.bool)
    lowest = rows.masked_fill(~shown, torch.iinfo(torch.int64).max).amin(1, keepdim=True)
    place = torch.arange(len(shown), dtype=torch.int64, device=rows.device)
    before = rows[0][torch.where(shown, place, 0).cummax(0).values.roll(1)]
    begins = shown & ((rows == lowest).all(0) | (rows[0] < before)) & (shown.cumsum(0) > 1)
    return begins.int().cumsum(0)


_last = LastReads[Sequences | None]()


def look(ids: torch.Tensor, known: torch.Tensor | None = None) -> Sequences | None:
    """Return the sequences of a row's positions, read once for all masks of a forward; None if there is one sequence.

    ``known`` are the tokens' sequence numbers, [tokens], if transformers has computed them.
    """
    return _last.of(ids, lambda: cut(number_of_sequences(ids.cpu()) if known is None else known.cpu(), ids.device))


def cut(numbers: torch.Tensor, device: torch.device) -> Sequences | None:
    """Return sequences from each token's sequence number, on the CPU; None if there is one sequence."""
    ends = (numbers[1:] != numbers[:-1]).nonzero().view(-1) + 1
    if not len(ends):
        return None
    starts = torch.cat((ends.new_zeros(1), ends, ends.new_full((1,), len(numbers))))
    longest = min(1 << (int(starts.diff().max()) - 1).bit_length(), len(numbers))
    return Sequences(starts.to(device=device, dtype=torch.int32), longest)


def number_of_tokens(starts: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return each token's sequence number, [tokens], from the starts of the sequences."""
    places = torch.arange(tokens, dtype=torch.int64, device=starts.device)
    return torch.searchsorted(starts.long(), places, right=True)
