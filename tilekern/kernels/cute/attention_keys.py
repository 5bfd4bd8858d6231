"""dk and dv of attention by tiles of keys, and dS for dq, in CuTe DSL for Hopper: cuTile's formula in other loops.

A block owns 128 keys of a key head, for all query heads that read it, or ``apart`` for one. Two warpgroups compute 64
of them each and share the queries in shared memory, so that each is loaded once for 128 keys; they never wait for one
another, so that one's exponentials run beside the other's products. Each warp of a third warpgroup fills one stage of
the ring of queries: its loads pass no registers, and are shown to the matrix units before the stage's barrier is told.

In a step a warpgroup takes 64 queries of a head. S^T = k q^T and dP^T = v dout^T start together; P is computed beside
the second, dS beside dv += P^T dout, and dS is stored beside dk += dS^T q. P^T and dS^T stay in registers.

In shared memory, a tile of 64 rows and 128 columns is two halves of 64 columns, with rows of 128 bytes in which
pieces of 16 bytes are swizzled; q and dout are read as they are and transposed.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from tilekern.kernels.attention.kept_cute import DEPTH, KEYS, QUERIES
from tilekern.kernels.attention.tiles import LOG2_E
from tilekern.kernels.cute.arguments import ALIGNED_BYTES, Argument, samples
from tilekern.kernels.cute.sharing import WARP
from tilekern.spec import ArrayParameter, ScalarParameter

# Rows of a tile: queries of a step, keys of a warpgroup. Queries and keys of a unit of ``kept``.
_ROWS, _UNIT = QUERIES, 128
_TILE = _ROWS * DEPTH
# Elements of 16 bytes, and of 128 bytes, which is the width of half a tile.
_VECTOR, _WIDTH = 8, 64
# Depth of one instruction of the matrix units.
_DEEP = 16
# Registers of a thread that loads, and of one that computes.
_FEW, _MANY = 24, 240


class AttentionKeys:
    """The device function of one config.

    Args:
        function: cuTile's kernel, whose loops and formula are written anew here.
        parameters: its arrays and scalars.
        capability: compute capability of the GPU as one number; only 90 has these matrix units.
        block: threads of a block.
        cluster: blocks of a cluster; 1.
        heads: heads of q; whole groups.
        kv_heads: heads of k and v.
        apart: whether each query head has a dk and a dv of its own, in float32.
        causal: whether a query sees the keys up to its position only.
        stages: tiles of queries in the ring, at most one for each warp that loads.
    """

    # The matrix units' instructions are no part of later architectures.
    arch_suffix = "a"

    def __init__(
        self, function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], *, capability: int, block: int,
        cluster: int, heads: int, kv_heads: int, apart: bool, causal: bool, stages: int,
    ) -> None:  # fmt: skip
        self.parameters, self.sample = parameters, samples(parameters)
        self.block, self.heads, self.causal, self.stages = block, heads, causal, stages
        # Heads of dk and dv, the query heads that one is for, and those that read one of k and v.
        self.owners, self.group = heads if apart else kv_heads, heads // kv_heads
        self.readers = heads // self.owners

    @cute.jit
    def __call__(self, arguments: tuple):
        """Compile it as a kernel; cuTile's launcher launches it, so the grid here has no effect."""
        self.kernel(arguments).launch(
            grid=(1, 1, 1), block=(self.block, 1, 1), min_blocks_per_mp=1,
            # Else the compiler asks the driver how much shared memory there is.
            preferred_smem_carveout=0,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, arguments: tuple):
        """Give each warpgroup its part."""
        pairs = zip(self.parameters, arguments, strict=True)
        given = {p.name: Argument(p, a) if isinstance(p, ArrayParameter) else a for p, a in pairs}
        # Rows of ``lse`` and ``delta`` begin anywhere, unlike those of an :class:`Argument`.
        given |= {p.name: a for p, a in zip(self.parameters, arguments, strict=True) if p.name in ("lse", "delta")}
        q, k, v, dout, lse, delta = (given[name] for name in ("q", "k", "v", "dout", "lse", "delta"))
        dk, dv, kept = (given[name] for name in ("dk", "dv", "kept"))
        self.half = q.numeric
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        self.lane = thread % WARP
        # A reduction, unlike a shuffle, ends in a uniform register.
        self.warp = cute.arch.warp_redux_sync(thread // WARP, "or")
        # All heads side by side, the keys that most queries see first.
        rows = q.sizes[0] * self.owners
        row = block % rows
        self.number, self.owner, self.first_key = row // self.owners, row % self.owners, block // rows * KEYS
        self.batch, self.queries, self.keys = q.sizes[0], q.sizes[1], k.sizes[1]
        self.plan()
        self.prepare()
        if self.warp < 4:
            cute.arch.setmaxregister_decrease(_FEW)
            self.produce(q, k, v, dout, lse, delta, kept)
        else:
            cute.arch.setmaxregister_increase(_MANY)
            self.consume(given["scale"], dk, dv, kept)

    # The queries that see the block's keys.

    def plan(self) -> None:
        """Find the tiles of queries: like ``query_tiles`` of cuTile's kernels."""
        lower, full_lower = Int32(0), Int32(0)
        if self.causal:
            shift = self.queries - self.keys
            lower = cutlass.max(self.first_key + shift, 0)
            full_lower = cutlass.max(cutlass.min(self.first_key + KEYS, self.keys) - 1 + shift, 0)
        stop = (self.queries + _ROWS - 1) // _ROWS
        self.first = lower // _ROWS
        full = cutlass.min((full_lower + _ROWS - 1) // _ROWS, stop)
        self.edge = cutlass.max(full, self.queries // _ROWS)
        self.before = full - self.first
        self.edges = self.before + stop - self.edge
        self.steps = (self.edges + self.edge - full) * self.readers

    def step(self, n: Any) -> tuple[Any, Any, Any]:
        """Return the tile of queries and the head of a step, and whether its tile needs a mask.

        Tiles at an edge come first, then the others from the last one on. Heads follow one another: blocks that read
        the same queries at the same time take 3 % longer on an H200.
        """
        tiles = self.steps // self.readers
        turn, reader = n % tiles, n // tiles
        outer = cutlass.select_(turn < self.before, self.first + turn, self.edge + turn - self.before)
        is_edge = turn < self.edges
        tile = Int32(cutlass.select_(is_edge, outer, self.edge - 1 - (turn - self.edges)))
        return tile, self.owner * self.readers + reader, is_edge

    # Shared memory: tiles of k, v, q and dout, copies of dS, rows of lse and delta, barriers.

    @cute.jit
    def prepare(self):
        """Lay out the shared memory; make the barriers."""
        stages, item = self.stages, self.half.width // 8
        memory = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        self.tiles = cute.recast_ptr(memory, dtype=self.half)
        self.copies = cute.recast_ptr(memory + (4 + 2 * stages) * _TILE * item, dtype=self.half)
        rows = memory + ((4 + 2 * stages) * _TILE + 2 * _ROWS * _ROWS) * item
        self.rows = cute.recast_ptr(rows, dtype=Float32)
        self.notes = cute.make_tensor(
            cute.recast_ptr(rows + 2 * stages * _ROWS * 4, dtype=Int64), cute.make_layout((2, stages))
        )
        self.full = self.notes.iterator + 2 * stages
        self.empty, self.owned = self.full + stages, self.full + 2 * stages
        if (self.warp == 0) & (self.lane == 0):
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(self.full + stage, 1)
                cute.arch.mbarrier_init(self.empty + stage, 8)
            cute.arch.mbarrier_init(self.owned, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    # The producer: a warp for each stage.

    @cute.jit
    def produce(self, q, k, v, dout, lse, delta, kept):
        """Load k and v, half of one in each warp; then each of the first warps fills one stage again and again."""
        half, kv_head = self.warp % 2, self.owner * self.readers // self.group
        if self.warp < 2:
            self.load(k, kv_head, self.first_key + half * _ROWS, half)
        else:
            self.load(v, kv_head, self.first_key + half * _ROWS, 2 + half)
        self.arrived(self.owned)
        if self.warp < self.stages:
            phase, stage = Int32(1), self.warp
            for n in cutlass.range(self.warp, self.steps, self.stages, unroll=1):
                tile, head, is_edge = self.step(n)
                unit = self.unit(kept, tile, head)
                cute.arch.mbarrier_wait(self.empty + stage, phase)
                self.load(q, head, tile * _ROWS, 4 + stage)
                self.load(dout, head, tile * _ROWS, 4 + self.stages + stage)
                self.load_row(lse, head, tile * _ROWS, stage)
                self.load_row(delta, head, tile * _ROWS, self.stages + stage)
                self.note(self.notes[None, stage], unit, Int64(tile) * 2 + Int64(is_edge))
                self.arrived(self.full + stage)
                phase = phase ^ 1

    @cute.jit
    def note(self, notes, unit, tile_and_edge):
        """Write down what the consumers need to know of a step, so that they need no registers for it."""
        if self.lane == 0:
            notes[0] = unit
            notes[1] = tile_and_edge

    @cute.jit
    def load(self, array, head, first, place):
        """Start to load rows of a head, with zeros past the end, into a tile: 16 lanes a row, 16 bytes each."""
        at, vector = self.lane // 16, self.lane % 16
        # Two halves side by side, whose rows of 128 bytes are swizzled.
        start = vector // 8 * _ROWS * _WIDTH + at * _WIDTH + ((vector % 8) ^ at) * _VECTOR
        target = (self.tiles + place * _TILE).toint() + 2 * start
        source = (array.address + array.row((self.number, first + at, head))).toint() + vector * ALIGNED_BYTES
        stride = 2 * 2 * array.row((0, 1, 0))
        rows = array.sizes[1] - first - at
        for n in cutlass.range_constexpr(_ROWS // 2):
            size = Int32(cutlass.select_(rows > 2 * n, Int32(ALIGNED_BYTES), Int32(0)))
            place = (target ^ (n % 4 * 2 * ALIGNED_BYTES)) + n * 4 * _WIDTH
            copy_ahead(place, source + n * stride, size, ALIGNED_BYTES)

    @cute.jit
    def load_row(self, array, head, first, place):
        """Start to load a value for each row of a tile of queries, with zeros past the end."""
        address, _, _, _, by_batch, by_head, _ = array
        start = address + (self.number * Int64(by_batch) + head * Int64(by_head))
        for n in cutlass.range_constexpr(_ROWS // WARP):
            row = n * WARP + self.lane
            size = Int32(cutlass.select_(first + row < self.queries, Int32(4), Int32(0)))
            copy_ahead((self.rows + place * _ROWS + row).toint(), (start + first + row).toint(), size, 4)

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

    # The consumers: 64 keys each.

    @cute.jit
    def consume(self, scale, dk, dv, kept):
        """Add up dk and dv of a warpgroup's keys, and store dS."""
        self.part = (self.warp >> 2) & 1
        # Bytes from a key to the next in a unit of dS.
        pitch = 2 * Int32(kept.row((0, 0, 1)))
        self.products()
        factor = scale * Float32(LOG2_E)
        dk_sum, dv_sum = (self.sums() for _ in range(2))
        dk_sum.fill(0.0)
        dv_sum.fill(0.0)
        scores, pulled = (self.scores() for _ in range(2))
        # P and dS as left operands, whose elements are in the order of ``scores``.
        weights, gradients = (self.left() for _ in range(2))
        cute.arch.mbarrier_wait(self.owned, 0)
        stage, phase = Int32(0), Int32(0)
        for _ in cutlass.range(self.steps, unroll=1):
            cute.arch.mbarrier_wait(self.full + stage, phase)
            self.start_scores(stage, scores, pulled)
            lse, tile_and_edge = self.rows_of(stage), Int32(self.notes[1, stage])
            # The exponentials take about as long as the second product.
            warpgroup.wait_group(1)
            for i in cutlass.range_constexpr(cute.size(lse)):
                lse[i] = lse[i] * Float32(-LOG2_E)
            for i in cutlass.range_constexpr(cute.size(scores)):
                scores[i] = cute.math.exp2(cute.math.fma(scores[i], factor, lse[i // 4 * 2 + i % 2]), fastmath=True)
            if tile_and_edge % 2 == 1:
                self.hide(scores, tile_and_edge // 2)
            weights.store(scores.load().to(self.half))
            self.add(dv_sum, weights, self.dout_t[None, None, None, stage])
            delta = self.rows_of(self.stages + stage)
            warpgroup.wait_group(1)
            for i in cutlass.range_constexpr(cute.size(scores)):
                pulled[i] = scores[i] * (pulled[i] - delta[i // 4 * 2 + i % 2])
            gradients.store(pulled.load().to(self.half))
            self.add(dk_sum, gradients, self.q_t[None, None, None, stage])
            self.keep(gradients, self.notes[0, stage], pitch)
            warpgroup.wait_group(0)
            self.tell(self.empty + stage)
            is_last = stage == self.stages - 1
            stage = Int32(cutlass.select_(is_last, Int32(0), stage + 1))
            phase = Int32(cutlass.select_(is_last, phase ^ 1, phase))
        warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(cute.size(dk_sum)):
            dk_sum[i], dv_sum[i] = after(dk_sum[i]) * scale, after(dv_sum[i])
        self.store(dk, dk_sum)
        self.store(dv, dv_sum)

    def products(self) -> None:
        """Make the products, with the shared memory in the form that they read."""
        thread = (self.warp % 4) * WARP + self.lane
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN

        def product(columns: int, source: Any, major: Any) -> Any:
            operation = warpgroup.MmaF16BF16Op(self.half, Float32, (_ROWS, columns, _DEEP), source, k_major, major)
            return cute.make_tiled_mma(cute.make_mma_atom(operation))

        def tiles(start: int, count: int, kind: Any, shape: tuple[int, int], order: tuple[int, int, int]) -> Any:
            layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, self.half), (*shape, count), order)
            return cute.make_tensor(
                cute.recast_ptr(self.tiles + start * _TILE, layout.inner, dtype=self.half), layout.outer
            )

        self.first_score, self.next_score = (product(_ROWS, warpgroup.OperandSource.SMEM, k_major) for _ in range(2))
        self.next_score.set(warpgroup.Field.ACCUMULATE, True)
        self.gradient = product(DEPTH, warpgroup.OperandSource.RMEM, mn_major)
        self.gradient.set(warpgroup.Field.ACCUMULATE, True)
        score, gradient = self.next_score.get_slice(thread), self.gradient.get_slice(thread)
        rows, stages = warpgroup.SmemLayoutAtomKind.K_SW128, self.stages
        q, dout = (tiles(4 + i * stages, stages, rows, (_ROWS, DEPTH), (0, 1, 2)) for i in range(2))
        k, v = (tiles(2 * i, 2, rows, (_ROWS, DEPTH), (0, 1, 2)) for i in range(2))
        self.k, self.v = (score.make_fragment_A(score.partition_A(x))[None, None, None, self.part] for x in (k, v))
        self.q, self.dout = (score.make_fragment_B(score.partition_B(x)) for x in (q, dout))
        columns = warpgroup.SmemLayoutAtomKind.MN_SW128
        q_t, dout_t = (tiles(4 + i * stages, stages, columns, (DEPTH, _ROWS), (1, 0, 2)) for i in range(2))
        self.q_t, self.dout_t = (gradient.make_fragment_B(gradient.partition_B(x)) for x in (q_t, dout_t))

    def sums(self) -> Any:
        """Make registers for dk or dv."""
        return self.gradient.make_fragment_C(self.gradient.partition_shape_C((_ROWS, DEPTH)))

    def scores(self) -> Any:
        """Make registers for a product of keys and queries."""
        return self.next_score.make_fragment_C(self.next_score.partition_shape_C((_ROWS, _ROWS)))

    def left(self) -> Any:
        """Make registers for a rounded product as a left operand."""
        return self.gradient.make_fragment_A(self.gradient.partition_shape_A((_ROWS, _ROWS)))

    def start_scores(self, stage: Any, scores: Any, pulled: Any) -> None:
        """Start the products k q^T and v dout^T of a stage."""
        for sums, left, right in ((scores, self.k, self.q), (pulled, self.v, self.dout)):
            warpgroup.fence()
            for i in range(DEPTH // _DEEP):
                product = self.next_score if i else self.first_score
                cute.gemm(product, sums, left[None, None, i], right[None, None, i, stage], sums)
            warpgroup.commit_group()

    def add(self, sums: Any, left: Any, right: Any) -> None:
        """Start to add a product to dk or dv."""
        warpgroup.fence()
        for i in range(_ROWS // _DEEP):
            cute.gemm(self.gradient, sums, left[None, None, i], right[None, None, i], sums)
        warpgroup.commit_group()

    # Elements of a thread: rows of two keys, 8 apart, and of each 8 queries two.

    def rows_of(self, place: Any) -> Any:
        """Load lse or delta for a thread's queries."""
        offset = cute.assume(place * _ROWS + self.lane % 4 * 2, divby=2)
        values = cute.make_rmem_tensor((2, _ROWS // 8), Float32)
        layout = cute.make_layout((2, _ROWS // 8), stride=(1, 8))
        cute.autovec_copy(cute.make_tensor(self.rows + offset, layout), values)
        return values

    @property
    def first_row(self) -> Any:
        """Return a thread's first key in the block."""
        return self.part * _ROWS + self.warp % 4 * 16 + self.lane // 4

    @cute.jit
    def hide(self, weights, tile):
        """Zero weights of queries that do not exist or do not see the key."""
        first = tile * _ROWS + self.lane % 4 * 2
        for i in cutlass.range_constexpr(cute.size(weights)):
            query = first + i // 4 * 8 + i % 2
            is_seen = query < self.queries
            if const_expr(self.causal):
                key = self.first_key + self.first_row + i // 2 % 2 * 8
                is_seen = is_seen & (key <= query + self.keys - self.queries)
            weights[i] = Float32(cutlass.select_(is_seen, weights[i], Float32(0.0)))

    def keep(self, gradients: Any, unit: Any, pitch: Any) -> None:
        """Store dS: each warp turns its 16 keys into whole rows of 128 bytes."""
        warp, row, chunk = self.warp & 7, self.lane % 16, self.lane // 16
        start = (self.copies + warp * 16 * _WIDTH).toint()
        target = start + 2 * (row * _WIDTH + (chunk ^ (row % 8)) * _VECTOR)
        values = cute.recast_tensor(gradients, Int32)
        # The loads of the step before.
        cute.arch.sync_warp()
        for n in range(4):
            store_matrices(target ^ (n * 2 * ALIGNED_BYTES), [values[4 * n + i] for i in range(4)])
        cute.arch.sync_warp()
        row, chunk = self.lane // 8, self.lane % 8
        address = unit + ((self.part * _ROWS + self.warp % 4 * 16 + row) * pitch + chunk * ALIGNED_BYTES)
        for n in range(4):
            at = 4 * n + row
            copy_out(address + n * 4 * pitch, start + 2 * (at * _WIDTH + (chunk ^ (at % 8)) * _VECTOR))

    def unit(self, kept: Argument, tile: Any, head: Any) -> Any:
        """Return the address of a tile in its unit of ``kept``: like ``_unit`` of cuTile's kernel."""
        row, column = tile // 2, self.first_key // _UNIT
        lines = kept.sizes[0] // (self.batch * self.heads)
        line = (self.number * self.heads + head) * lines
        if self.causal:
            last = (self.queries + _UNIT - 1) // _UNIT - 1 - row
            column = Int32(cutlass.select_(row < last, kept.sizes[1] - 1 - column, column))
            row = cutlass.min(row, last)
        return (kept.address + kept.row((line + row, column, Int32(0))) + tile % 2 * _ROWS).toint()

    @cute.jit
    def store(self, array, sums):
        """Round and store dk or dv, pairs of columns at a time."""
        values = cute.make_rmem_tensor((2, 2, DEPTH // 8), array.numeric)
        values.store(cute.make_tensor(sums.iterator, values.layout).load().to(array.numeric))
        for r in cutlass.range_constexpr(2):
            row = self.first_key + self.first_row + 8 * r
            column = cute.assume(self.lane % 4 * 2, divby=2)
            start = array.address + array.row((self.number, row, self.owner)) + column
            target = cute.make_tensor(start, cute.make_layout((2, DEPTH // 8), stride=(1, 8)))
            if row < self.keys:
                cute.autovec_copy(values[None, r, None], target)


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
def store_matrices(target: Any, words: list[Any], *, loc: Any = None, ip: Any = None) -> None:
    """Store four matrices of 8 x 8 half numbers in shared memory; each lane has the address of a row."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (target, *words)]
    llvm.inline_asm(
        None, values, "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", "r,r,r,r,r",
        has_side_effects=True, is_align_stack=False,
    )  # fmt: skip


@dsl_user_op
def after(value: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Return a sum, which the compiler reads only here: it does not know that a wait before completes it."""
    argument = value.ir_value(loc=loc, ip=ip)
    return Float32(llvm.inline_asm(argument.type, [argument], "", "=f,0", has_side_effects=True, is_align_stack=False))


@dsl_user_op
def copy_out(target: Any, source: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Copy 16 bytes from shared to global memory."""
    values = [Int64(target).ir_value(loc=loc, ip=ip), Int32(source).ir_value(loc=loc, ip=ip)]
    llvm.inline_asm(
        None, values,
        "{ .reg .b32 w<4>; ld.shared.v4.b32 {w0, w1, w2, w3}, [$1]; st.global.v4.b32 [$0], {w0, w1, w2, w3}; }", "l,r",
        has_side_effects=True, is_align_stack=False,
    )  # fmt: skip
