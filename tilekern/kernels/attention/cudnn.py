"""cuDNN's attention, through torch, as a point of the attention specs' spaces.

torch passes it tensors [batch, heads, tokens, head_dim] of any strides, so the specs' layout is passed as a view. Its
backward adds dq up atomically, whatever ``torch.use_deterministic_algorithms`` says (cuDNN 9.19 through torch 2.11 on
an H200: dk and dv repeat bit by bit, dq does not), so it serves only if that is allowed.
"""

from __future__ import annotations

from typing import Any

from tilekern.spec import Constraint, LibraryCall, Problem
from tilekern.spec.targets import HAS, Target

FORWARD_INPUTS = (
    "q", "k", "v", "sink_logits", "query_starts", "key_starts", "most_queries", "scale", "softcap", "window",
)  # fmt: skip
BACKWARD_INPUTS = (
    "q", "k", "v", "out", "dout", "lse", "query_starts", "key_starts", "most_queries", "most_keys", "scale", "softcap",
    "window",
)  # fmt: skip


def _serves(problem: Problem, target: Target) -> bool:
    plain = not any(problem.get(flag) for flag in ("windowed", "capped", "sinks", "packed"))
    sized = problem["head_dim"] % 8 == 0 and problem["head_dim"] <= (
        256 if target.capability in HAS["cudnn_wide_heads"] else 128
    )
    square = not problem["causal"] or problem["queries"] == problem["keys"]
    grouped = problem["heads"] % problem["kv_heads"] == 0
    real = target.capability in HAS["cudnn_attention"] and target.name != "interpreter"
    return plain and sized and square and grouped and real and problem["dtype"] != "float32"


SERVES = Constraint(
    "cuDNN's attention takes half types, plain or causal with as many queries as keys, no packed sequences, and heads "
    "whose size is a multiple of 8 up to 128 (256 on sm_90 and newer)",
    lambda problem, config, target: config["implementation"] != "cudnn" or _serves(problem, target),
)
REPEATS = Constraint(
    "cuDNN's backward adds dq up in an order that changes from run to run",
    lambda problem, config, target: config["implementation"] != "cudnn" or not problem["deterministic"],
)


def _heads_first(*tensors: Any) -> list[Any]:
    return [x.transpose(1, 2) for x in tensors]


def forward(problem: Problem) -> LibraryCall:
    """Return cuDNN's forward: out and lse."""
    causal = problem["causal"]

    def call(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
        import torch

        scale = dict(zip(FORWARD_INPUTS[3:], rest, strict=True))["scale"]
        attend = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = attend(*_heads_first(q, k, v), None, True, 0.0, causal, False, scale=scale)
        return out.transpose(1, 2), lse.reshape(q.shape[0], q.shape[2], q.shape[1])

    return LibraryCall(call, FORWARD_INPUTS)


def backward(problem: Problem) -> LibraryCall:
    """Return cuDNN's backward: dq, dk and dv."""
    causal = problem["causal"]

    def call(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *rest: Any) -> tuple[Any, ...]:
        import torch

        scale = dict(zip(BACKWARD_INPUTS[6:], rest, strict=True))["scale"]
        slopes = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        # Seed and offset are for dropout and unused, but must be tensors.
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        q, k, v, out, dout = _heads_first(q, k, v, out, dout)
        found = slopes(
            dout, q, k, v, out, lse[..., None], unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
            scale=scale,
        )  # fmt: skip
        return tuple(x.transpose(1, 2) for x in found)

    return LibraryCall(call, BACKWARD_INPUTS)
