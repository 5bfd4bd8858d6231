"""The GPUs that tilekern compiles for: a table of known ones, the GPU at hand, and the key of each."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tilekern.errors import InputError


@dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Attributes:
        name: the vendor's short name, as ``NVIDIA H200`` without the vendor.
        arch: GPU code for the compiler, for example ``sm_90``.
        sm_count: streaming multiprocessors.
        memory_gbs: device memory bandwidth by datasheet, in 1e9 bytes a second.
        half_tflops: dense rate of the matrix units for bfloat16 and float16, summed in float32, by datasheet, in 1e12
            operations a second; that for TF32 is half of it on every one of these GPUs.
        scalar_tflops: rate of the scalar units for float32 by datasheet, in 1e12 operations a second.
        copy_gbs: what a large copy reaches, reads plus writes, in 1e9 bytes a second (measured on the H200;
            86 % of the datasheet's rate, the H200's share, elsewhere).
        l2_bytes: size of the L2 cache.
        shared_bytes: shared memory of one SM that blocks can use.
        registers: 32-bit registers of one SM.
        threads: resident threads of one SM.
        blocks: resident blocks of one SM.
    """

    name: str
    arch: str
    sm_count: int
    memory_gbs: float
    l2_bytes: int
    shared_bytes: int
    threads: int
    half_tflops: float
    scalar_tflops: float
    blocks: int = 32
    registers: int = 65536

    @property
    def capability(self) -> int:
        """Compute capability as one number: 90 for sm_90."""
        return int(self.arch.removeprefix("sm_"))

    @property
    def copy_gbs(self) -> float:
        """Bandwidth that a large copy reaches, in 1e9 bytes a second."""
        return 0.865 * self.memory_gbs

    def product_tflops(self, dtype: str) -> float:
        """The peak rate of products of matrices of a dtype, in 1e12 operations a second.

        A product of float32 keeps float32's digits, as kernels and torch's default do: by the scalar units, or by the
        matrix units as three products of TF32, whichever is faster. One of TF32 alone would round the inputs.
        """
        return max(self.scalar_tflops, self.half_tflops / 2 / 3) if dtype == "float32" else self.half_tflops

    @property
    def key(self) -> str:
        """The target's folder in a cache: ``sm_90-h200-132``."""
        return f"{self.arch}-{re.sub('[^a-z0-9]+', '_', self.name.lower()).strip('_')}-{self.sm_count}"

    def describe(self) -> dict[str, str | int | float]:
        """The target as a record keeps it."""
        return {"key": self.key, "name": self.name, "arch": self.arch, "sm_count": self.sm_count}


_MIB = 1 << 20
_KIB = 1 << 10
# NVIDIA's datasheets (rates without sparsity; of the HGX B200 and B300 an eighth, of the GB200 NVL72 a 72nd), for the
# GeForce the RTX Blackwell whitepaper, and the CUDA programming guide's table of technical specifications by compute
# capability. GB10's rates are those of its 6144 cores at 2.5 GHz.
KNOWN = (
    Target("A100-SXM4-80GB", "sm_80", 108, 2039, 40 * _MIB, 164 * _KIB, 2048, 312, 19.5),
    Target("A10", "sm_86", 72, 600, 6 * _MIB, 100 * _KIB, 1536, 125, 31.2, blocks=16),
    Target("L4", "sm_89", 58, 300, 48 * _MIB, 100 * _KIB, 1536, 121, 30.3, blocks=24),
    Target("L40S", "sm_89", 142, 864, 96 * _MIB, 100 * _KIB, 1536, 362, 91.6, blocks=24),
    Target("H100 80GB HBM3", "sm_90", 132, 3352, 50 * _MIB, 228 * _KIB, 2048, 989, 67),
    Target("H200", "sm_90", 132, 4800, 60 * _MIB, 228 * _KIB, 2048, 989, 67),
    Target("B200", "sm_100", 148, 8000, 126 * _MIB, 228 * _KIB, 2048, 2250, 75),
    Target("GB200", "sm_100", 152, 8000, 126 * _MIB, 228 * _KIB, 2048, 2500, 80),
    Target("B300", "sm_103", 148, 8000, 126 * _MIB, 228 * _KIB, 2048, 2250, 75),
    Target("GeForce RTX 5090", "sm_120", 170, 1792, 96 * _MIB, 100 * _KIB, 1536, 210, 104.8, blocks=24),
    Target(
        "RTX PRO 6000 Blackwell Server Edition", "sm_120", 188, 1792, 128 * _MIB, 100 * _KIB, 1536, 250, 120, blocks=24
    ),
    Target("GB10", "sm_121", 48, 273, 24 * _MIB, 100 * _KIB, 1536, 62, 31, blocks=24),
)
_ALIASES = {
    "a100": "A100-SXM4-80GB",
    "h100": "H100 80GB HBM3",
    "rtx5090": "GeForce RTX 5090",
    "rtxpro6000": "RTX PRO 6000 Blackwell Server Edition",
}
# The GPU that stands for an architecture when only its code is named: the one most likely to train on.
_STANDARD = {"sm_80": "A100-SXM4-80GB", "sm_86": "A10", "sm_89": "L40S", "sm_90": "H200", "sm_100": "B200"}
_STANDARD |= {"sm_103": "B300", "sm_120": "GeForce RTX 5090", "sm_121": "GB10"}
# Stands in where kernels are interpreted: few SMs, so that persistent loops take several steps.
INTERPRETED = Target("interpreter", "sm_90", 3, 100, _MIB, 228 * _KIB, 2048, 1, 1)


def resolve(name: str) -> Target:
    """The target that a person names.

    Args:
        name: ``auto`` (the GPU here), a GPU (``B200``), an arch (``sm_90``), or a target key.

    Raises:
        InputError: no such target is known, or ``auto`` finds no GPU.
    """
    if name == "auto":
        found = here()
        if found is None:
            raise InputError("--gpu auto: this machine has no CUDA GPU; name the target, for example --gpu B200")
        return found
    wanted = re.sub("[^a-z0-9_]+", "", name.lower())
    wanted = _ALIASES.get(wanted, _STANDARD.get(wanted, name)).lower()
    for target in KNOWN:
        if wanted in (target.name.lower(), target.key):
            return target
    known = ", ".join([*(t.name for t in KNOWN), *sorted(_STANDARD), "auto"])
    raise InputError(f"unknown GPU {name!r}; known: {known}")


def here(device: int | None = None) -> Target | None:
    """The GPU of this machine (of ``device``, else torch's current one), or None where there is none."""
    # Loading torch takes more than a second, and without the driver it finds no GPU.
    if "torch" not in sys.modules and not _has_driver():
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    name = properties.name.removeprefix("NVIDIA ").strip()
    arch = f"sm_{properties.major}{properties.minor}"
    for target in KNOWN:
        if (target.name, target.arch, target.sm_count) == (name, arch, properties.multi_processor_count):
            return target
    # An unlisted model: its arch's representative for what torch does not tell, its own figures for the rest.
    like = next((t for t in KNOWN if t.arch == arch), KNOWN[0])
    return dataclasses.replace(
        like,
        name=name,
        arch=arch,
        sm_count=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        threads=properties.max_threads_per_multi_processor,
        memory_gbs=like.memory_gbs * properties.multi_processor_count / like.sm_count,
        half_tflops=like.half_tflops * properties.multi_processor_count / like.sm_count,
        scalar_tflops=like.scalar_tflops * properties.multi_processor_count / like.sm_count,
    )


def _has_driver() -> bool:
    """Whether a process may find CUDA's driver: where its kernel's part runs, the other may lie where torch looks."""
    if os.path.exists("/proc/driver/nvidia"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def driver_version() -> str | None:
    """The version of the GPU's driver, such as ``580.65.06``, or None where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None
