"""The time of a step by parts: kernels by name, gaps between them, and the products of a model."""

from __future__ import annotations

import pytest

from benchmarks.profiling import OTHER, category, parts_of, products
from tilekern.tuning.plan.configs import config_named


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matmul"),
        ("matmul_persistent", "matmul"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128>>", "attention forward"),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention backward"),
        ("void flash::flash_bwd_dot_do_o_kernel<true>", "attention backward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1", "attention forward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention backward"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>", "attention backward"),
        ("attention_forward", "attention forward"),
        ("attention_dkdv", "attention backward"),
        ("attention_dq_kept", "attention backward"),
        ("attention_sums", "attention backward"),
        ("cross_entropy_fused", "loss"),
        ("liger_cross_entropy_kernel", "loss"),
        ("void cunn_SoftMaxForward<8, c10::BFloat16, float>", "loss"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("rms_norm_forward", "norm, rope, swiglu"),
        ("fused_add_rms_norm_backward", "norm, rope, swiglu"),
        ("qk_norm_rope_forward", "norm, rope, swiglu"),
        ("_swiglu_backward_kernel", "norm, rope, swiglu"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<c10::BFloat16>>", OTHER),
    ],
)
def test_a_kernel_is_known_by_its_name(kernel, what):
    assert category(kernel) == what


def event(name, start, duration, cat="kernel"):
    return {"name": name, "ts": start, "dur": duration, "cat": cat}


def test_parts_add_up_to_the_whole_and_gaps_are_idle():
    events = [
        event("nvjet_a", 1000, 500),
        event("rms_norm_forward", 1600, 100),
        event("nvjet_b", 1650, 200),  # overlaps by 50
        event("Memcpy DtoD", 1850, 150, "gpu_memcpy"),
        event("aten::mm", 0, 9000, "cpu_op"),
        {"name": "process_name", "ph": "M"},
    ]
    parts = parts_of(events)
    assert parts == {"matmul": 0.65, "idle": 0.1, "norm, rope, swiglu": 0.1, OTHER: 0.15, "total": 1.0}
    assert parts_of([]) == {}


def test_the_products_are_all_linear_layers_of_the_model():
    config = config_named("qwen3-8b")[1]
    found = products(config, config.num_hidden_layers)
    assert found[4096, 151936] == 1
    assert found[4096, 12288] == found[4096, 1024] == 72
    assert found[4096, 4096] == 72  # q and o
    weights = sum(columns * rows * count for (columns, rows), count in found.items())
    assert weights == pytest.approx(8.19e9 - 151936 * 4096, rel=0.01)  # all weights but the embedding
