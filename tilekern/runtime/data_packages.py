"""The data packages: wheels with the records of one GPU, which pip installs beside tilekern.

`.ci/data_packages.py` builds them from the packs of a checkout. tilekern's own wheel has the packs of few models.
"""

from __future__ import annotations

from tilekern import __version__
from tilekern.runtime.requirements import asked_by, fits, installed
from tilekern.spec.source import NOTES
from tilekern.spec.targets import Target

# The packages by the GPU's key: one for each GPU that tilekern/prebuilt/ has packs of.
PACKAGES = {
    "sm_90-h100_80gb_hbm3-132": "tilekern-packs-h100",
    "sm_90-h200-132": "tilekern-packs-h200",
    "sm_100-b200-148": "tilekern-packs-b200",
}
# What a package brings along: the records of a GPU that is so alike that they serve where its own are missing.
# docs/results/platform.md has what it costs, measured by `python -m benchmarks exchange`.
ALIKE = {"tilekern-packs-h100": "tilekern-packs-h200"}


def package_of(target: Target) -> str | None:
    """Return the data package for a GPU: its own, else that of the most similar GPU of its arch; None without any."""
    of_arch = [key for key in PACKAGES if key.startswith(f"{target.arch}-")]
    return PACKAGES[min(of_arch, key=target.unlikeness)] if of_arch else None


def to_install(target: Target) -> str | None:
    """Return the data package to install for a GPU: its own, or the one that this should have brought along.

    None if both are installed, and in a checkout, which has all packs itself.
    """
    package = package_of(target)
    if package is None or not NOTES.exists():
        return None
    return next((one for one in (package, ALIKE.get(package)) if one and installed(one) is None), None)


def install_or(target: Target) -> str:
    """Return ``pip install PACKAGE, or`` to put before another remedy for missing records; empty if it is no remedy."""
    package = to_install(target)
    return f"pip install {package}, or " if package else ""


def version_unmet(package: str) -> str | None:
    """Return why an installed package of records is not for this tilekern, and what to do; None if it is."""
    wanted = asked_by(package).get("tilekern", "")
    if fits(__version__, wanted):
        return None
    return (
        f"{package} {installed(package)} is for tilekern {wanted}, and {__version__} is installed: "
        f"pip install -U {package}"
    )
