"""How long artifacts take to compile where nothing is known of this machine."""

# Core-seconds an artifact: means over samples of Qwen3-8B's artifacts for the H200 and the B200, tileiras 13.4, on one
# core of an AMD EPYC. ``OTHER_S`` is their mean, for kernels that are not among them.
COMPILE_S = {
    "fused_add_rms_norm_backward": 0.49,
    "fused_add_rms_norm_forward": 0.41,
    "attention_delta": 0.29,
    "attention_dkdv": 2.02,
    "attention_dq": 1.30,
    "attention_forward": 3.34,
    "column_sum": 0.24,
    "cross_entropy_backward": 0.24,
    "cross_entropy_forward": 0.37,
    "cross_entropy_fused": 0.65,
    "matmul": 0.60,
    "qk_norm_rope_backward": 0.90,
    "qk_norm_rope_forward": 0.47,
    "rms_norm_backward": 0.37,
    "rms_norm_forward": 0.23,
    "rope": 0.55,
    "scale": 0.12,
    "swiglu_backward": 0.16,
    "swiglu_backward_remake": 0.17,
    "swiglu_forward": 0.13,
}
OTHER_S = 0.65
