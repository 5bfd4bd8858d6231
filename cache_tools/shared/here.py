"""Parts of this machine that a lookup goes by: the GPU, the toolkit and the kernels' specs, loaded when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilekern.cache import CacheError

if TYPE_CHECKING:
    from tilekern.spec import KernelSpec
    from tilekern.spec.targets import Target


def toolkit_key() -> str | None:
    """The key of the toolkit that is installed here, or None."""
    from tilekern.compile.toolchain import toolkit

    found = toolkit()
    return found.key if found else None


def target_named(name: str | None) -> Target:
    """The GPU that a person names, by name, arch or key; the one of this machine where ``name`` is None.

    Raises:
        CacheError: no such GPU is known, or this machine has none.
    """
    from tilekern.errors import InputError
    from tilekern.spec.targets import here, resolve

    if name is None:
        found = here()
        if found is None:
            raise CacheError("this machine has no CUDA GPU; name one by --gpu, such as --gpu B200")
        return found
    try:
        return resolve(name)
    except InputError as error:
        raise CacheError(str(error)) from None


def spec_named(kernel: str) -> KernelSpec:
    """A kernel's spec.

    Raises:
        CacheError: there is no such kernel, or cuda-tile, which the kernels are written in, is not installed.
    """
    from tilekern.errors import InputError

    try:
        from tilekern.kernels import spec_named as named

        return named(kernel)
    except InputError as error:
        raise CacheError(str(error)) from None
    except ImportError as error:
        raise CacheError(f"the kernels cannot be loaded ({error}); install them with: pip install tilekern") from None
