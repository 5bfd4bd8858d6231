"""Lowers a device function to Tile IR bytecode through cuda-tile's front end, once for all hints.

Candidates that differ in compiler hints alone (occupancy, worker warps) share everything before the bytecode, and
the front end takes as long as a fast compile. Its public ``export_kernel`` starts over for each, so this file calls
the two steps behind it (``_IrKeeper`` and ``_get_bytecode``, private to cuda-tile 1.7); a contract test compares the
bytes with those of the public function.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilekern.compile.garbage import search_put_off
from tilekern.errors import CompileInterrupted

# Functions whose lowered form is kept; a worker compiles the candidates of one function after another.
_KEPT = 4
# Variables of cuda-tile's own tests by which it makes other bytecode.
_CHANGE_CODE = ("CUDA_TILE_TESTING_DISABLE_DIV", "CUDA_TILE_TESTING_DISABLE_TOKEN_ORDER")


@dataclass(frozen=True)
class Lowered:
    """Tile IR bytecode with its entry symbol.

    ``digest`` is the sha256, in hexadecimal, of the bytecode without files and lines of its source: under one toolkit
    equal digests are compiled to the same machine code.
    """

    bytecode: bytes
    symbol: str
    digest: str


def lower(
    function: Any, assumed: tuple[Any, ...], hints: Mapping[str, int | None], arch: str, bytecode_version: str | None
) -> Lowered:
    """Lower a kernel for one signature.

    Args:
        function: the ``ct.kernel`` object; its own hints do not count.
        assumed: cuda-tile's constraint of each parameter; any object that :func:`_lowered` can tell apart by its
            ``repr``.
        hints: ``occupancy``, ``num_ctas``, ``num_worker_warps``.
        arch: GPU code, ``sm_90``.
        bytecode_version: such as ``13.4``; None has cuda-tile probe the compiler.

    Raises:
        Exception: whatever the front end raises on code that it rejects.
        CompileInterrupted: a variable of cuda-tile's own tests is set.
    """
    from cuda.tile._compile import _get_bytecode
    from cuda.tile._compiler_options import CompilerOptions

    keeper, options = _lowered(function, _Constraints(assumed), arch, bytecode_version), CompilerOptions(**dict(hints))
    bytecode, without_places = (
        bytes(_get_bytecode(keeper, options, anonymize_debug_info=anonymous).bytecode) for anonymous in (False, True)
    )
    symbol = keeper.signatures[0].symbol
    assert symbol is not None
    return Lowered(bytecode, symbol, hashlib.sha256(without_places).hexdigest())


def preload() -> None:
    """Import cuda-tile's front end, which the first :func:`lower` of a process would do."""
    import cuda.tile._compile  # noqa: F401


class _Constraints:
    """Constraints as a dictionary's key: some of cuda-tile's cannot be hashed."""

    def __init__(self, parameters: tuple[Any, ...]) -> None:
        self.parameters = parameters
        self._text = repr(parameters)

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constraints) and self._text == other._text


@functools.lru_cache(maxsize=_KEPT)
@search_put_off()
def _lowered(function: Any, constraints: _Constraints, arch: str, bytecode_version: str | None) -> Any:
    """The front end's result for one signature, with all its passes run."""
    from cuda.tile import _debug
    from cuda.tile._compile import (
        _get_max_supported_bytecode_version,
        _IrKeeper,
        get_function_hir,
        parse_bytecode_version,
    )
    from cuda.tile._context import init_context_config_from_env
    from cuda.tile._passes.ast2hir import HirMode
    from cuda.tile.compilation import CallingConvention, KernelSignature

    for name in _CHANGE_CODE:
        if getattr(_debug, name, False):  # read when cuda.tile was imported
            raise CompileInterrupted(f"{name} is set, which changes what is compiled; unset it")
    if bytecode_version is None:
        version = _get_max_supported_bytecode_version(init_context_config_from_env().temp_dir)
    else:
        version = parse_bytecode_version(bytecode_version)
    signature = KernelSignature(list(constraints.parameters), CallingConvention.cutile_python_v1())
    signature = signature.with_mangled_symbol(function._pyfunc.__name__)
    keeper = _IrKeeper(
        ann_func=function._annotated_function,
        func_hir=get_function_hir(function._pyfunc, mode=HirMode.ENTRY_POINT),
        signatures=[signature],
        bytecode_version=version,
        sm_arch=arch,
        log_cutile_ir=False,
        keep_all=True,
    )
    keeper.get_final_ir(0)
    return keeper
