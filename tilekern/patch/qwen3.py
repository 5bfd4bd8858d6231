"""The patches of Qwen3 (dense), checked against every minor release of transformers from 5.0 to 5.23."""

from __future__ import annotations

from tilekern.patch import replacements
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

PATCHES = (
    Patch(
        op="rms_norm",
        model_type="qwen3",
        module=_MODULE,
        attribute="Qwen3RMSNorm.forward",
        replacement=replacements.rms_norm,
        digests=("1866737585277c97cafb5b8d962560019bf1fc3203b5ce7361c438a724ff5e2d",),  # 5.0 to 5.23
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
)
