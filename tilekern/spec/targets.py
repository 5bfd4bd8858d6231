"""The GPUs that tilekern compiles for: a table of known ones, the GPU of this machine, and the key of each.

A GPU outside the table is described by what is known (:func:`described`): the driver's figures if it is here, those
that a user gives (``sm_90:78,memory=4000``), or its key alone. The rest is taken from the most similar listed GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilekern.errors import InputError, did_you_mean

# The compute capabilities that have each feature: the only thresholds in tilekern. 90 is Hopper, 100 to 110 the data
# centre's Blackwell, 120 and 121 the consumer's.
HAS = {
    "kernels": range(80, 1000),
    "tma": range(90, 1000),
    "clusters": range(90, 1000),
    "dependent_launch": range(90, 1000),
    "wide_branches": range(90, 1000),
    "wgmma": range(90, 91),
    "blackwell": range(100, 1000),
    "tensor_memory": range(100, 120),
    "fp8": range(90, 1000),
    # torch's library multiplies 8-bit floats with scales, and was measured to be faster than kernels; sm_120's refuses
    # scales of rows (pytorch issue 192707).
    "scaled_products": range(90, 91),
    "cudnn_attention": range(80, 1000),
    "cudnn_wide_heads": range(90, 1000),
}


@dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Attributes:
        name: the driver's name without the vendor.
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
        """The compute capability as one number: 90 for sm_90."""
        return int(self.arch.removeprefix("sm_"))

    @property
    def has_tma(self) -> bool:
        """Whether it has the tensor memory accelerator, which copies tiles and bulk data asynchronously."""
        return self.capability in HAS["tma"]

    @property
    def has_clusters(self) -> bool:
        """Whether blocks can form clusters and read each other's shared memory."""
        return self.capability in HAS["clusters"]

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel can be launched before its predecessor has ended (programmatic dependent launch)."""
        return self.capability in HAS["dependent_launch"]

    @property
    def has_fp8(self) -> bool:
        """Whether kernels have 8-bit floats: cuTile has none for sm_89, whose matrix units multiply them."""
        return self.capability in HAS["fp8"]

    @property
    def has_scaled_products(self) -> bool:
        """Whether products of 8-bit floats are left to torch's library where no kernel was measured."""
        return self.capability in HAS["scaled_products"]

    @property
    def has_wgmma(self) -> bool:
        """Whether its matrix units are Hopper's, which keep their sums in registers."""
        return self.capability in HAS["wgmma"]

    @property
    def has_tensor_memory(self) -> bool:
        """Whether its matrix units are tcgen05, which keep their sums in tensor memory."""
        return self.capability in HAS["tensor_memory"]

    @property
    def is_blackwell(self) -> bool:
        """Whether it is of the Blackwell generation, of a data centre or not."""
        return self.capability in HAS["blackwell"]

    @property
    def copy_gbs(self) -> float:
        """The bandwidth that a large copy reaches, in 1e9 bytes a second."""
        return 0.865 * self.memory_gbs

    def product_tflops(self, dtype: str) -> float:
        """Return the peak rate of matrix products of a dtype, in 1e12 operations a second.

        A float32 product keeps float32's precision, as kernels and torch's default do: by the scalar units, or by the
        matrix units as three TF32 products, whichever is faster. A single TF32 product (``tfloat32``) rounds inputs.
        """
        if dtype == "tfloat32":
            return self.half_tflops / 2
        return max(self.scalar_tflops, self.half_tflops / 2 / 3) if dtype == "float32" else self.half_tflops

    @property
    def key(self) -> str:
        """The target's folder in a cache: ``sm_90-h200-132``."""
        return f"{self.arch}-{re.sub('[^a-z0-9]+', '_', self.name.lower()).strip('_')}-{self.sm_count}"

    @property
    def option(self) -> str:
        """The target for ``--gpu`` as one word: its name if it is listed, else its key."""
        return self.name if self.key in _BY_KEY and " " not in self.name else self.key

    def describe(self) -> dict[str, str | int | float]:
        """Return the target as a record keeps it."""
        return {"key": self.key, "name": self.name, "arch": self.arch, "sm_count": self.sm_count}

    def describe_whole(self) -> dict[str, Any]:
        """Return the target as a plan keeps it: with its ``figures``, unless it is a listed GPU as the table has it."""
        if _BY_KEY.get(self.key) == self:
            return self.describe()
        return {**self.describe(), "figures": {name: getattr(self, name) for name in _FIGURE_NAMES}}

    def unlikeness(self, key: str) -> tuple[float, str]:
        """Return how much another GPU of the arch differs in SMs and bandwidth, and its key.

        Sorted by this, the GPUs whose records are likely to be best on this one come first.
        """
        other = of_key(key)
        if other is None:
            return math.inf, key
        ratios = other.sm_count / self.sm_count, other.memory_gbs / self.memory_gbs
        return sum(abs(math.log2(ratio)) for ratio in ratios), key


# The fields that a target's key does not tell.
_FIGURE_NAMES = [field.name for field in dataclasses.fields(Target) if field.name not in ("name", "arch", "sm_count")]
_MIB = 1 << 20
_KIB = 1 << 10
# NVIDIA's datasheets (rates without sparsity; of the HGX B200 and B300 an eighth, of the GB200 NVL72 a 72nd), for the
# GeForce and RTX the whitepapers of their generations, and the CUDA programming guide's table of technical
# specifications by compute capability. GB10's rates are those of its 6144 cores at 2.5 GHz. Names are the driver's.
# Tests for all GPUs run on these, one of each kind.
KNOWN = (
    Target("A100-SXM4-80GB", "sm_80", 108, 2039, 40 * _MIB, 164 * _KIB, 2048, 312, 19.5),
    Target("A10", "sm_86", 72, 600, 6 * _MIB, 100 * _KIB, 1536, 125, 31.2, blocks=16),
    Target("L4", "sm_89", 58, 300, 48 * _MIB, 100 * _KIB, 1536, 121, 30.3, blocks=24),
    Target("L40S", "sm_89", 142, 864, 96 * _MIB, 100 * _KIB, 1536, 362, 91.6, blocks=24),
    Target("H100 80GB HBM3", "sm_90", 132, 3352, 50 * _MIB, 228 * _KIB, 2048, 989, 67),
    Target("H200", "sm_90", 132, 4800, 60 * _MIB, 228 * _KIB, 2048, 989, 67),
    Target("B200", "sm_100", 148, 8000, 126 * _MIB, 228 * _KIB, 2048, 2250, 75),
    Target("GB200", "sm_100", 152, 8000, 126 * _MIB, 228 * _KIB, 2048, 2500, 80),
    Target("B300 SXM6 AC", "sm_103", 148, 8000, 126 * _MIB, 228 * _KIB, 2048, 2250, 75),
    Target("GeForce RTX 5090", "sm_120", 170, 1792, 96 * _MIB, 100 * _KIB, 1536, 210, 104.8, blocks=24),
    Target(
        "RTX PRO 6000 Blackwell Server Edition", "sm_120", 188, 1597, 128 * _MIB, 100 * _KIB, 1536, 480, 120, blocks=24
    ),
    Target("GB10", "sm_121", 48, 273, 24 * _MIB, 100 * _KIB, 1536, 62, 31, blocks=24),
)


def _others(like: Target, *rows: tuple[str, int, float, int, float, float]) -> tuple[Target, ...]:
    """Return models similar to a listed one: name, SMs, bandwidth, MiB of L2, rates of matrix and scalar units."""
    return tuple(
        dataclasses.replace(
            like, name=name, sm_count=count, memory_gbs=gbs, l2_bytes=l2 * _MIB, half_tflops=half, scalar_tflops=scalar
        )
        for name, count, gbs, l2, half, scalar in rows
    )  # fmt: skip


def _known(name: str) -> Target:
    return next(target for target in KNOWN if target.name == name)


LISTED = (
    *KNOWN,
    *_others(
        _known("A100-SXM4-80GB"),
        ("A100-SXM4-40GB", 108, 1555, 40, 312, 19.5),
        ("A100-PCIE-40GB", 108, 1555, 40, 312, 19.5),
        ("A100 80GB PCIe", 108, 1935, 40, 312, 19.5),
        ("A800-SXM4-80GB", 108, 2039, 40, 312, 19.5),
        ("A800 80GB PCIe", 108, 1935, 40, 312, 19.5),
        ("A800-SXM4-40GB", 108, 1555, 40, 312, 19.5),
        ("A800 40GB Active", 108, 1555, 40, 312, 19.5),
        ("A30", 56, 933, 24, 165, 10.3),
    ),
    *_others(
        _known("A10"),
        ("A10G", 80, 600, 6, 70, 35),
        ("A40", 84, 696, 6, 150, 37.4),
        ("RTX A6000", 84, 768, 6, 155, 38.7),
        ("GeForce RTX 3090", 82, 936, 6, 71, 35.6),
        ("GeForce RTX 3090 Ti", 84, 1008, 6, 80, 40),
    ),
    *_others(
        _known("L40S"),
        ("L40", 142, 864, 96, 181, 90.5),
        ("L20", 92, 864, 96, 119.5, 59.8),
        ("RTX 6000 Ada Generation", 142, 960, 96, 364, 91.1),
        ("GeForce RTX 4090", 128, 1008, 72, 165, 82.6),
        ("GeForce RTX 4090 D", 114, 1008, 72, 147, 73.5),
        ("GeForce RTX 4090 Laptop GPU", 76, 576, 64, 79, 39.7),
    ),
    *_others(
        _known("H100 80GB HBM3"),
        ("H100 PCIe", 114, 2039, 50, 756, 51),
        ("H100 NVL", 132, 3938, 60, 835, 60),
        ("H800", 132, 3352, 50, 989, 67),
        ("H800 PCIe", 114, 2039, 50, 756, 51),
        ("H800 NVL", 132, 3938, 60, 835, 60),
        ("H200 NVL", 132, 4800, 60, 835, 60),
        ("GH200 480GB", 132, 4000, 60, 989, 67),
        ("GH200 120GB", 132, 4000, 60, 989, 67),
        ("GH200 144G HBM3e", 132, 4900, 60, 989, 67),
        ("H20", 78, 4000, 60, 148, 44),
        ("H20-3e", 78, 4800, 60, 148, 44),
    ),
    *_others(_known("B300 SXM6 AC"), ("GB300", 152, 8000, 126, 2500, 80)),
    *_others(
        _known("GeForce RTX 5090"),
        ("GeForce RTX 5090 D", 170, 1792, 96, 210, 104.8),
        ("GeForce RTX 5090 D v2", 170, 1344, 96, 210, 104.8),
        ("GeForce RTX 5090 Laptop GPU", 82, 896, 64, 64, 31.8),
        ("RTX PRO 6000 Blackwell Workstation Edition", 188, 1792, 128, 504, 126),
        ("RTX PRO 6000 Blackwell Max-Q Workstation Edition", 188, 1792, 128, 439, 110),
    ),
)
_BY_NAME = {target.name: target for target in LISTED}
_BY_KEY = {target.key: target for target in LISTED}
# Names that people use, without "NVIDIA", "GeForce", spaces and hyphens, if they differ from the driver's name.
_ALIASES = {
    "a100": "A100-SXM4-80GB",
    "a10080gb": "A100-SXM4-80GB",
    "a10040gb": "A100-SXM4-40GB",
    "a100pcie": "A100 80GB PCIe",
    "a100pcie80gb": "A100 80GB PCIe",
    "a800": "A800-SXM4-80GB",
    "h100": "H100 80GB HBM3",
    "h100sxm": "H100 80GB HBM3",
    "h200sxm": "H200",
    "gh200": "GH200 480GB",
    "b300": "B300 SXM6 AC",
    "rtx4090laptop": "GeForce RTX 4090 Laptop GPU",
    "rtx5090laptop": "GeForce RTX 5090 Laptop GPU",
    "rtx6000ada": "RTX 6000 Ada Generation",
    "rtxpro6000": "RTX PRO 6000 Blackwell Server Edition",
    "rtxpro6000server": "RTX PRO 6000 Blackwell Server Edition",
    "rtxpro6000workstation": "RTX PRO 6000 Blackwell Workstation Edition",
    "rtxpro6000maxq": "RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "dgxspark": "GB10",
}
# The GPU that stands for an architecture if only its code is named: the one that most people train on.
_STANDARD = {"sm_80": "A100-SXM4-80GB", "sm_86": "A10", "sm_89": "L40S", "sm_90": "H200", "sm_100": "B200"}
_STANDARD |= {"sm_103": "B300 SXM6 AC", "sm_120": "GeForce RTX 5090", "sm_121": "GB10"}
# The target of interpreted kernels: few SMs, so that persistent loops take several steps.
INTERPRETED = Target("interpreter", "sm_90", 3, 100, _MIB, 228 * _KIB, 2048, 1, 1)

_KEY = re.compile(r"(sm_\d{2,3})-([a-z0-9][a-z0-9_]*)-([1-9]\d{0,2})", re.ASCII)
_FIGURES = re.compile(r"(sm_\d{2,3}):([1-9]\d{0,2})((?:,[^,=]+=[^,=]+)*)", re.ASCII | re.IGNORECASE)
_OPTIONS = {
    "memory": ("memory_gbs", 1), "l2": ("l2_bytes", _MIB), "shared": ("shared_bytes", _KIB),
    "registers": ("registers", 1), "threads": ("threads", 1), "blocks": ("blocks", 1),
    "half": ("half_tflops", 1), "scalar": ("scalar_tflops", 1),
}  # fmt: skip
_LONGEST_NAME = 60
FORM = "sm_90:78,memory=4000,l2=60,shared=228,name=H20"
# A slice of a GPU as the driver names it: "H100 80GB HBM3 MIG 1g.10gb".
_SLICE = re.compile(r"(.+?)[ _]mig[ _]([1-7])g[._](\d+)gb(?:[ _.+-][ -~]*)?", re.ASCII | re.IGNORECASE)
# SMs of slices of one to seven parts, by the arch and the SMs of the whole, as `nvidia-smi mig -lgip` lists them.
_SLICES = {
    ("sm_80", 108): {1: 14, 2: 28, 3: 42, 4: 56, 7: 98},
    ("sm_90", 132): {1: 16, 2: 32, 3: 60, 4: 64, 7: 132},
    ("sm_100", 148): {1: 18, 2: 36, 4: 72},
}
# Eighths of the memory, with its bandwidth and cache, that such a slice has.
_EIGHTHS = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}
# A slice of one part with so many gigabytes has twice the memory, and these SMs (None: not known).
_DOUBLED = {"sm_80": (20, 14), "sm_90": (20, 26), "sm_100": (40, None)}


def resolve(name: str) -> Target:
    """Return the target that a user names.

    Args:
        name: one of:

            - ``auto``: the GPU here
            - a GPU, as the driver names it or shorter (``B200``, ``H100 PCIe``, ``rtx5090``), a MIG slice too
            - an arch (``sm_90``), for the GPU that stands for it
            - a target key (``sm_90-h20_3e-78``)
            - an arch, SMs and other limits (``sm_90:78,memory=4000,l2=60,shared=228,name=H20``): bandwidth in 1e9
              bytes a second, MiB of L2; of an SM, KiB of ``shared`` memory, ``registers``, ``threads`` and ``blocks``;
              ``half`` and ``scalar``, the rates in 1e12 operations a second at the GPU's clock; and the driver's name,
              which is part of the key

    Raises:
        InputError: the target is unknown, a limit is unknown or wrong, or ``auto`` finds no GPU.
    """
    if name == "auto":
        found = here()
        if found is None:
            raise InputError("--gpu auto: this machine has no CUDA GPU; name the target, for example --gpu B200")
        return found
    if not isinstance(name, str):
        raise InputError(f"gpu must be text, such as 'B200', got {name!r:.60}")
    standard = _STANDARD.get(name.strip().lower())
    target = (_BY_NAME[standard] if standard else _listed(name)) or _slice(name) or of_key(name.strip().lower())
    target = target or _by_figures(name)
    if target is None:
        known = ", ".join([*(t.name for t in KNOWN), *sorted(_STANDARD), "auto"])
        meant = did_you_mean(name, [*(t.name for t in LISTED), *_STANDARD, "auto"])
        raise InputError(
            f"unknown GPU {name!r}; known: {known}, others in docs/reference.md; or its key, or {FORM}{meant}"
        )
    return target


def _word(name: str) -> str:
    """Return a model's name for comparison: without the vendor, the brand, spaces and hyphens."""
    return re.sub(r"[\s_-]+", "", name.lower()).removeprefix("nvidia").removeprefix("geforce")


def _listed(name: str) -> Target | None:
    """Return the listed GPU of a name."""
    word = _word(name)
    return _by_word().get(word) or _BY_NAME.get(_ALIASES.get(word, ""))


@functools.cache
def _by_word() -> dict[str, Target]:
    return {_word(target.name): target for target in LISTED}


def _slice(name: str) -> Target | None:
    """Return the MIG slice of a listed GPU if its number of SMs is known."""
    found = _SLICE.fullmatch(name.strip())
    whole = _listed(found[1]) if found else None
    if found is None or whole is None:
        return None
    parts = int(found[2])
    count = _SLICES.get((whole.arch, whole.sm_count), {}).get(parts)
    if count is not None and _is_doubled(whole.arch, parts, int(found[3])):
        count = _DOUBLED[whole.arch][1]
    if count is None:
        return None
    part = name.strip()[len(found[1]) + len(" MIG ") :]
    return described(f"{whole.name} MIG {part}", whole.arch, count)


def _is_doubled(arch: str, parts: int, gigabytes: int) -> bool:
    return parts == 1 and gigabytes >= _DOUBLED.get(arch, (math.inf, None))[0]


@functools.lru_cache(maxsize=1024)
def of_key(key: str) -> Target | None:
    """Return the target of a key, described by the key alone if it is not listed; None if it is not a key."""
    if key in _BY_KEY:
        return _BY_KEY[key]
    found = _KEY.fullmatch(key)
    return described(found[2], found[1], int(found[3])) if found else None


def _by_figures(text: str) -> Target | None:
    """Return the target of an arch, SMs and options; None if the text has another form.

    Raises:
        InputError: an option is unknown, or its value is wrong.
    """
    found = _FIGURES.fullmatch(text.strip())
    if found is None:
        return None
    figures: dict[str, float] = {}
    name = "GPU"
    for option in filter(None, found[3].split(",")):
        what, _, value = (part.strip() for part in option.partition("="))
        if what == "name" and re.fullmatch("[ -~]*[A-Za-z0-9][ -~]*", value) and len(value) <= _LONGEST_NAME:
            name = value.removeprefix("NVIDIA ")
        elif what not in (*_OPTIONS, "name"):
            raise InputError(f"--gpu {text}: {option!r} is unknown; use {', '.join(_OPTIONS)} or name, as in {FORM}")
        elif what != "name" and re.fullmatch("[1-9][0-9]{0,5}", value):
            field, unit = _OPTIONS[what]
            figures[field] = int(value) * unit
        else:
            allowed = (
                f"ASCII text of at most {_LONGEST_NAME} characters" if what == "name" else "a whole number up to 999999"
            )
            raise InputError(f"--gpu {text}: {option!r} is wrong; {what} must be {allowed}, as in {FORM}")
    return described(name, found[1].lower(), int(found[2]), **figures)


def described(name: str, arch: str, sm_count: int, **figures: float) -> Target:
    """Return a target by what is known; the rest is that of the most similar listed GPU, scaled by the SMs.

    Args:
        name: the driver's name without the vendor, or that part of a key.
        arch: its arch; if no listed GPU has it, the next lower one is used.
        sm_count: its SMs.
        figures: further fields of :class:`Target`.
    """
    whole, share = _most_like(name, arch, sm_count)
    # A MIG slice has eighths of what all SMs share; a GPU with fewer SMs is smaller in everything.
    of_sms = sm_count / whole.sm_count
    scaled = {
        "memory_gbs": whole.memory_gbs * (share or of_sms), "l2_bytes": round(whole.l2_bytes * (share or 1)),
        "half_tflops": whole.half_tflops * of_sms, "scalar_tflops": whole.scalar_tflops * of_sms,
    }  # fmt: skip
    known: dict[str, Any] = {**scaled, **figures}
    return dataclasses.replace(whole, name=name, arch=arch, sm_count=sm_count, **known)


def _most_like(name: str, arch: str, sm_count: int) -> tuple[Target, float | None]:
    """Return the listed GPU most similar to an unlisted one, and a MIG slice's share of the memory."""
    found = _SLICE.fullmatch(name)
    whole = _listed(found[1] if found else name)
    if whole is not None and whole.arch == arch:
        parts = int(found[2]) if found else 0
        return whole, _EIGHTHS.get(parts, 8) * (1 + _is_doubled(arch, parts, int(found[3]))) / 8 if found else None
    capability = int(arch.removeprefix("sm_"))
    lower = [target.capability for target in LISTED if target.capability <= capability]
    nearest = max(lower, default=min(target.capability for target in LISTED))
    same = (target for target in LISTED if target.capability == nearest)
    standard = _STANDARD.values()
    return min(same, key=lambda t: (abs(math.log2(t.sm_count / sm_count)), t.name not in standard)), None


def from_description(said: Mapping[str, Any]) -> Target:
    """Return the target that :meth:`Target.describe_whole` described.

    Raises:
        InputError: it is not the description of a GPU.
    """
    target = of_key(str(said.get("key")))
    if target is None:
        raise InputError(f"{said.get('key')!r:.100} is not the key of a GPU")
    figures = said.get("figures", {})
    if target.key in _BY_KEY and not figures:
        return target
    if not isinstance(figures, Mapping) or not all(
        name in _FIGURE_NAMES and type(value) in (int, float) and 0 < value < math.inf
        for name, value in figures.items()
    ):
        raise InputError(f"the figures of {target.key} are not those of a GPU")
    same = dataclasses.replace(target, **figures)
    name = said.get("name")
    named = dataclasses.replace(same, name=name) if isinstance(name, str) else same
    return named if named.key == same.key else same


def here(device: int | None = None) -> Target | None:
    """Return the GPU of this machine (``device``, else torch's current one), or None.

    torch is asked if it is installed, since its build decides whether a job can use a GPU; else the driver is.
    """
    # Loading torch takes more than a second, and without the driver it finds no GPU. If the driver's kernel module is
    # loaded, torch may find its library elsewhere.
    if "torch" not in sys.modules and not os.path.exists("/proc/driver/nvidia"):
        try:
            cuda_driver()
        except OSError:
            return None
    try:
        import torch
    except ModuleNotFoundError:
        return _by_driver(device or 0)

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    name = properties.name.removeprefix("NVIDIA ").strip()
    arch, count = f"sm_{properties.major}{properties.minor}", properties.multi_processor_count
    clock, bus = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    said = {
        "l2_bytes": properties.L2_cache_size,
        "threads": properties.max_threads_per_multi_processor,
        "shared_bytes": getattr(properties, "shared_memory_per_multiprocessor", 0),
        "registers": getattr(properties, "regs_per_multiprocessor", 0),
        "memory_gbs": bandwidth(clock, bus),  # an older torch gives neither
    }
    return seen(name, arch, count, said)


def _by_driver(number: int) -> Target | None:
    count = ctypes.c_int()
    try:
        cuda = cuda_driver()
        has_gpu = not (cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))) and number < count.value
    except (OSError, AttributeError):
        return None
    return of_driver(cuda, number) if has_gpu else None


# Of CUdevice_attribute.
_SMS, _MAJOR, _MINOR, _CLOCK, _BUS, _L2, _THREADS, _SHARED, _REGISTERS = 16, 75, 76, 36, 37, 38, 39, 81, 82


def of_driver(cuda: ctypes.CDLL, number: int) -> Target:
    """Return a GPU of this process by its number, as the driver describes it after its ``cuInit``."""
    name, device = ctypes.create_string_buffer(256), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), number)
    cuda.cuDeviceGetName(name, len(name), device)

    def figure(which: int) -> int:
        value = ctypes.c_int()
        return value.value if cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device) == 0 else 0

    said = {
        "l2_bytes": figure(_L2),
        "threads": figure(_THREADS),
        "shared_bytes": figure(_SHARED),
        "registers": figure(_REGISTERS),
        "memory_gbs": bandwidth(figure(_CLOCK), figure(_BUS)),
    }
    text = name.value.decode(errors="replace").removeprefix("NVIDIA ").strip()
    return seen(text or "GPU", f"sm_{figure(_MAJOR)}{figure(_MINOR)}", max(1, figure(_SMS)), said)


def seen(name: str, arch: str, sm_count: int, said: Mapping[str, float]) -> Target:
    """Return a GPU of this machine: as listed, else by the driver's figures, of which zeros are unknown.

    The bus of a MIG slice is that of the whole GPU, so its bandwidth is computed instead.
    """
    listed = _BY_NAME.get(name)
    if listed is not None and (listed.arch, listed.sm_count) == (arch, sm_count):
        return listed
    is_slice = _SLICE.fullmatch(name) is not None
    figures = {field: value for field, value in said.items() if value and not (is_slice and field == "memory_gbs")}
    return described(name, arch, sm_count, **figures)


def bandwidth(clock_khz: int, bus_bits: int) -> float:
    """Return the bandwidth of a memory that transfers twice a clock, in 1e9 bytes a second."""
    return 2 * clock_khz * 1e3 * bus_bits / 8 / 1e9


def cuda_driver() -> ctypes.CDLL:
    """Open the CUDA driver's library.

    Raises:
        OSError: there is none.
    """
    return ctypes.CDLL("libcuda.so.1")
