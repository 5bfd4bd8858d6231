"""Ops refuse, before anything is launched and by the argument's name, what they cannot compute."""

import math

import pytest
import torch
from experts_samples import layer

from tilekern import ops
from tilekern.ops.fused_rms_norm_add import fused_rms_norm_add
from tilekern.ops.fused_rms_norm_add_rms_norm import fused_rms_norm_add_rms_norm

META, EMPTY = torch.zeros(3, dtype=torch.long, device="meta"), torch.zeros(3, dtype=torch.long)
STARTS = torch.tensor([0, 5, 6, 23], dtype=torch.int32)


def ones(*shape, **options):
    return torch.ones(shape, **options)


def of_sizes(**sizes):
    return {name: torch.ones(size) for name, size in sizes.items()}


def starts(*values):
    return {"cu_seqlens": torch.tensor(values, dtype=torch.int32)}


X, WEIGHT = ones(2, 8), ones(8)
NORM = {"x": X, "weight": WEIGHT}
SUM = {"residual": X, **NORM}
HEADS = {"q": ones(1, 23, 4, 16), "k": ones(1, 23, 2, 16), "v": ones(1, 23, 2, 16)}
SEVEN, TWO = ones(7), {"residual": ones(1, 8)}
ONE_SHAPE = "residual and x must have one shape"
SHORT = r"weight must have the shape \[8\], got \[7\]"
MODE = {"casting_mode": "bloom"}
NO_MODE = "casting_mode must be llama, gemma or none, got 'bloom'"
HEAD = {"hidden": ones(3, 8), "weight": ones(5, 8)}
SHARE = "label_smoothing must be from 0 to 1"
CAP = "softcap must be positive and finite"
CAPS = [({"softcap": cap}, f"{CAP} .*, got {cap}") for cap in (0.0, -1.0, math.inf, math.nan)]
# Rotations: what fits, and shapes that do not.
ROPE = of_sizes(q=(2, 4, 5, 8), k=(2, 2, 5, 8), cos=(1, 5, 8), sin=(1, 5, 8))
QK = of_sizes(q=(2, 5, 4, 8), k=(2, 5, 2, 8), q_weight=(8,), k_weight=(8,), cos=(1, 5, 8), sin=(1, 5, 8))
LLAMA4 = of_sizes(xq=(2, 5, 4, 8), xk=(2, 5, 2, 8), freqs_cis=(1, 5, 4, 2))
MROPE = of_sizes(q=(2, 4, 5, 12), k=(2, 2, 5, 12), cos=(3, 2, 5, 12), sin=(3, 2, 5, 12)) | {"mrope_section": [1, 3, 2]}
WRONG_ANGLES = [{"cos": (1, 6, 8)}, {"cos": (3, 5, 8)}, {"cos": (1, 5, 6)}, {"sin": (1, 5, 4)}]
WRONG_SIZES = {
    ops.rope: [
        {"k": (2, 2, 6, 8)}, {"k": (1, 2, 5, 8)}, {"k": (2, 2, 5, 6)}, {"q": (2, 4, 5, 7), "k": (2, 2, 5, 7)},
        *WRONG_ANGLES,
    ],
    ops.qk_norm_rope: [
        {"k": (2, 6, 2, 8)}, {"k": (1, 5, 2, 8)}, {"k": (2, 5, 2, 6)}, {"k": (2, 5, 16)}, {"q_weight": (7,)},
        {"k_weight": (1, 8)}, {"q": (2, 5, 4, 7), "k": (2, 5, 2, 7), "q_weight": (7,), "k_weight": (7,)}, *WRONG_ANGLES,
    ],
    ops.llama4_rope: [
        {"xk": (2, 6, 2, 8)}, {"xk": (1, 5, 2, 8)}, {"xk": (2, 5, 2, 6)}, {"xq": (2, 5, 4, 7), "xk": (2, 5, 2, 7)},
        *({"freqs_cis": size} for size in (
            (3, 5, 4, 2), (1, 6, 4, 2), (1, 5, 8, 2), (5, 1, 4, 2), (4, 2), (2, 5, 6))),
    ],
    ops.qwen2vl_mrope: [
        {"cos": (2, 2, 5, 12), "sin": (2, 2, 5, 12)}, {"cos": (2, 5, 12), "sin": (2, 5, 12)}, {"sin": (3, 2, 5, 10)},
        {"cos": (), "sin": ()}, {"k": (2, 2, 4, 12)},
    ],
}  # fmt: skip


def of_wrong_sizes(op):
    return [(of_sizes(**sizes), "") for sizes in WRONG_SIZES[op]]


# Of each op what fits, and changes of it that do not.
REFUSED = {
    ops.rms_norm: (NORM, [
        ({"weight": SEVEN}, SHORT), ({"weight": ones(1, 8)}, r"weight must have the shape \[8\], got \[1, 8\]"),
        ({"weight": ones()}, r"weight must have the shape \[8\], got \[\]"), (MODE, NO_MODE),
        ({"weight": SEVEN, "offset": 1.0}, SHORT),
    ]),
    ops.fused_add_rms_norm: (SUM, [
        (TWO, rf"{ONE_SHAPE}, got \[1, 8\] and \[2, 8\]"), ({"weight": SEVEN}, SHORT),
        ({"weight": ones(1, 8)}, "weight must have the shape"), ({"weight": ones()}, "weight must have the shape"),
        (MODE, NO_MODE),
    ]),
    fused_rms_norm_add: (SUM, [(TWO, ONE_SHAPE), ({"weight": SEVEN}, SHORT), (MODE, NO_MODE)]),
    fused_rms_norm_add_rms_norm: (SUM | {"next_weight": WEIGHT}, [
        (TWO, ONE_SHAPE), ({"weight": SEVEN}, SHORT), ({"next_weight": SEVEN}, SHORT), (MODE, NO_MODE),
    ]),
    ops.layer_norm: (NORM | {"bias": WEIGHT}, [
        ({"weight": SEVEN}, SHORT), ({"bias": SEVEN}, r"bias must have the shape \[8\], got \[7\]"),
    ]),
    ops.fused_add_layer_norm: (SUM | {"bias": WEIGHT}, [(TWO, ONE_SHAPE), ({"weight": SEVEN}, SHORT)]),
    ops.dyt: ({"x": X, "alpha": ones(1), "gamma": WEIGHT, "beta": WEIGHT}, [
        ({"alpha": ones(2)}, r"alpha must be one number.* got \[2\]"),
        ({"gamma": SEVEN}, r"gamma must .*\[8\], got \[7\]"), ({"beta": SEVEN}, r"beta must .*\[8\], got \[7\]"),
    ]),
    ops.poly_norm: ({"x": X, "weight": ones(3), "bias": ones()}, [
        ({"weight": ones(2)}, r"weight must have the shape \[3\], got \[2\]"),
        ({"bias": ones(2)}, r"bias must be one number.* got \[2\]"),
    ]),
    ops.group_norm: (
        {"x": ones(2, 12, 5), "weight": ones(12), "bias": ones(12), "num_channels": 12, "num_groups": 4}, [
            ({"x": ones(2, 12)}, r"x must have the shape \[batch, 12, ...\], got \[2, 12\]"),
            ({"num_channels": 11}, r"x must have the shape \[batch, 11, ...\], got \[2, 12, 5\]"),
            ({"num_groups": 5}, "num_groups must divide the 12 channels, got 5"),
            ({"weight": ones(11)}, r"weight must have the shape \[12\], got \[11\]"),
        ],
    ),
    ops.swiglu: ({"gate": X, "up": X}, [
        ({"up": ones(2, 7)}, r"one shape, got \[2, 8\] and \[2, 7\]"), ({"up": ones(1, 8)}, "must have one shape"),
    ]),
    ops.geglu: ({"gate": X, "up": X}, [({"up": WEIGHT}, "gate and up must have one shape")]),
    ops.activation: ({"x": X}, [({"kind": "mish"}, "the activation must be one of gelu, .*, relu2, got 'mish'")]),
    ops.mlp: (
        {"x": X, "up_weight": ones(5, 8), "up_bias": None, "down_weight": ones(8, 5), "down_bias": None},
        [({"kind": "mish"}, "the activation must be one of gelu, .*, relu2, got 'mish'")],
    ),
    **dict.fromkeys((ops.tiled_swiglu, ops.tiled_geglu), (
        {"x": X, "gate_weight": ones(5, 8), "up_weight": ones(5, 8), "down_weight": ones(8, 5)}, [
            ({"num_shards": 0}, "num_shards must be at least 1, or None, got 0"),
            ({"up_weight": ones(4, 8)}, r"gate_weight and up_weight must have one shape, got .* and \[4, 8\]"),
        ],
    )),
    ops.linear: (NORM | {"weight": ones(5, 8)}, [
        ({"weight": ones(5, 7)}, r"weight must have the shape \[out_features, 8\], got \[5, 7\]"),
        ({"weight": WEIGHT}, r"weight must have the shape \[out_features, 8\], got \[8\]"),
        ({"x": ones()}, r"x must have the shape \[..., in_features\], got \[\]"),
        ({"bias": WEIGHT}, r"bias must have the shape \[5\]"), ({"activation": "relu"}, "activation must be one of"),
    ]),
    ops.grouped_linear: (
        {"x": ones(10, 24), "weight": ones(2, 5, 24), "offsets": torch.tensor([0, 1]), "bias": ones(2, 5)}, [
            ({"x": ones(10)}, r"x must have the shape \[rows, in_features\], got \[10\]"),
            ({"weight": ones(5, 24)}, r"weight must have the shape \[experts, out_features, 24\], got \[5, 24\]"),
            ({"weight": ones(2, 5, 23)}, r"weight must have the shape \[.*, 24\], got \[2, 5, 23\]"),
            ({"offsets": EMPTY}, r"offsets must have the shape \[2\], got \[3\]"),
            ({"bias": ones(5)}, r"bias must have the shape \[2, 5\], got \[5\]"),
            ({"order": torch.arange(10), "slots": 2}, r"order must have .* \[10 tokens \* 2 slots\], got \[10\]"),
        ],
    ),
    ops.experts: (layer(4, 2, 3, 8, 16), [
        ({"x": ones(4, 9)}, r"x must have the shape \[tokens, 8\], got \[4, 9\]"),
        ({"ids": torch.zeros(5, 2, dtype=torch.long)}, r"ids and weights must have the shape \[4, choices\]"),
        ({"gate_up": ones(3, 31, 8)}, r"gate_up must be \[experts, 2 \* inner, hidden\]"),
        ({"down": ones(3, 8, 15)}, r"down must have the shape \[3, 8, 16\], got \[3, 8, 15\]"),
        ({"down": ones(3, 8, 16).half()}, r"down must be torch.float32 as gate_up is"),
        ({"activation": "relu"}, "activation must be one of silu, gelu_tanh, got 'relu'"),
        ({"limit": 0.0}, "limit must be positive, or None for no limit, got 0.0"),
    ]),
    ops.route: ({"ids": torch.zeros(4, 2, dtype=torch.long), "experts": 2}, [
        ({"ids": EMPTY}, r"ids must be \[tokens, choices\] of at least one expert"),
        ({"experts": 0}, "of at least one expert"),
    ]),
    ops.router: ({"logits": torch.zeros(2, 6), "choices": 2}, [
        ({"choices": 0}, "choices must be from 1 to 6"), ({"choices": 7}, "choices must be from 1 to 6"),
        ({"scores": "tanh"}, "scores must be one of softmax, sigmoid, got 'tanh'"),
        ({"groups": 2}, "only scores='sigmoid' takes a bias and groups"),
        ({"bias": ones(6)}, "only scores='sigmoid' takes a bias and groups"),
        ({"scores": "sigmoid", "bias": ones(5)}, r"bias must have the shape \[6\], got \[5\]"),
        *(({"scores": "sigmoid", "groups": n}, f"groups must cut 6 experts into parts of two or more, got {n}")
          for n in (4, 6)),
        ({"scores": "sigmoid", "groups": 3, "kept_groups": 4}, "kept_groups must be from 1 to 3"),
        ({"scores": "sigmoid", "groups": 3, "kept_groups": 1, "choices": 3}, "of 3 experts or more, got 1"),
        ({"logits": ones(6)}, r"logits must be \[tokens, experts\] of floats"),
    ]),
    ops.router_losses: ({"logits": ones(2, 6), "ids": torch.zeros(2, 2, dtype=torch.int64)}, [
        ({"logits": ones(6)}, r"logits must be \[rows, experts\] of floats"),
        ({"ids": torch.zeros(3, 2, dtype=torch.int64)}, r"ids must be int64 \[2, choices\] of at most 6 choices"),
        ({"ids": torch.zeros(2, 7, dtype=torch.int64)}, "ids must be int64"),
        ({"ids": torch.zeros(2, 2, dtype=torch.int32)}, "got torch.int32"),
        ({"shares": ones(3)}, r"shares must have the shape \[2\], got \[3\]"),
    ]),
    ops.attention: (HEADS, [
        *CAPS, ({"q": ones(23, 4, 16)}, "must be .batch, tokens, heads, head_dim"),
        ({"v": ones(1, 22, 2, 16)}, "q, k and v must be"), ({"k": ones(1, 23, 2, 8)}, "q, k and v must be"),
        ({"k": ones(2, 23, 2, 16), "v": ones(2, 23, 2, 16)}, "q, k and v must be of one batch"),
        *(({"q": ones(1, 23, heads, 16), "k": ones(1, 23, keys, 16), "v": ones(1, 23, keys, 16)},
           f"{heads} heads must be a multiple of the {keys} key heads") for heads, keys in ((2, 0), (3, 2), (2, 4))),
        ({"sinks": ones(3)}, r"sinks must have the shape \[4\], got \[3\]"),
        ({"window": 0}, "window must be positive, got 0"),
        ({name: x[..., :0] for name, x in HEADS.items()}, "head_dim must be at least 1"),
        ({"q": ones(1, 22, 4, 16), **starts(0, 9, 22)}, "packed sequences"),
        ({"cu_seqlens": STARTS[:0]}, r"cu_seqlens must be \[sequences \+ 1\], got \[0\]"),
        (starts(1, 5, 23), "it starts with 1, its least step is 4, and it ends with 23"),
        (starts(0, 9, 5, 23), "never fall, .* its least step is -4"),
        (starts(0, 5, 22), "end with 23, the number of tokens; .* and it ends with 22"),
        (starts(0, 5, 24), "and it ends with 24"),
        ({"cu_seqlens": STARTS, "max_seqlen": 16}, "the longest sequence has 17 tokens, got max_seqlen 16"),
        ({"cu_seqlens_k": STARTS}, "needs a cu_seqlens of its shape, got None and"),
        ({"cu_seqlens": STARTS, "cu_seqlens_k": STARTS[:2]}, r"of its shape, got \[4\] and \[2\]"),
        ({**starts(0, 9, 22), "cu_seqlens_k": starts(0, 5, 24)["cu_seqlens"]}, "end with at most 23, .* with 24"),
        ({**starts(0, 5, 9, 24), "cu_seqlens_k": STARTS}, "cu_seqlens must .* at most 23, .* it ends with 24"),
        ({"cu_seqlens": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_k": 16}, "17 tokens, got max_seqlen_k 16"),
        ({"cu_seqlens": STARTS.to("meta"), "max_seqlen": 17}, "cu_seqlens is on meta, and must be on cpu as q is"),
        ({"sinks": ones(4, device="meta")}, "sinks is on meta, and must be on cpu as q is"),
    ]),
    ops.fused_neighborhood_attention: (
        {name: ones(2, 1, 13, 8) for name in ("query", "key", "value")} | {"kernel_size": 3, "dilation": 1}, [
            ({"kernel_size": 4}, "kernel_size must be odd and positive, got 4"),
            ({"kernel_size": -1}, "kernel_size must be odd and positive, got -1"),
            ({"dilation": 0}, "dilation must be at least 1, got 0"),
            ({"key": ones(2, 1, 12, 8)}, "with as many queries as keys"),
            ({"query": ones(4, 13, 8)}, r"must be \[batch, heads, tokens, head_dim\]"),
        ],
    ),
    ops.rope: (ROPE, [
        *of_wrong_sizes(ops.rope),
        ({"k": ROPE["k"].bfloat16()}, "q .*float32 and k .*bfloat16 may differ in heads only"),
        ({"sin": ROPE["sin"].bfloat16()}, "cos and sin must have one shape and dtype"),
        *((of_sizes(q=(3, 4, 5, 16), k=(3, 4, 5, 16), cos=(5, width), sin=(5, width)) | {"rotary_dim": size},
           "rotary_dim must be even, at most 16") for size, width in ((7, 7), (18, 18), (8, 6), (-2, 8))),
    ]),
    ops.qk_norm_rope: (QK, [
        *of_wrong_sizes(ops.qk_norm_rope),
        *(({"rotary_dim": size}, "rotary_dim must be even, at most 8") for size in (7, 14)),
        ({"rotary_dim": 6}, r"rotary_dim .* that of cos \[1, 5, 8\] or twice that, got 6"),
        ({"casting_mode": "float"}, "casting_mode must be llama, gemma or none, got 'float'"),
        ({"k_weight": None}, "q_weight and k_weight must both be given, or both be None"),
    ]),
    ops.llama4_rope: (LLAMA4, [
        *of_wrong_sizes(ops.llama4_rope),
        ({"xk": LLAMA4["xk"].bfloat16()}, "q .*float32 and k .*bfloat16 .* may differ in heads only"),
    ]),
    ops.qwen2vl_mrope: (MROPE, [
        *of_wrong_sizes(ops.qwen2vl_mrope),
        *(({"mrope_section": sections}, ".*mrope_section .* must add up") for sections in ([1, 3, 3], [-1, 5, 2])),
        ({"unsqueeze_dim": 3}, "unsqueeze_dim must be 1 or 2, got 3"),
    ]),
    ops.cross_entropy: ({"logits": torch.zeros(3, 8), "target": EMPTY}, [
        *CAPS,
        ({"target": torch.zeros(4, dtype=torch.long)}, r"target must be \[3\] as the rows of logits are, got \[4\]"),
        ({"target": ones(3, 8)}, r"target must be \[3\] .*, got \[3, 8\]"),
        ({"target": ones(3)}, r"integer dtype, got torch.float32"),
        ({"target": EMPTY.bool()}, r"integer dtype, got torch.bool"),
        ({"target": META}, "target is on meta, and must be on cpu"),
        ({"weight": ones(7)}, r"weight must have the shape \[8\], got \[7\]"),
        ({"weight": ones(8, requires_grad=True)}, r"weight gets no gradient"),
        ({"reduction": "max"}, r"reduction must be mean, sum or none, got 'max'"),
        ({"label_smoothing": 1.5}, rf"{SHARE}, got 1.5"), ({"label_smoothing": math.nan}, SHARE),
    ]),
    ops.fused_linear_cross_entropy: (HEAD | {"target": EMPTY}, [
        *CAPS, ({"hidden": ones()}, "hidden must be"), ({"weight": ones(8)}, "hidden must be"),
        ({"weight": ones(5, 7)}, r"got \[3, 8\] and \[5, 7\]"),
        ({"target": torch.zeros(4, dtype=torch.long)}, r"target must be \[3\] as the rows of hidden are, got \[4\]"),
        ({"target": ones(3)}, "integer dtype, got torch.float32"),
        ({"target": EMPTY.bool()}, "integer dtype, got torch.bool"),
        ({"target": META}, "target is on meta, and must be on cpu"),
        ({"class_weight": ones(6)}, r"class_weight must have the shape \[5\], got \[6\]"),
        ({"class_weight": ones(5, requires_grad=True)}, "class_weight gets no gradient"),
        ({"bias": ones(6)}, r"bias must have the shape \[5\], got \[6\]"),
        ({"accum_dtype": torch.float64}, r"accum_dtype must be float32 or torch\.float32, got torch\.float64"),
        ({"reduction": "max"}, "reduction must be mean, sum or none, got 'max'"),
        ({"reduction": "sum", "num_items": 3}, "num_items goes with the reduction mean, not sum"),
        ({"num_items": ones(2)}, r"num_items must be one number, got \[2\]"),
        ({"label_smoothing": 1.5}, f"{SHARE}, got 1.5"), ({"label_smoothing": math.nan}, SHARE),
    ]),
    ops.linear_log_probs: (HEAD | {"ids": EMPTY}, [
        *CAPS, ({"hidden": ones()}, "hidden must be"),
        ({"weight": ones(5, 7)}, r"hidden must be .*, got \[3, 8\] and \[5, 7\]"),
        ({"ids": torch.zeros(4, dtype=torch.long)}, r"ids must be \[3\] as the rows of hidden are, got \[4\]"),
        ({"ids": ones(3)}, "ids must be of an integer dtype, got torch.float32"),
        ({"ids": META}, "ids is on meta, and must be on cpu"),
        ({"bias": ones(6)}, r"bias must have the shape \[5\], got \[6\]"),
        ({"temperature": 0.0}, "temperature must be positive and finite .*, got 0.0"),
        ({"temperature": math.nan}, "temperature must be positive and finite"),
    ]),
    ops.sharded_linear_log_probs: (HEAD | {"ids": EMPTY, "first": 0}, [
        ({"first": -1}, "first must not be negative, got -1"), ({"temperature": -1.0}, "temperature must be positive"),
    ]),
    ops.fused_linear_jsd: (
        {"student_input": ones(3, 8), "student_weight": ones(5, 8), "teacher_input": ones(3, 6),
         "teacher_weight": ones(5, 6)}, [
            ({"student_input": ones()}, "student_input must be"),
            ({"teacher_weight": ones(5, 7)}, r"teacher_input must be .*, got \[3, 6\] and \[5, 7\]"),
            ({"teacher_input": ones(4, 6)}, "student and teacher must have the same rows and vocabulary"),
            ({"teacher_weight": ones(4, 6)}, "student and teacher must have the same rows and vocabulary"),
            ({"shift_labels": ones(4)}, r"shift_labels must be \[3\] like the rows of student_input, got \[4\]"),
            ({"teacher_weight": ones(5, 6, device="meta")}, "teacher_weight is on meta, and must be on cpu"),
            ({"jsd_beta": 1.5}, "jsd_beta must be from 0 to 1, got 1.5"),
            ({"temperature": 0.0}, "temperature must be positive and finite"),
            ({"accum_dtype": torch.float16}, "accum_dtype must be torch.float32 or None, got torch.float16"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "given", "changes", "message"),
    [
        pytest.param(op, given, changes, message, id=f"{op.__name__} {' '.join(changes)} {number}")
        for op, (given, wrong) in REFUSED.items()
        for number, (changes, message) in enumerate(wrong)
    ],
)
def test_what_does_not_fit_is_refused(op, given, changes, message):
    with pytest.raises(ValueError, match=rf"^\w+: (.*)?{message}"):
        op(**given | changes)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets", [[2, 2, 7], [2, 1, 6], [-1, 2, 6], [7, 7, 7], [0, 2, 2**31 - 1]])
def test_offsets_that_leave_the_rows_are_refused(offsets, dtype):
    with pytest.raises(
        ValueError, match=r"offsets must be from 0 to 6, the number of rows, and never fall, got \["
    ) as e:
        ops.grouped_linear(ones(6, 8), ones(3, 5, 8), torch.tensor(offsets, dtype=dtype))
    assert str(offsets) in str(e.value)


def test_offsets_beyond_int32_are_not_wrapped():
    with pytest.raises(ValueError, match="offsets must be from 0 to 6"):
        ops.grouped_linear(ones(6, 8), ones(3, 5, 8), torch.tensor([0, 2, 2**32 + 3]))


@pytest.mark.parametrize("offsets", [[0, 0, 0], [0, 0, 6], [6, 6, 6], [1, 1, 3]])
def test_offsets_at_the_ends_are_taken(offsets):
    offsets = torch.tensor(offsets, dtype=torch.int32)
    assert ops.grouped_linear(ones(6, 8), ones(3, 5, 8), offsets).shape == (6, 5)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 6], [-1, 1, 2, 3, 4, 5], [0, 0, 2, 3, 4, 5]])
def test_an_order_that_is_not_a_permutation_is_refused(order):
    given = torch.tensor([2, 4, 6], dtype=torch.int32), None, torch.tensor(order, dtype=torch.int32)
    with pytest.raises(ValueError, match="order must be a permutation of the numbers from 0 to 5, got"):
        ops.grouped_linear(ones(3, 8), ones(3, 5, 8), *given, 2)


def test_numbers_on_another_device_are_not_waited_for():
    """As on a GPU: there is an assertion on the device, and no number comes to the host."""
    on_meta = torch.zeros(3, dtype=torch.int32, device="meta")
    assert ops.grouped_linear(ones(6, 8, device="meta"), ones(3, 5, 8, device="meta"), on_meta).shape == (6, 5)
