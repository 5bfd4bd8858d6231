"""What ``import torch`` runs of an installed tilekern, as its entry point in the group ``torch.backends``.

Torch refuses to be imported where such an entry point fails. So this file stands outside of the package and needs the
standard library alone: where the package is gone, is there in part or cannot be imported, torch is imported all the
same, and one line says what is wrong.
"""

import sys
import warnings


def begin() -> None:
    """Do what :func:`tilekern.integrations.startup.begin` does; whatever is wrong with it is a warning."""
    try:
        from tilekern.integrations.startup import begin as begin_tilekern

        begin_tilekern()
    except Exception as error:  # noqa: BLE001 (whatever it is, torch must be imported)
        said = " ".join(f"{type(error).__name__}: {error}".split())
        _warn(f"tilekern is installed and cannot be used ({said}); install it again, or remove it with pip uninstall")


def _warn(message: str) -> None:
    try:
        warnings.warn_explicit(message, RuntimeWarning, "tilekern", 0)
    except RuntimeWarning:  # a filter makes errors of warnings
        sys.stderr.write(f"tilekern: {message}\n")
