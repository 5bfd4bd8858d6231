"""dk and dv of attention by tiles of keys, and dS for dq, in CuTe DSL for Hopper: cuTile's formula in other loops.

A block owns 128 keys of a key head, for all query heads that read it, or ``apart`` for one. Two warpgroups compute 64
of them each and share the queries in shared memory, so that each is loaded once for 128 keys; they never wait for one
another, so that one's exponentials run beside the other's products. The warps of a third warpgroup fill the stages of
the ring of queries in turn, by the tensor memory accelerator. Heads of 256 have other roles:
:mod:`tilekern.kernels.cute.attention_keys_wide`.

In a step a warpgroup takes 64 queries of a head. P is computed from S^T = k q^T beside dP^T = v dout^T, dS beside
dv += P^T dout, and dS is stored beside dk += dS^T q. P^T and dS^T stay in registers. Heads of 64 leave registers for k
and v, which saves a third of what the matrix units read from shared memory, and for the next S^T beside P, so that it
starts before dS is computed.

In shared memory, a tile has parts of 64 columns, with rows of 128 bytes in which pieces of 16 bytes are swizzled; q and
dout are read as they are and transposed. Queries lie in an order (:meth:`AttentionKeys.line`) in which a thread's
elements of dS are neighbours, so that it stores 16 bytes at once.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from tilekern.kernels.attention.kept_cute import DESCRIPTOR_BYTES, DESCRIPTORS
from tilekern.kernels.attention.tiles import LOG2_E
from tilekern.kernels.cute.arguments import ALIGNED_BYTES, Argument, samples
from tilekern.kernels.cute.descriptors import describe, load_box, see
from tilekern.kernels.cute.sharing import WARP
from tilekern.kernels.cute.warpgroups import LOADERS, Warpgroups, after, copy_ahead, store_words
from tilekern.spec import ArrayParameter, ScalarParameter

# Keys of a warpgroup. Queries and keys of a unit of ``kept``.
_KEYS, _UNIT = 64, 128
# Elements of 16 bytes, and of 128 bytes, which is the width of half a tile.
_VECTOR, _WIDTH = 8, 64
# Neighbours among a thread's queries.
_GROUP = 8
# Depth of one instruction of the matrix units.
_DEEP = 16
# Registers of a thread that loads, and of one that computes.
_FEW, _MANY = 24, 240


class AttentionKeys(Warpgroups):
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
        depth: elements of a head.
        causal: whether a query sees the keys up to its position only.
        capped: whether the scores have a soft cap.
        tile_m: queries of a tile.
        tile_n: keys of a block.
        held: columns of k and v that are in registers, from the first one on; shared memory has the others.
        stages: tiles of queries in the ring.
    """

    def __init__(
        self, function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], *, capability: int, block: int,
        cluster: int, heads: int, kv_heads: int, depth: int, apart: bool, causal: bool, capped: bool, tile_m: int,
        tile_n: int, held: int, stages: int,
    ) -> None:  # fmt: skip
        self.parameters, self.sample = parameters, samples(parameters)
        self.block, self.heads, self.causal, self.capped = block, heads, causal, capped
        self.depth, self.rows, self.block_keys, self.held, self.stages = depth, tile_m, tile_n, held, stages
        # Elements of a tile of queries, and of k and v in shared memory.
        self.tile, self.own = tile_m * depth, 2 * tile_n * (depth - held)
        # Warpgroups' shares of a block's keys.
        self.parts = tile_n // _KEYS
        # Whether there are registers for the next step's scores beside this one's P.
        self.early = held == depth
        # Heads of dk and dv, the query heads that one is for, and those that read one of k and v.
        self.owners, self.group = heads if apart else kv_heads, heads // kv_heads
        self.readers = heads // self.owners

    @cute.kernel
    def kernel(self, arguments: tuple):
        """Give each warpgroup its part."""
        pairs = zip(self.parameters, arguments, strict=True)
        given: dict[str, Any] = {p.name: Argument(p, a) if isinstance(p, ArrayParameter) else a for p, a in pairs}
        # Rows of ``lse`` and ``delta`` begin anywhere, unlike those of an :class:`Argument`.
        given |= {p.name: a for p, a in zip(self.parameters, arguments, strict=True) if p.name in ("lse", "delta")}
        q, k, v, dout, lse, delta = (given[name] for name in ("q", "k", "v", "dout", "lse", "delta"))
        dk, dv, kept = (given[name] for name in ("dk", "dv", "kept"))
        self.half, self.scale, self.softcap = q.numeric, given["scale"], given["softcap"]
        block, _, _ = cute.arch.block_idx()
        self.identify()
        # All heads side by side, the keys that most queries see first.
        rows = q.sizes[0] * self.owners
        row = block % rows
        self.number, self.owner, self.first_key = row // self.owners, row % self.owners, block // rows * self.block_keys
        self.batch, self.queries, self.keys = q.sizes[0], q.sizes[1], k.sizes[1]
        self.plan()
        self.prepare()
        if self.warp < LOADERS:
            cute.arch.setmaxregister_decrease(_FEW)
            self.produce(q, k, v, dout, lse, delta, dk, dv, kept)
        else:
            cute.arch.setmaxregister_increase(_MANY)
            self.consume(k, v, dk, dv, kept)

    # The queries that see the block's keys.

    def plan(self) -> None:
        """Find the tiles of queries: like ``query_tiles`` of cuTile's kernels."""
        lower, full_lower = Int32(0), Int32(0)
        if self.causal:
            shift = self.queries - self.keys
            lower = cutlass.max(self.first_key + shift, 0)
            full_lower = cutlass.max(cutlass.min(self.first_key + self.block_keys, self.keys) - 1 + shift, 0)
        stop = (self.queries + self.rows - 1) // self.rows
        self.first = lower // self.rows
        full = cutlass.min((full_lower + self.rows - 1) // self.rows, stop)
        self.edge = cutlass.max(full, self.queries // self.rows)
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

    # Shared memory: tiles of k, v, q and dout, copies of P, drafts of descriptors, rows of lse and delta, barriers.

    @cute.jit
    def prepare(self):
        """Lay out the shared memory; make the barriers."""
        stages, item = self.stages, self.half.width // 8
        memory = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        self.tiles = cute.recast_ptr(memory, dtype=self.half)
        copies = memory + (self.own + 2 * stages * self.tile) * item
        self.copies = cute.recast_ptr(copies, dtype=Float32)
        self.drafts = copies + self.copied_bytes
        rows = self.drafts + DESCRIPTORS * DESCRIPTOR_BYTES
        self.rows_in_stages = cute.recast_ptr(rows, dtype=Float32)
        self.notes = cute.make_tensor(
            cute.recast_ptr(rows + 2 * stages * self.rows * 4, dtype=Int64), cute.make_layout((1 + self.parts, stages))
        )
        self.full = self.notes.iterator + (1 + self.parts) * stages
        self.empty, self.loaded = self.full + stages, self.full + 2 * stages
        if (self.warp == 0) & (self.lane == 0):
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(self.full + stage, 1)
                cute.arch.mbarrier_init(self.empty + stage, 8)
            self.make_barriers()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    @property
    def copied_bytes(self) -> int:
        """Return the bytes of P on its way to another warpgroup."""
        return 0

    def make_barriers(self) -> None:
        """Make the other barriers than those of stages: the one of k and v."""
        cute.arch.mbarrier_init(self.loaded, LOADERS)

    # The producer: a warp for each stage. The tensor memory accelerator loads boxes by descriptors, which are in the
    # first rows of dk and dv that the block writes, until all has been loaded. Those of q and dout have axes for the
    # bits of a query's number, in the order of :meth:`line`, so that they know whole groups of 8 queries only: the last
    # tile is copied if it ends with others. All tiles are, if a row begins elsewhere than at a multiple of 128 bytes.

    @cute.jit
    def produce(self, q, k, v, dout, lse, delta, dk, dv, kept):
        """Load k and v; then the warps fill stages in turn."""
        first = self.number, self.first_key, self.owner
        rows = [(array.address + array.row(first)).toint() for array in (dk, dv)]
        self.descriptors = [row + n * DESCRIPTOR_BYTES for n in range(DESCRIPTORS // 2) for row in rows]
        # Without a step, nothing would keep the results behind the descriptors.
        has_boxes = ((rows[0] | rows[1]) % DESCRIPTOR_BYTES == 0) & (self.steps > 0)
        if has_boxes:
            self.describe_all(q, k, v, dout)
        elif const_expr(self.held < self.depth):
            self.copy_own(k, v)
        turns = const_expr(min(self.stages, LOADERS))
        if self.warp < turns:
            for n in cutlass.range(self.warp, self.steps, turns, unroll=1):
                stage, phase = n % self.stages, n // self.stages % 2
                tile, head, is_edge = self.step(n)
                units = [self.unit(kept, tile, head, part) for part in range(self.parts)]
                cute.arch.mbarrier_wait(self.empty + stage, phase ^ 1)
                place = self.own + stage * self.tile
                if has_boxes & (cutlass.min((tile + 1) * self.rows, self.queries) % _GROUP == 0):
                    self.load_queries(tile, head, place, self.full + stage)
                else:
                    self.load(q, head, tile * self.rows, place, self.rows, 0, True)
                    self.load(dout, head, tile * self.rows, place + self.stages * self.tile, self.rows, 0, True)
                self.load_row(lse, head, tile * self.rows, stage)
                self.load_row(delta, head, tile * self.rows, self.stages + stage)
                self.note(self.notes[None, stage], [Int64(tile) * 2 + Int64(is_edge), *units])
                self.arrived(self.full + stage)

    @cute.jit
    def describe_all(self, q, k, v, dout):
        """Write the descriptors, one in each warp, and load k and v by them."""
        for n, array in enumerate((q, dout)):
            if self.warp == n:
                self.describe_queries(n, array)
        if const_expr(self.held < self.depth):
            for n, array in enumerate((k, v)):
                if self.warp == 2 + n:
                    self.describe_keys(2 + n, array)
                    self.load_own(n)
            self.tell(self.loaded)
        cute.arch.barrier(barrier_id=1, number_of_threads=LOADERS * WARP)
        for n in cutlass.range_constexpr(2):
            see(self.descriptors[n])

    def describe_queries(self, n: int, array: Argument) -> None:
        """Write the descriptor of q or dout: of 32 queries and 64 columns, in the order of their lines."""
        row, head = (2 * array.row(step) for step in ((0, 1, 0), (0, 0, 1)))
        groups = cutlass.max(self.queries // _GROUP, 1)
        queries = (2, 2, row), (groups, 4, _GROUP * row), (4, 4, 2 * row)
        self.describe(n, array, (self.depth, _WIDTH, None), *queries, (self.heads, 1, head))

    def describe_keys(self, n: int, array: Argument) -> None:
        """Write the descriptor of k or v: of a warpgroup's keys and 64 columns."""
        row, head = (2 * array.row(step) for step in ((0, 1, 0), (0, 0, 1)))
        heads = self.heads // self.group
        self.describe(n, array, (self.depth, _WIDTH, None), (self.keys, _KEYS, row), (heads, 1, head))

    def describe(self, n: int, array: Argument, *axes: tuple[Any, int, Any]) -> None:
        """Write a descriptor of the block's entry of the batch."""
        start = (array.address + array.row((self.number, 0, 0))).toint()
        describe(self.drafts + n * DESCRIPTOR_BYTES, self.descriptors[n], self.lane, start, axes, self.half)

    @cute.jit
    def load_own(self, n: int):
        """Start to load the columns of k, if ``n`` is 0, or v that no registers hold."""
        if self.lane == 0:
            cute.arch.mbarrier_expect_tx(self.loaded, self.own)
            target, head = (self.tiles + n * (self.own // 2)).toint(), self.owner * self.readers // self.group
            widths = (self.depth - self.held) // _WIDTH
            for i in cutlass.range_constexpr(self.parts * widths):
                place = self.held + i % widths * _WIDTH, self.first_key + i // widths * _KEYS, head
                load_box(target + i * _KEYS * 2 * _WIDTH, self.descriptors[2 + n], place, self.loaded.toint())

    @cute.jit
    def load_queries(self, tile, head, place, barrier):
        """Start to load a tile of q and one of dout."""
        if self.lane == 0:
            cute.arch.mbarrier_expect_tx(barrier, 2 * 2 * self.tile)
            for n in cutlass.range_constexpr(2):
                target = (self.tiles + place + n * self.stages * self.tile).toint()
                for i in cutlass.range_constexpr(self.tile // (32 * _WIDTH)):
                    part, half = i // (self.rows // 32), i % (self.rows // 32)
                    first = tile * (self.rows // _GROUP) + half * (32 // _GROUP)
                    box = part * _WIDTH, 0, first, 0, head
                    load_box(target + i * 32 * 2 * _WIDTH, self.descriptors[n], box, barrier.toint())

    @cute.jit
    def note(self, notes, values):
        """Write down what the consumers need to know of a step, so that they need no registers for it."""
        if self.lane == 0:
            for n in cutlass.range_constexpr(len(values)):
                notes[n] = values[n]

    @cute.jit
    def copy_own(self, k, v):
        """Copy the columns of k and v that no registers hold, half of one in each warp."""
        kv_head = self.owner * self.readers // self.group
        for n in cutlass.range_constexpr(2 * self.parts):
            if self.warp == n % 4:
                first = self.first_key + n % self.parts * _KEYS
                place = n * _KEYS * (self.depth - self.held)
                self.load(k if n < self.parts else v, kv_head, first, place, _KEYS, self.held, False)
        self.arrived(self.loaded)

    @cute.jit
    def load(self, array, head, first, place, count: int, column: int, in_lines: bool):
        """Start to load rows of a head, from a column on, with zeros past the end: 16 bytes a lane.

        They go to a ``place`` in shared memory, each row into its line if ``in_lines``.
        """
        lanes = (self.depth - column) // _VECTOR
        step = WARP // lanes
        at, vector = self.lane // lanes, self.lane % lanes
        there = self.line(at) if const_expr(in_lines) else at
        # Parts of 64 columns, whose rows of 128 bytes are swizzled.
        start = vector // 8 * count * _WIDTH + there * _WIDTH + ((vector % 8) ^ (there % 8)) * _VECTOR
        target = (self.tiles + place).toint() + 2 * start
        source = (array.address + array.row((self.number, first + at, head)) + column).toint() + vector * ALIGNED_BYTES
        stride = 2 * step * array.row((0, 1, 0))
        rows = array.sizes[1] - first - at
        for n in cutlass.range_constexpr(count // step):
            size = Int32(cutlass.select_(rows > step * n, Int32(ALIGNED_BYTES), Int32(0)))
            line = self.line(step * n) if const_expr(in_lines) else step * n
            there = (target ^ (line % 8 * ALIGNED_BYTES)) + line * 2 * _WIDTH
            copy_ahead(there, source + n * stride, size, ALIGNED_BYTES)

    def line(self, row: Any) -> Any:
        """Return the line in a tile that holds a query, so that 8 neighbours of each 32 are elements of one thread."""
        return row & 33 | (row >> 3 & 3) << 1 | (row >> 1 & 3) << 3

    @cute.jit
    def load_row(self, array, head, first, place):
        """Start to load a value for each row of a tile of queries, with zeros past the end."""
        address, _, _, _, by_batch, by_head, _ = array
        start = address + (self.number * Int64(by_batch) + head * Int64(by_head))
        for n in cutlass.range_constexpr(self.rows // WARP):
            row = n * WARP + self.lane
            size = Int32(cutlass.select_(first + row < self.queries, Int32(4), Int32(0)))
            copy_ahead((self.rows_in_stages + place * self.rows + row).toint(), (start + first + row).toint(), size, 4)

    # The consumers: 64 keys each.

    @cute.jit
    def consume(self, k, v, dk, dv, kept):
        """Add up dk and dv of a warpgroup's keys, and store dS."""
        self.part = self.warp // 4 - 1
        # Bytes from a key to the next in a unit of dS.
        pitch = 2 * Int32(kept.row((0, 0, 1)))
        self.products()
        dk_sum, dv_sum = (self.sums() for _ in range(2))
        dk_sum.fill(0.0)
        dv_sum.fill(0.0)
        scores, pulled = (self.scores() for _ in range(2))
        products = self.scores() if const_expr(self.early) else scores
        slopes = self.scores() if const_expr(self.capped) else scores
        # P and dS as left operands, whose elements are in the order of ``scores``.
        weights, gradients = (self.left() for _ in range(2))
        own_k, own_v = self.owned(k, 0), self.owned(v, 1)
        stage, phase = Int32(0), Int32(0)
        self.start_next(-1, products, own_k, stage, phase)
        warpgroup.wait_group(0)
        for n in cutlass.range(self.steps, unroll=1):
            following, following_phase = self.following(stage, phase)
            self.start(pulled, own_v, self.dout[None, None, None, stage])
            self.weigh(products, scores, slopes, stage)
            weights.store(scores.load().to(self.half))
            self.slope(scores, slopes)
            self.add(dv_sum, weights, self.dout_t[None, None, None, stage])
            delta = self.rows_of(self.stages + stage)
            if const_expr(self.early):
                self.start_next(n, products, own_k, following, following_phase)
            warpgroup.wait_group(2 if self.early else 1)
            for i in cutlass.range_constexpr(cute.size(scores)):
                pulled[i] = scores[i] * (pulled[i] - delta[i // 4 * 2 + i % 2])
            gradients.store(pulled.load().to(self.half))
            self.add(dk_sum, gradients, self.q_t[None, None, None, stage])
            # Else the compiler stores between the instructions of the next product, which takes 8 % longer on an H200.
            self.keep(gradients, self.notes[1 + self.part, stage], pitch)
            if const_expr(not self.early):
                self.start_next(n, products, own_k, following, following_phase)
            warpgroup.wait_group(0)
            self.tell(self.empty + stage)
            stage, phase = following, following_phase
        self.store(dk, dk_sum, self.scale)
        self.store(dv, dv_sum, Float32(1.0))

    def following(self, stage: Any, phase: Any) -> tuple[Any, Any]:
        """Return the stage of the next step, and its phase."""
        is_last = stage == self.stages - 1
        following = Int32(cutlass.select_(is_last, Int32(0), stage + 1))
        return following, Int32(cutlass.select_(is_last, phase ^ 1, phase))

    @cute.jit
    def start_next(self, n, products, left, stage, phase):
        """Start k q^T of the step after ``n``; after the last one, of whatever the stage holds, which nothing reads."""
        if n + 1 < self.steps:
            cute.arch.mbarrier_wait(self.full + stage, phase)
        self.start(products, left, self.q[None, None, None, stage])

    @cute.jit
    def weigh(self, products, weights, slopes, stage):
        """Compute P of a stage's products; if capped, also the slope of the soft cap at each."""
        slope, factor = self.factors()
        lse, tile_and_edge = self.rows_of(stage), Int32(self.notes[0, stage])
        for i in cutlass.range_constexpr(cute.size(lse)):
            lse[i] = lse[i] * Float32(-LOG2_E)
        for i in cutlass.range_constexpr(cute.size(weights)):
            product = products[i]
            if const_expr(self.capped):
                # tanh of float32, to 2e-7 absolute.
                grown = cute.math.exp2(product * (slope * Float32(2 * LOG2_E)), fastmath=True) + Float32(1.0)
                product = cute.math.fma(cute.arch.rcp_approx(grown), Float32(-2.0), Float32(1.0))
                slopes[i] = Float32(1.0) - product * product
            weights[i] = cute.math.exp2(cute.math.fma(product, factor, lse[i // 4 * 2 + i % 2]), fastmath=True)
        if tile_and_edge % 2 == 1:
            self.hide(weights, tile_and_edge // 2)

    def factors(self) -> tuple[Any, Any]:
        """Return (slope, factor) as in ``factors_of`` of cuTile's kernels."""
        if self.capped:
            return self.scale / self.softcap, self.softcap * Float32(LOG2_E)
        return self.scale, self.scale * Float32(LOG2_E)

    def slope(self, weights: Any, slopes: Any) -> None:
        """Multiply P with the slopes of the soft cap, for dS, once it has been rounded for dv."""
        if self.capped:
            for i in range(cute.size(weights)):
                weights[i] = weights[i] * slopes[i]

    def products(self) -> None:
        """Make the products, with the shared memory in the form that they read."""
        thread = (self.warp % 4) * WARP + self.lane
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN

        def product(columns: int, source: Any, major: Any, accumulate: bool) -> Any:
            operation = warpgroup.MmaF16BF16Op(self.half, Float32, (_KEYS, columns, _DEEP), source, k_major, major)
            made = cute.make_tiled_mma(cute.make_mma_atom(operation))
            made.set(warpgroup.Field.ACCUMULATE, accumulate)
            return made

        memory, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        # The first of a product, and the others, by where the left operand is.
        self.by_memory, self.by_registers = (
            [product(self.rows, source, k_major, accumulate) for accumulate in (False, True)]
            for source in (memory, registers)
        )
        self.gradient = product(self.depth, registers, mn_major, True)
        self.score, gradient = self.by_memory[0].get_slice(thread), self.gradient.get_slice(thread)
        self.of_registers = self.by_registers[0].get_slice(thread)
        rows, columns = warpgroup.SmemLayoutAtomKind.K_SW128, warpgroup.SmemLayoutAtomKind.MN_SW128
        shape, count = (self.rows, self.depth), self.stages
        starts = [self.own + i * count * self.tile for i in range(2)]
        q, dout = (self.view(start, count, rows, shape, (0, 1, 2)) for start in starts)
        self.q, self.dout = (self.score.make_fragment_B(self.score.partition_B(x)) for x in (q, dout))
        q_t, dout_t = (self.view(start, count, columns, shape[::-1], (1, 0, 2)) for start in starts)
        self.q_t, self.dout_t = (gradient.make_fragment_B(gradient.partition_B(x)) for x in (q_t, dout_t))

    def view(self, start: int, count: int, kind: Any, shape: tuple[int, int], order: tuple[int, int, int]) -> Any:
        """Return tiles in shared memory in the layout of the matrix units."""
        layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, self.half), (*shape, count), order)
        return cute.make_tensor(cute.recast_ptr(self.tiles + start, layout.inner, dtype=self.half), layout.outer)

    @cute.jit
    def owned(self, array, place: int):
        """Return a warpgroup's rows of k, at 0, or v, at 1: registers for the first columns, memory for the others."""
        held, memory = None, None
        if const_expr(self.held > 0):
            held = self.of_registers.make_fragment_A(self.of_registers.partition_shape_A((_KEYS, self.held)))
            self.hold(array, cute.recast_tensor(held, Int32))
        if const_expr(self.held < self.depth):
            kind, shape = warpgroup.SmemLayoutAtomKind.K_SW128, (_KEYS, self.depth - self.held)
            tiles = self.view(place * self.own // 2, self.parts, kind, shape, (0, 1, 2))
            memory = self.score.make_fragment_A(self.score.partition_A(tiles))[None, None, None, self.part]
            cute.arch.mbarrier_wait(self.loaded, 0)
        return held, memory

    @cute.jit
    def hold(self, array, words):
        """Load the first columns of a warpgroup's rows into registers, two a word, with zeros past the end."""
        words.fill(0)
        for r in cutlass.range_constexpr(2):
            row = self.first_key + self.first_row + 8 * r
            place = (self.number, row, self.owner * self.readers // self.group)
            start = array.address + array.row(place) + cute.assume(self.lane % 4 * 2, divby=2)
            # Of each 16 columns a thread has two and, 8 on, two more.
            shape = (2, self.held // _DEEP)
            source = cute.make_tensor(cute.recast_ptr(start, dtype=Int32), cute.make_layout(shape, stride=(4, 8)))
            target = cute.make_tensor(words.iterator + r, cute.make_layout(shape, stride=(2, 4)))
            if row < self.keys:
                cute.autovec_copy(source, target)

    def sums(self) -> Any:
        """Make registers for dk or dv."""
        return self.gradient.make_fragment_C(self.gradient.partition_shape_C((_KEYS, self.depth)))

    def scores(self) -> Any:
        """Make registers for a product of keys and queries."""
        return self.score.make_fragment_C(self.score.partition_shape_C((_KEYS, self.rows)))

    def left(self) -> Any:
        """Make registers for a rounded product as a left operand."""
        return self.gradient.make_fragment_A(self.gradient.partition_shape_A((_KEYS, self.rows)))

    def start(self, sums: Any, left: tuple[Any, Any], right: Any) -> None:
        """Start the product k q^T or v dout^T of a stage."""
        warpgroup.fence()
        held = self.held // _DEEP
        for i in range(self.depth // _DEEP):
            products, source, n = (self.by_registers, left[0], i) if i < held else (self.by_memory, left[1], i - held)
            cute.gemm(products[min(i, 1)], sums, source[None, None, n], right[None, None, i], sums)
        warpgroup.commit_group()

    def add(self, sums: Any, left: Any, right: Any) -> None:
        """Start to add a product to dk or dv."""
        warpgroup.fence()
        for i in range(self.rows // _DEEP):
            cute.gemm(self.gradient, sums, left[None, None, i], right[None, None, i], sums)
        warpgroup.commit_group()

    # Elements of a thread: rows of two keys, 8 apart, and 8 neighbours of each 32 queries.

    def rows_of(self, place: Any) -> Any:
        """Load lse or delta for a thread's queries."""
        shape, values = (8, self.rows // 32), cute.make_rmem_tensor(self.rows // 4, Float32)
        offset = cute.assume(place * self.rows + self.lane % 4 * 8, divby=8)
        source = cute.make_tensor(self.rows_in_stages + offset, cute.make_layout(shape, stride=(1, 32)))
        cute.autovec_copy(source, cute.make_tensor(values.iterator, cute.make_layout(shape)))
        return values

    @property
    def first_row(self) -> Any:
        """Return a thread's first key in the block."""
        return self.part * _KEYS + self.row_in_part

    @property
    def row_in_part(self) -> Any:
        """Return a thread's first key among those of its warpgroup."""
        return self.warp % 4 * 16 + self.lane // 4

    @cute.jit
    def hide(self, weights, tile):
        """Zero weights of queries that do not exist or do not see the key."""
        first = tile * self.rows + self.lane % 4 * 8
        for i in cutlass.range_constexpr(cute.size(weights)):
            column = i // 4 * 2 + i % 2
            query = first + column // 8 * 32 + column % 8
            is_seen = query < self.queries
            if const_expr(self.causal):
                key = self.first_key + self.first_row + i // 2 % 2 * 8
                is_seen = is_seen & (key <= query + self.keys - self.queries)
            weights[i] = Float32(cutlass.select_(is_seen, weights[i], Float32(0.0)))

    def keep(self, gradients: Any, unit: Any, pitch: Any) -> None:
        """Store dS."""
        values = cute.recast_tensor(gradients, Int32)
        for r in range(2):
            address = unit + ((self.row_in_part + 8 * r) * pitch + self.lane % 4 * ALIGNED_BYTES)
            for n in range(self.rows // 32):
                words = [values[8 * n + 2 * i + r] for i in range(4)]
                store_words(address + n * 4 * ALIGNED_BYTES, words)

    def unit(self, kept: Argument, tile: Any, head: Any, part: int) -> Any:
        """Return the address of a part's keys and a tile in a unit of ``kept``: like ``_unit`` of cuTile's kernel."""
        across, first = _UNIT // self.rows, self.first_key + part * _KEYS
        row, column = tile // across, first // _UNIT
        lines = kept.sizes[0] // (self.batch * self.heads)
        line = (self.number * self.heads + head) * lines
        if self.causal:
            last = (self.queries + _UNIT - 1) // _UNIT - 1 - row
            column = Int32(cutlass.select_(row < last, kept.sizes[1] - 1 - column, column))
            row = cutlass.min(row, last)
        return (kept.address + kept.row((line + row, column, first % _UNIT)) + tile % across * self.rows).toint()

    def complete(self, sums: Any, factor: Any) -> None:
        """Multiply dk or dv, once a wait has completed it."""
        for i in range(cute.size(sums)):
            sums[i] = after(sums[i]) * factor

    @cute.jit
    def store(self, array, sums, factor):
        """Multiply, round and store dk or dv, pairs of columns at a time."""
        self.complete(sums, factor)
        values = cute.make_rmem_tensor((2, 2, self.depth // 8), array.numeric)
        values.store(cute.make_tensor(sums.iterator, values.layout).load().to(array.numeric))
        for r in cutlass.range_constexpr(2):
            row = self.first_key + self.first_row + 8 * r
            column = cute.assume(self.lane % 4 * 2, divby=2)
            start = array.address + array.row((self.number, row, self.owner)) + column
            target = cute.make_tensor(start, cute.make_layout((2, self.depth // 8), stride=(1, 8)))
            if row < self.keys:
                cute.autovec_copy(values[None, r, None], target)
