"""The patches of Qwen3 (dense), checked against every minor release of transformers from 5.0 to 5.23."""

from __future__ import annotations

from tilekern.patch import layers, loss, replacements
from tilekern.patch.table import Patch

_MODULE = "transformers.models.qwen3.modeling_qwen3"
_RELEASES = "5.0 to 5.23"

_ROTARY = (
    "d80434f662380295bd9391c426af4974e78c697635eeb5c0410c69a81d422474",  # 5.0 to 5.14
    "625efaa8909cba1ff71d0e2a7dfba5306b01f51b56d0bcf9de1054bd303708de",  # 5.15 to 5.23: another decorator
)
_ROTATE_HALF = ("bc8cd2eba68a7c7c92a3b1f1bd4d750bb781d605e31d59d155dfa2067312ec86",)  # 5.0 to 5.23
# Each of these stores the angles twice: cat((freqs, freqs)).
_ANGLES = (
    "9a9fd11a4d97b3960403ad17586faed349f088d2d4589a291f7410a1870d1181",  # 5.0 to 5.17
    "14c34b3d853a126d0fdf8617fa64acb4a780f036c58c1fa8b362f701cc50d5f7",  # 5.18: no special case for mps
    "c8636388eee7d11113c5780195af677b199364dadd3e132582d7d6aa210f5989",  # 5.19 to 5.23: a product, not a matmul
)
_NORM = ("1866737585277c97cafb5b8d962560019bf1fc3203b5ce7361c438a724ff5e2d",)  # 5.0 to 5.23

PATCHES = (
    Patch(
        op="rms_norm",
        model_type="qwen3",
        module=_MODULE,
        attribute="Qwen3RMSNorm.forward",
        replacement=replacements.rms_norm,
        digests=_NORM,
        releases=_RELEASES,
    ),
    Patch(
        op="swiglu",
        model_type="qwen3",
        module=_MODULE,
        attribute="Qwen3MLP.forward",
        replacement=replacements.swiglu,
        digests=("322416cea2ee17f2f7ef9cdeb123aecddfe5bae20d703f3fb69005ee6de03364",),  # 5.0 to 5.23
        releases=_RELEASES,
    ),
    Patch(
        op="qk_norm_rope",
        model_type="qwen3",
        module=_MODULE,
        attribute="Qwen3Attention.forward",
        replacement=layers.qk_norm_rope,
        digests=(
            "1064f6bc09ca82044650dc19c23817b9400a1c2c3d116e33fb51e37e249bda49",  # 5.0
            "017cb1c249d017e870e567111b257403e071848c0d39fc947dcfd26e4bc64443",  # 5.1 to 5.3: get_interface
            "622c1885d6bd99bf0e6445d0d0e16c6c5a91080aff9547feb5d4e98487c5cf78",  # 5.4 to 5.23: no cache_position
        ),
        relies_on=(
            ("Qwen3RMSNorm.forward", _NORM),
            ("apply_rotary_pos_emb", _ROTARY),
            ("rotate_half", _ROTATE_HALF),
            ("Qwen3RotaryEmbedding.forward", _ANGLES),
        ),
        covers=("rope",),
        releases=_RELEASES,
    ),
    Patch(
        op="rope",
        model_type="qwen3",
        module=_MODULE,
        attribute="apply_rotary_pos_emb",
        replacement=replacements.rope,
        digests=_ROTARY,
        relies_on=(("rotate_half", _ROTATE_HALF), ("Qwen3RotaryEmbedding.forward", _ANGLES)),
        callers=("Qwen3Attention.forward",),
        releases=_RELEASES,
    ),
    Patch(
        op="fused_add_rms_norm",
        model_type="qwen3",
        module=_MODULE,
        attribute="Qwen3DecoderLayer.forward",
        replacement=layers.fused_add_rms_norm,
        digests=(
            "5cd2ecf91ff28d85b337e9712cdaec1c1e0af2c52245355e4164e6d2ea3d39bc",  # 5.0 to 5.3
            "019dd6a1ce8d318674ded319bd248309cc0b6cb562125eba8a3e9b8cae44e406",  # 5.4 to 5.23: no cache_position
        ),
        relies_on=(("Qwen3RMSNorm.forward", _NORM),),
        releases=_RELEASES,
    ),
    Patch(
        op="fused_linear_cross_entropy",
        model_type="qwen3",
        module=_MODULE,
        attribute="Qwen3ForCausalLM.forward",
        replacement=loss.fused_linear_cross_entropy,
        digests=(
            "b32d8319e7b9462409586fe1f38603bcb2d987329d3c83982f1b487cc3ec5da8",  # 5.0 to 5.3
            "d3b6f01b5813e5f92a9fbd5c17ae7394c2f3fb0962efbf55ae587bc5123a60f2",  # 5.4 to 5.20: no cache_position
            "f29a8d35ddd6b5dc3b52c55696139166d7c0dd297a959d17bc6411b1f2578fbd",  # 5.21, 5.22: another slice of logits
            "2ae7923a30b8a288939a5c3d8ca82604bfacc772b41c8d2002e6814b98b3ee89",  # 5.23: documentation of its own
        ),
        releases=_RELEASES,
    ),
)
