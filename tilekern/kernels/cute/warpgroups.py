"""What kernels of warpgroups share on Hopper: numbers of threads, loads that tell barriers, copies and stores.

Some warps load tiles into shared memory, others compute on them by the matrix units; barriers in shared memory signal
which tiles have arrived and which slots are free.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from tilekern.kernels.cute.arguments import ALIGNED_BYTES
from tilekern.kernels.cute.sharing import WARP

# Warps that load.
LOADERS = 4


class Warpgroups:
    """The base of a device function whose ``kernel`` gives each warpgroup its part."""

    # The matrix units' instructions are no part of later architectures.
    arch_suffix = "a"
    block: int
    kernel: Any

    @cute.jit
    def __call__(self, arguments: tuple):
        """Compile it as a kernel; cuTile's launcher launches it, so the grid here has no effect."""
        self.kernel(arguments).launch(
            grid=(1, 1, 1), block=(self.block, 1, 1), min_blocks_per_mp=1,
            # Else the compiler asks the driver how much shared memory there is.
            preferred_smem_carveout=0,
        )  # fmt: skip

    def identify(self) -> None:
        """Find the number of the thread in its warp, and that of the warp."""
        thread, _, _ = cute.arch.thread_idx()
        self.lane = thread % WARP
        # A reduction, unlike a shuffle, ends in a uniform register.
        self.warp = cute.arch.warp_redux_sync(thread // WARP, "or")

    def arrived(self, barrier: Any) -> None:
        """Wait for a warp's loads; then show them to the matrix units, and tell a barrier."""
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        self.tell(barrier)

    @cute.jit
    def tell(self, barrier):
        """Arrive on a barrier, once for a warp."""
        cute.arch.sync_warp()
        if self.lane == 0:
            cute.arch.mbarrier_arrive(barrier)


@dsl_user_op
def copy_ahead(target: Any, source: Any, size: Any, width: int, *, loc: Any = None, ip: Any = None) -> None:
    """Start a copy of ``width`` bytes from global to shared memory; if ``size`` is 0, of zeros."""
    kind = "cg" if width == ALIGNED_BYTES else "ca"
    values = [x.ir_value(loc=loc, ip=ip) for x in (Int32(target), Int64(source), Int32(size))]
    llvm.inline_asm(
        None, values, f"cp.async.{kind}.shared.global.L2::128B [$0], [$1], {width}, $2;", "r,l,r",
        has_side_effects=True, is_align_stack=False,
    )  # fmt: skip


@dsl_user_op
def store_words(target: Any, words: list[Any], *, loc: Any = None, ip: Any = None) -> None:
    """Store 16 bytes of registers in global memory."""
    values = [Int64(target).ir_value(loc=loc, ip=ip), *(Int32(x).ir_value(loc=loc, ip=ip) for x in words)]
    llvm.inline_asm(
        None, values, "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r", has_side_effects=True,
        is_align_stack=False,
    )  # fmt: skip


@dsl_user_op
def after(value: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Return a sum, which the compiler reads only here: it does not know that a wait before completes it."""
    argument = value.ir_value(loc=loc, ip=ip)
    return Float32(llvm.inline_asm(argument.type, [argument], "", "=f,0", has_side_effects=True, is_align_stack=False))
