"""Attention's forward by tiles of queries in CuTe DSL for Hopper: cuTile's formula in other loops.

A block owns a tile of queries of a head, 64 for each of two or three warpgroups, which share the keys and values in
shared memory. One's exponentials run beside the others' products: two warpgroups take turns at the matrix units,
three are seldom ready at once, and load the keys for more queries. Each warp of a further warpgroup
loads whole tiles of keys and values into a ring: its loads pass no registers, and are shown to the matrix units before
the slot's barrier is told.

With ``ahead`` a warpgroup starts S = q k^T of the next keys before it adds P v of these. P stays in registers. The
running maximum of a row follows its scores only if they exceed it by :data:`_SLACK`: sums need to be scaled seldom.

Blocks take items from the longest to the shortest. If there are fewer blocks than items, each goes back and forth
through the list, so that a long item is followed by a short one. Tiles of queries end at the last query: the tile that
is not whole is the first one, which sees the fewest keys. With a window, tiles of keys that no query of the block sees
are not loaded; a warpgroup skips those that only others see. Packed sequences have items for as many tiles as the
longest one; those of shorter ones are empty.

In shared memory, a tile is halves of 64 columns, with rows of 128 bytes in which pieces of 16 bytes are swizzled.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from tilekern.kernels.attention.forward_cute import DESCRIPTOR_BYTES, ROWS, descriptors
from tilekern.kernels.attention.tiles import LN_2, LOG2_E, LOWEST
from tilekern.kernels.cute.arguments import ALIGNED_BYTES, Argument, samples
from tilekern.kernels.cute.descriptors import describe, load_box
from tilekern.kernels.cute.sharing import WARP
from tilekern.kernels.cute.warpgroups import LOADERS, Warpgroups, after, copy_ahead, store_words
from tilekern.spec import ArrayParameter, ScalarParameter

# Elements of 16 bytes, and of 128 bytes, which is the width of half a tile.
_VECTOR, _WIDTH = 8, 64
# Depth of one instruction of the matrix units.
_DEEP = 16
# Registers of a thread that loads, and of one that computes, by the number of computing warpgroups and whether
# sequences are packed: their tiles are loaded in two ways.
_REGISTERS = {(2, False): (24, 240), (2, True): (40, 232), (3, False): (32, 160), (3, True): (32, 160)}
# Powers of two by which a weight may exceed 1 before its row's sums are scaled.
_SLACK = 8.0


class AttentionQueries(Warpgroups):
    """The device function of one config.

    Args:
        function: cuTile's kernel, whose loops and formula are written anew here.
        parameters: its arrays and scalars.
        capability: compute capability of the GPU as one number; only 90 has these matrix units.
        block: threads of a block.
        cluster: blocks of a cluster; 1.
        heads: heads of q; whole groups.
        kv_heads: heads of k and v.
        depth: elements of a head; 64, 128 or 256.
        causal: whether a query sees the keys up to its position only.
        windowed: whether a query sees keys at a distance below ``window`` only.
        capped: whether scores have a soft cap.
        packed: whether the sequences follow one another in a batch of one.
        sinks: whether each head has a sink, a key whose value is zero.
        tile_n: keys of a tile.
        ahead: whether the next scores are started before these keys' values are added.
        stages: tiles of keys or of values in the ring.
    """

    def __init__(
        self, function: Any, parameters: tuple[ArrayParameter | ScalarParameter, ...], *, capability: int, block: int,
        cluster: int, heads: int, kv_heads: int, depth: int, causal: bool, windowed: bool, capped: bool,
        sinks: bool, packed: bool, tile_n: int, ahead: bool, stages: int,
    ) -> None:  # fmt: skip
        self.parameters, self.sample = parameters, samples(parameters)
        self.block, self.heads, self.group, self.depth = block, heads, heads // kv_heads, depth
        self.causal, self.windowed, self.capped, self.sinks, self.packed = causal, windowed, capped, sinks, packed
        self.columns, self.ahead, self.stages = tile_n, ahead, stages
        self.parts = block // (4 * WARP) - 1
        self.takes_turns = ahead and self.parts == 2
        self.described = descriptors(depth)
        # Parts of a warpgroup's queries that a warp loads at a time: items of few or cheap tiles are through before a
        # warp has waited for several. With a descriptor of queries, a part is what its barrier waits for.
        is_short = self.parts == 3 and (windowed or depth == _WIDTH)
        self.pieces = 1 if is_short or self.described == 3 else 4

    @cute.kernel
    def kernel(self, arguments: tuple):
        """Give each warpgroup its part."""
        pairs = zip(self.parameters, arguments, strict=True)
        given = {p.name: Argument(p, a) if isinstance(p, ArrayParameter) else a for p, a in pairs}
        # Rows of these begin anywhere, unlike those of an :class:`Argument`.
        rows = ("lse", "sink_logits")
        given |= {p.name: a for p, a in zip(self.parameters, arguments, strict=True) if p.name in rows}
        q, k, v = (given[name] for name in "qkv")
        self.half = q.numeric
        self.number_of_block, _, _ = cute.arch.block_idx()
        self.number_of_blocks, _, _ = cute.arch.grid_dim()
        self.identify()
        self.batch, self.queries, self.keys = q.sizes[0], q.sizes[1], k.sizes[1]
        if const_expr(self.packed):
            self.starts = given["query_starts"].address, given["key_starts"].address
            self.batch, self.queries = given["query_starts"].sizes[0] - 1, given["most_queries"]
        self.window = given["window"]
        self.plan()
        self.prepare()
        few, many = _REGISTERS[self.parts, self.packed]
        if self.warp < LOADERS:
            cute.arch.setmaxregister_decrease(few)
            self.produce(q, k, v, given["out"])
        else:
            cute.arch.setmaxregister_increase(many)
            self.consume(given["scale"], given["softcap"], given["sink_logits"], given["out"], given["lse"])

    # The block's items, each a tile of queries of a head.

    def plan(self) -> None:
        """Count the block's items: blocks take them in turn, in every second round from the last block on."""
        items = (self.queries + self.parts * ROWS - 1) // (self.parts * ROWS) * (self.batch * self.heads)
        self.rounds = items // self.number_of_blocks
        rest = items % self.number_of_blocks
        self.rounds += Int32(cutlass.select_(rest > self.place(self.rounds), Int32(1), Int32(0)))

    def place(self, turn: Any) -> Any:
        """Return the block's place in a round."""
        backwards = self.number_of_blocks - 1 - self.number_of_block
        return Int32(cutlass.select_(turn % 2 == 1, backwards, self.number_of_block))

    def item(self, turn: Any) -> tuple[Any, Any, Any, Any]:
        """Return an item's entry of the batch and head, first query, which may be negative, tiles of keys, and span."""
        number, rows = turn * self.number_of_blocks + self.place(turn), self.batch * self.heads
        row, tile = number % rows, number // rows
        span = self.span(row)
        first = span[1] - (tile + 1) * (self.parts * ROWS)
        start, _, _, stop = self.seen(first, self.parts * ROWS, span)
        if self.packed:
            # An empty item takes part with one tile, of which nothing is stored.
            stop = Int32(cutlass.select_(self.is_empty(first), start + 1, stop))
        return (0 if self.packed else row // self.heads, row % self.heads), first, (start, stop), span

    def is_empty(self, first: Any) -> Any:
        """Return whether an item is before the first query of its sequence."""
        return first <= -self.parts * ROWS

    def span(self, row: Any) -> tuple[Any, Any, Any, Any]:
        """Return the first row and the number of the queries, then of the keys, of a head's entry or sequence."""
        if not self.packed:
            return 0, self.queries, 0, self.keys
        number = row // self.heads
        ends = [cute.make_tensor(x + (number + i), cute.make_layout(1))[0] for x in self.starts for i in (0, 1)]
        return ends[0], ends[1] - ends[0], ends[2], ends[3] - ends[2]

    def seen(self, first: Any, rows: int, span: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
        """Return (start, full, edge, stop) in tiles of keys: any query sees a key of tiles [start, stop), at least one.

        Every query sees all keys of tiles [full, edge).
        """
        _, queries, _, keys = span
        low, full_low, whole, some = 0, 0, keys, keys
        first = first + keys - queries
        if self.causal or self.windowed:
            reach = 1 if self.causal else self.window
            whole = cutlass.max(cutlass.min(whole, first + reach), 0)
            some = cutlass.max(cutlass.min(some, first + rows - 1 + reach), 1)
        if self.packed:
            some = cutlass.max(some, 1)
        if self.windowed:
            low = cutlass.max(first - self.window + 1, 0) // self.columns
            full_low = (cutlass.max(first + rows - self.window, 0) + self.columns - 1) // self.columns
        return low, full_low, whole // self.columns, (some + self.columns - 1) // self.columns

    def is_cut(self, n: Any, tiles: tuple[Any, Any, Any, Any]) -> Any:
        """Return whether some query does not see some key of tile ``n``."""
        _, full, edge, _ = tiles
        return (n < full) | (n >= edge) if self.windowed else n >= edge

    # Shared memory: tiles of q, the ring of k and v, barriers.

    @cute.jit
    def prepare(self):
        """Lay out the shared memory; make the barriers."""
        parts, stages = self.parts, self.stages
        memory = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        self.tiles = cute.recast_ptr(memory, dtype=self.half)
        self.ring = self.tiles + parts * ROWS * self.depth
        held = (parts * ROWS + stages * self.columns) * self.depth * self.half.width // 8
        self.descriptors = memory + held
        self.full = cute.recast_ptr(memory + held + self.described * DESCRIPTOR_BYTES, dtype=Int64)
        self.empty = self.full + stages
        self.queries_full, self.queries_empty = self.full + 2 * stages, self.full + 2 * stages + parts
        if (self.warp == 0) & (self.lane == 0):
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(self.full + stage, 1)
                cute.arch.mbarrier_init(self.empty + stage, 4 * parts)
            for part in cutlass.range_constexpr(parts):
                cute.arch.mbarrier_init(self.queries_full + part, self.pieces)
                cute.arch.mbarrier_init(self.queries_empty + part, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    def moved(self, slot: Any, phase: Any, by: int) -> tuple[Any, Any]:
        """Return the slot that follows ``by`` slots later, and its phase."""
        is_round = slot >= self.stages - by
        return (
            Int32(cutlass.select_(is_round, slot - (self.stages - by), slot + by)),
            Int32(cutlass.select_(is_round, phase ^ 1, phase)),
        )

    # The producer: tiles of keys and values are loaded by the tensor memory accelerator, of which one warp is in charge
    # while the others copy queries. Without descriptors, each warp copies every fourth of the tiles k, v, k, v.

    @cute.jit
    def produce(self, q, k, v, out):
        """Load the tiles of all items."""
        # The last rows of the block's last item are written when all has been loaded. Until then they hold descriptors.
        turn = self.rounds - 1
        (number, head), first, _, span = self.item(turn)
        if const_expr(self.packed):
            while (turn > 0) & self.is_empty(first):
                turn = turn - 1
                (number, head), first, _, span = self.item(turn)
        last = out.row((number, span[0] + first + self.parts * ROWS - 1, head))
        address = (out.address + last).toint()
        is_able, to_values = address % DESCRIPTOR_BYTES == 0, DESCRIPTOR_BYTES
        if const_expr(2 * self.depth < 2 * DESCRIPTOR_BYTES):
            # The row has room for the keys' descriptor; the values' is in the row before, which the same warp writes.
            to_values = -2 * out.row((0, 1, 0))
            is_able = is_able & (to_values % DESCRIPTOR_BYTES == 0) & (first + self.parts * ROWS > 1)
        if const_expr(self.packed):
            is_able = is_able & (first > -self.parts * ROWS)
        if is_able:
            if self.warp == 0:
                self.describe(k, 0, address, self.columns)
                self.describe(v, 1, address + to_values, self.columns)
            if const_expr(self.described == 3) and self.warp == 1:
                self.describe(q, 2, address + 2 * DESCRIPTOR_BYTES, ROWS)
            self.produce_described(q, k, v, (address, to_values))
        else:
            self.produce_copied(q, k, v)

    @cute.jit
    def produce_described(self, q, k, v, descriptors):
        """Load tiles of keys and values by their descriptors."""
        slot, phase, queries_phase = Int32(0), Int32(1), Int32(1)
        for turn in cutlass.range(self.rounds, unroll=1):
            place, first, (start, stop), span = self.item(turn)
            if self.warp > 0:
                if const_expr(self.described < 3):
                    self.load_queries(q, place, first, span, queries_phase, self.warp - 1, LOADERS - 1)
                elif self.warp == 1:
                    self.load_query_boxes(descriptors, place, first, span, queries_phase)
            else:
                for n in cutlass.range(2 * start, 2 * stop, unroll=1):
                    cute.arch.mbarrier_wait(self.empty + slot, phase)
                    if const_expr(self.packed):
                        self.load_packed(k, v, descriptors, place, first, n, span, slot)
                    else:
                        self.load_boxes(descriptors, place, n, span, slot)
                    slot, phase = self.moved(slot, phase, 1)
            queries_phase = queries_phase ^ 1

    @cute.jit
    def load_packed(self, k, v, descriptors, place, first, n, span, slot):
        """Load a tile of keys or values of a packed sequence."""
        # Nothing is read of an empty item, and descriptors are gone after the last one that is not.
        if self.is_empty(first):
            self.tell(self.full + slot)
        elif (n // 2 + 1) * self.columns <= span[3]:
            self.load_boxes(descriptors, place, n, span, slot)
        else:
            # A box would have the next sequence's keys.
            self.load_tile(k, v, place, n, span, slot)

    @cute.jit
    def load_boxes(self, descriptors, place, n, span, slot):
        """Start to load a tile of keys, or of values if ``n`` is odd, by its descriptor."""
        (number, head), (address, to_values) = place, descriptors
        if self.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot, 2 * self.columns * self.depth)
            target = (self.ring + slot * (self.columns * self.depth)).toint()
            for half in cutlass.range_constexpr(self.depth // _WIDTH):
                load_box(
                    target + half * self.columns * 2 * _WIDTH, address + n % 2 * to_values,
                    (half * _WIDTH, span[2] + n // 2 * self.columns, head // self.group, number),
                    (self.full + slot).toint(),
                )  # fmt: skip

    @cute.jit
    def load_query_boxes(self, descriptors, place, first, span, phase):
        """Start to load the warpgroups' queries by their descriptor."""
        number, head = place
        for part in cutlass.range_constexpr(self.parts):
            cute.arch.mbarrier_wait(self.queries_empty + part, phase)
            if const_expr(self.packed) and self.is_empty(first):
                self.tell(self.queries_full + part)
            elif self.lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(self.queries_full + part, 2 * ROWS * self.depth)
                target = (self.tiles + part * (ROWS * self.depth)).toint()
                for half in cutlass.range_constexpr(self.depth // _WIDTH):
                    load_box(
                        target + half * ROWS * 2 * _WIDTH, descriptors[0] + 2 * DESCRIPTOR_BYTES,
                        (half * _WIDTH, span[0] + first + part * ROWS, head, number),
                        (self.queries_full + part).toint(),
                    )  # fmt: skip

    # A slot may be another warp's in the next round, and a wait cannot tell rounds apart that are two apart: before a
    # warp gets to a slot, the warp before it must have been told that it is free. That holds where slots are freed in
    # their order. With ``ahead``, keys are freed before the values before them, and it holds unless there are five.

    @cute.jit
    def produce_copied(self, q, k, v):
        """Load tiles of keys and values by copies."""
        slot, phase, loads, queries_phase = Int32(self.warp), Int32(1), Int32(0), Int32(1)
        for turn in cutlass.range(self.rounds, unroll=1):
            place, first, (start, stop), span = self.item(turn)
            self.load_queries(q, place, first, span, queries_phase, self.warp, LOADERS)
            queries_phase = queries_phase ^ 1
            # The warp's first load of this item; the parity of a load tells keys from values.
            own_start = 2 * start + ((self.warp - loads) & (LOADERS - 1))
            loads = loads + 2 * (stop - start)
            for n in cutlass.range(own_start, 2 * stop, LOADERS, unroll=1):
                cute.arch.mbarrier_wait(self.empty + slot, phase)
                if const_expr(self.packed) and self.is_empty(first):
                    self.tell(self.full + slot)
                else:
                    self.load_tile(k, v, place, n, span, slot)
                slot, phase = self.moved(slot, phase, LOADERS)

    @cute.jit
    def load_tile(self, k, v, place, n, span, slot):
        """Load a tile of keys, or of values if ``n`` is odd, by copies."""
        number, head = place
        tile, first_key = self.ring + slot * (self.columns * self.depth), n // 2 * self.columns
        kv_place, rows = (number, head // self.group), span[2:]
        if n % 2 == 0:
            self.load(k, kv_place, rows, first_key, self.columns, tile, self.columns, 0)
        else:
            self.load(v, kv_place, rows, first_key, self.columns, tile, self.columns, 0)
        self.arrived(self.full + slot)

    @cute.jit
    def load_queries(self, q, place, first, span, phase, start, step: int):
        """Load every ``step``-th piece of the warpgroups' queries, from ``start`` on."""
        count = ROWS // self.pieces
        for n in cutlass.range(start, self.pieces * self.parts, step, unroll=1):
            part = n // self.pieces
            cute.arch.mbarrier_wait(self.queries_empty + part, phase)
            tile = self.tiles + part * (ROWS * self.depth)
            self.load(q, place, span[:2], first + n * count, count, tile, ROWS, n % self.pieces * count)
            self.arrived(self.queries_full + part)

    def describe(self, array: Argument, number: int, address: Any, count: int) -> None:
        """Write a descriptor of ``array`` to an address in global memory: boxes of 64 columns of ``count`` rows."""
        batch, rows, heads = array.sizes[:3]
        row, head, entry = (2 * array.row(step) for step in ((0, 1, 0), (0, 0, 1), (1, 0, 0)))
        axes = (self.depth, _WIDTH, None), (rows, count, row), (heads, 1, head), (batch, 1, entry)
        draft = self.descriptors + number * DESCRIPTOR_BYTES
        describe(draft, address, self.lane, array.address.toint(), axes, self.half)

    @cute.jit
    def load(self, array, place, span, first, count: int, tile, rows: int, into):
        """Start to load ``count`` rows of a head, with zeros past either end, to row ``into`` of a tile of ``rows``.

        Each lane loads 16 bytes of a row; ``into`` is a multiple of 8. ``span`` has the first row that there is in
        the array, from which ``first`` counts, and the number of rows.
        """
        width = self.depth // _VECTOR
        together = WARP // width
        at, vector = self.lane // width, self.lane % width
        # Halves of 64 columns side by side, whose rows of 128 bytes are swizzled.
        start = vector // 8 * (rows * _WIDTH) + (into + at) * _WIDTH + ((vector % 8) ^ at) * _VECTOR
        target = tile.toint() + 2 * start
        (number, head), (base, length) = place, span if self.packed else (0, array.sizes[1])
        source = (array.address + array.row((number, base + first + at, head))).toint() + vector * ALIGNED_BYTES
        stride = 2 * together * array.row((0, 1, 0))
        before, behind = first + at, length - first - at
        for n in cutlass.range_constexpr(count // together):
            is_there = (behind > together * n) & (before >= -together * n)
            size = Int32(cutlass.select_(is_there, Int32(ALIGNED_BYTES), Int32(0)))
            there = (target ^ (n * together % 8 * ALIGNED_BYTES)) + n * together * 2 * _WIDTH
            copy_ahead(there, source + n * stride, size, ALIGNED_BYTES)

    # The consumers: 64 queries each.

    @cute.jit
    def consume(self, scale, softcap, sink_logits, out, lse):
        """Compute a warpgroup's part of all items."""
        self.part = self.warp // 4 - 1
        self.products()
        self.factor, self.slope = (softcap if self.capped else scale) * Float32(LOG2_E), None
        if const_expr(self.capped):
            self.slope = scale / softcap * Float32(2 * LOG2_E)
        scores = self.score.make_fragment_C(self.score.partition_shape_C((ROWS, self.columns)))
        sums = self.value.make_fragment_C(self.value.partition_shape_C((ROWS, self.depth)))
        # P as the left operand, whose elements are in the order of ``scores``.
        weights = self.value.make_fragment_A(self.value.partition_shape_A((ROWS, self.columns)))
        # For each of a thread's two rows: the running maximum, the thread's share of the denominator, and the factor
        # by which sums of former keys shrink.
        most, total, shrink = (cute.make_rmem_tensor((2,), Float32) for _ in range(3))
        slot, phase, queries_phase = Int32(0), Int32(0), Int32(0)
        if const_expr(self.takes_turns):
            self.open_turns()
        for turn in cutlass.range(self.rounds, unroll=1):
            place, first, (start, stop), span = self.item(turn)
            first = first + self.part * ROWS
            own_start, full, edge, own_stop = self.seen(first, ROWS, span)
            if const_expr(self.takes_turns):
                own_start, own_stop = start, stop
            elif const_expr(self.packed):
                own_stop = cutlass.min(own_stop, stop)
                own_start = cutlass.min(own_start, own_stop - 1)
            # The first of a thread's rows.
            row = first + self.warp % 4 * 16 + self.lane // 4
            sums.fill(0.0)
            self.begin(most, total, sink_logits, place[1])
            cute.arch.mbarrier_wait(self.queries_full + self.part, queries_phase)
            queries_phase = queries_phase ^ 1
            products, state = (scores, weights, sums), (most, total, shrink)
            tiles = own_start, full, edge, own_stop
            if const_expr(self.windowed):
                slot, phase = self.skip((start, own_start), slot, phase)
            if const_expr(self.ahead):
                slot, phase = self.all_keys_ahead(products, state, tiles, row, span, slot, phase)
            else:
                slot, phase = self.all_keys(products, state, tiles, row, span, slot, phase)
                self.tell(self.queries_empty + self.part)
            slot, phase = self.skip((own_stop, stop), slot, phase)
            self.finish(sums, most, total, row, span, place, out, lse)

    @cute.jit
    def skip(self, tiles, slot, phase):
        """Free slots of tiles that only other warpgroups see; return the next slot."""
        start, stop = tiles
        for _ in cutlass.range(2 * start, 2 * stop, unroll=1):
            cute.arch.mbarrier_wait(self.full + slot, phase)
            self.tell(self.empty + slot)
            slot, phase = self.moved(slot, phase, 1)
        return slot, phase

    @cute.jit
    def all_keys(self, products, state, tiles, row, span, slot, phase):
        """Add all keys that a warpgroup sees, one tile after the other; return the next slot."""
        (scores, weights, sums), (start, _, _, stop) = products, tiles
        for n in cutlass.range(start, stop, unroll=1):
            cute.arch.mbarrier_wait(self.full + slot, phase)
            self.start_scores(scores, slot)
            warpgroup.wait_group(0)
            self.complete(scores)
            self.tell(self.empty + slot)
            slot, phase = self.moved(slot, phase, 1)
            self.weigh(scores, state, n, tiles, row, span)
            self.scale_sums(sums, state[2])
            self.round(weights, scores)
            cute.arch.mbarrier_wait(self.full + slot, phase)
            self.start_values(sums, weights, slot)
            warpgroup.wait_group(0)
            self.complete(sums)
            self.tell(self.empty + slot)
            slot, phase = self.moved(slot, phase, 1)
        return slot, phase

    @cute.jit
    def all_keys_ahead(self, products, state, tiles, row, span, slot, phase):
        """Do :meth:`all_keys`, with the scores of the next keys started before the values of these."""
        (scores, weights, sums), (start, _, _, stop) = products, tiles
        cute.arch.mbarrier_wait(self.full + slot, phase)
        self.start_scores(scores, slot)
        warpgroup.wait_group(0)
        self.complete(scores)
        self.tell(self.empty + slot)
        slot, phase = self.moved(slot, phase, 1)
        self.weigh(scores, state, Int32(start), tiles, row, span)
        self.round(weights, scores)
        for n in cutlass.range(start + 1, stop, unroll=1):
            # ``slot`` has these keys' values.
            next_slot, next_phase = self.moved(slot, phase, 1)
            cute.arch.mbarrier_wait(self.full + next_slot, next_phase)
            if const_expr(self.takes_turns):
                cute.arch.barrier(barrier_id=1 + self.part, number_of_threads=2 * 4 * WARP)
            self.start_scores(scores, next_slot)
            cute.arch.mbarrier_wait(self.full + slot, phase)
            self.start_values(sums, weights, slot)
            if const_expr(self.takes_turns):
                self.pass_turn()
            warpgroup.wait_group(1)
            self.complete(scores)
            self.tell(self.empty + next_slot)
            self.weigh(scores, state, n, tiles, row, span)
            self.complete(scores)
            # This barrier has been passed; without a branch here the assembler waits before the exponentials.
            cute.arch.mbarrier_wait(self.full + slot, phase)
            warpgroup.wait_group(0)
            self.complete(sums)
            self.tell(self.empty + slot)
            self.scale_sums(sums, state[2])
            self.round(weights, scores)
            slot, phase = self.moved(next_slot, next_phase, 1)
        self.tell(self.queries_empty + self.part)
        cute.arch.mbarrier_wait(self.full + slot, phase)
        self.start_values(sums, weights, slot)
        warpgroup.wait_group(0)
        self.complete(sums)
        self.tell(self.empty + slot)
        return self.moved(slot, phase, 1)

    @cute.jit
    def open_turns(self):
        """Let the first warpgroup begin."""
        if self.part == 1:
            self.pass_turn()

    def pass_turn(self) -> None:
        """Let the other warpgroup use the matrix units."""
        cute.arch.barrier_arrive(barrier_id=2 - self.part, number_of_threads=2 * 4 * WARP)

    def products(self) -> None:
        """Make the products, with the shared memory in the form that they read."""
        thread = self.warp % 4 * WARP + self.lane
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN

        def product(columns: int, source: Any, major: Any) -> Any:
            operation = warpgroup.MmaF16BF16Op(self.half, Float32, (ROWS, columns, _DEEP), source, k_major, major)
            return cute.make_tiled_mma(cute.make_mma_atom(operation))

        def tiles(start: Any, kind: Any, shape: tuple[int, int, int], order: tuple[int, int, int]) -> Any:
            layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, self.half), shape, order)
            return cute.make_tensor(cute.recast_ptr(start, layout.inner, dtype=self.half), layout.outer)

        self.first_score, self.score = (product(self.columns, warpgroup.OperandSource.SMEM, k_major) for _ in range(2))
        self.score.set(warpgroup.Field.ACCUMULATE, True)
        self.value = product(self.depth, warpgroup.OperandSource.RMEM, mn_major)
        self.value.set(warpgroup.Field.ACCUMULATE, True)
        score, value = self.score.get_slice(thread), self.value.get_slice(thread)
        rows, columns = warpgroup.SmemLayoutAtomKind.K_SW128, warpgroup.SmemLayoutAtomKind.MN_SW128
        k = tiles(self.ring, rows, (self.columns, self.depth, self.stages), (0, 1, 2))
        v = tiles(self.ring, columns, (self.depth, self.columns, self.stages), (1, 0, 2))
        q = tiles(self.tiles, rows, (ROWS, self.depth, self.parts), (0, 1, 2))
        self.q = score.make_fragment_A(score.partition_A(q))[None, None, None, self.part]
        self.k = score.make_fragment_B(score.partition_B(k))
        self.v = value.make_fragment_B(value.partition_B(v))

    def start_scores(self, scores: Any, slot: Any) -> None:
        """Start the product q k^T of a slot."""
        warpgroup.fence()
        for i in range(self.depth // _DEEP):
            product = self.score if i else self.first_score
            cute.gemm(product, scores, self.q[None, None, i], self.k[None, None, i, slot], scores)
        warpgroup.commit_group()

    def start_values(self, sums: Any, weights: Any, slot: Any) -> None:
        """Start to add the product P v of a slot."""
        warpgroup.fence()
        for i in range(self.columns // _DEEP):
            cute.gemm(self.value, sums, weights[None, None, i], self.v[None, None, i, slot], sums)
        warpgroup.commit_group()

    def complete(self, values: Any) -> None:
        """Keep reads of a product's result behind the wait for it, which the compiler does not relate to them."""
        for i in range(cute.size(values)):
            values[i] = after(values[i])

    # Elements of a thread: two rows, 8 apart, and of each 8 columns two.

    @cute.jit
    def begin(self, most, total, sink_logits, head):
        """Set the running maximum and denominator of a row: a sink is a key whose value is zero."""
        most.fill(LOWEST)
        total.fill(0.0)
        if const_expr(self.sinks):
            address, _, stride = sink_logits
            logit = cute.make_tensor(address + head * Int64(stride), cute.make_layout(1))[0] * Float32(LOG2_E)
            for r in cutlass.range_constexpr(2):
                most[r] = cute.arch.fmax(logit, Float32(LOWEST))
                # One thread of a row counts it.
                is_first = self.lane % 4 == 0
                one = cute.math.exp2(logit - most[r], fastmath=True)
                total[r] = Float32(cutlass.select_(is_first, one, Float32(0.0)))

    def cap(self, scores: Any) -> None:
        """Put scores through the soft cap's tanh, to 2e-7 absolute; ``factor`` has the cap."""
        if self.capped:
            for i in range(cute.size(scores)):
                grown = cute.math.exp2(scores[i] * self.slope, fastmath=True) + Float32(1.0)
                scores[i] = cute.math.fma(cute.arch.rcp_approx(grown), Float32(-2.0), Float32(1.0))

    @cute.jit
    def hide(self, scores, n, row, span):
        """Lower the scores of keys that do not exist or that the query does not see to minus infinity."""
        _, queries, _, keys = span
        first = n * self.columns + self.lane % 4 * 2
        for i in cutlass.range_constexpr(cute.size(scores)):
            stop, position = keys, row + i // 2 % 2 * 8 + keys - queries
            if const_expr(self.causal):
                stop = cutlass.min(stop, position + 1)
            elif const_expr(self.windowed):
                stop = cutlass.min(stop, position + self.window)
            is_seen = i // 4 * 8 + i % 2 < stop - first
            if const_expr(self.windowed):
                is_seen = is_seen & (i // 4 * 8 + i % 2 > position - self.window - first)
            scores[i] = Float32(cutlass.select_(is_seen, scores[i], Float32(-float("inf"))))

    @cute.jit
    def weigh(self, scores, state, n, tiles, row, span):
        """Turn the scores of tile ``n`` into weights; add them to the denominators."""
        self.cap(scores)
        if self.is_cut(n, tiles):
            self.hide(scores, n, row, span)
        most, total, shrink = state
        size = cute.size(scores)
        for r in cutlass.range_constexpr(2):
            # Chains of two columns each.
            top = [scores[2 * r], scores[2 * r + 1]]
            for i in cutlass.range_constexpr(4, size, 4):
                for c in cutlass.range_constexpr(2):
                    top[c] = cute.arch.fmax(top[c], scores[i + 2 * r + c])
            highest = cute.arch.fmax(top[0], top[1])
            for distance in (1, 2):
                highest = cute.arch.fmax(highest, cute.arch.shuffle_sync_bfly(highest, offset=distance))
            highest = highest * self.factor
            raised = Float32(cutlass.select_(highest > most[r] + Float32(_SLACK), highest, most[r]))
            shrink[r] = cute.math.exp2(most[r] - raised, fastmath=True)
            most[r] = raised
        for i in cutlass.range_constexpr(size):
            scores[i] = cute.math.exp2(cute.math.fma(scores[i], self.factor, -most[i // 2 % 2]), fastmath=True)
        for r in cutlass.range_constexpr(2):
            parts = [scores[2 * r], scores[2 * r + 1]]
            for i in cutlass.range_constexpr(4, size, 4):
                for c in cutlass.range_constexpr(2):
                    parts[c] = parts[c] + scores[i + 2 * r + c]
            total[r] = total[r] * shrink[r] + (parts[0] + parts[1])

    def round(self, weights: Any, scores: Any) -> None:
        """Round weights for their product, in pairs: single half numbers would take a register each."""
        words = cute.recast_tensor(weights, Int32)
        for i in range(cute.size(words)):
            words[i] = packed(scores[2 * i], scores[2 * i + 1], self.half)

    @cute.jit
    def scale_sums(self, sums, shrink):
        """Scale the sums of former keys, if a row of the warp has a new maximum."""
        if cute.arch.vote_any_sync((shrink[0] != Float32(1.0)) | (shrink[1] != Float32(1.0))):
            for i in cutlass.range_constexpr(cute.size(sums)):
                sums[i] = sums[i] * shrink[i // 2 % 2]

    @cute.jit
    def finish(self, sums, most, total, row, span, place, out, lse):
        """Divide by the denominators; store out and lse."""
        address, _, _, _, by_batch, by_head, _ = lse
        number, head = place
        logs = address + (number * Int64(by_batch) + head * Int64(by_head) + span[0])
        for r in cutlass.range_constexpr(2):
            for distance in cutlass.range_constexpr(1, 3):
                total[r] = total[r] + cute.arch.shuffle_sync_bfly(total[r], offset=distance)
            is_blind = total[r] == Float32(0.0)
            factor = Float32(1.0) / Float32(cutlass.select_(is_blind, Float32(1.0), total[r]))
            for i in cutlass.range_constexpr(2 * r, cute.size(sums), 4):
                for c in cutlass.range_constexpr(2):
                    sums[i + c] = sums[i + c] * factor
            if (self.lane % 4 == 0) & (row + 8 * r >= 0):
                value = (most[r] + cute.math.log2(total[r], fastmath=True)) * Float32(LN_2)
                cute.make_tensor(logs + (row + 8 * r), cute.make_layout(1))[0] = value
        halves = cute.make_rmem_tensor((cute.size(sums),), self.half)
        halves.store(cute.make_tensor(sums.iterator, halves.layout).load().to(self.half))
        words = cute.recast_tensor(halves, Int32)
        for r in cutlass.range_constexpr(2):
            place = number, span[0] + row + 8 * r, head
            start = (out.address + out.row(place)).toint() + self.lane % 4 * ALIGNED_BYTES
            for n in cutlass.range_constexpr(self.depth // 32):
                # Of 32 columns, each of four lanes has two of each 8; then it has 8.
                vector = self.transposed([words[2 * (4 * n + i) + r] for i in range(4)])
                if row + 8 * r >= 0:
                    store_words(start + n * 4 * ALIGNED_BYTES, vector)

    def transposed(self, words: list[Any]) -> list[Any]:
        """Exchange words in each four lanes: lane i gets word i of each lane."""
        for distance in (1, 2):
            is_upper = self.lane // distance % 2 == 1
            for i in (0, 3 - distance):
                j = i + distance
                sent = Int32(cutlass.select_(is_upper, words[i], words[j]))
                got = cute.arch.shuffle_sync_bfly(sent, offset=distance)
                words[i] = Int32(cutlass.select_(is_upper, got, words[i]))
                words[j] = Int32(cutlass.select_(is_upper, words[j], got))
        return words


@dsl_user_op
def packed(low: Any, high: Any, numeric: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Return two numbers rounded to half numbers, in one word."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (high, low)]
    kind = "bf16x2" if numeric is cutlass.BFloat16 else "f16x2"
    found = llvm.inline_asm(
        Int32.mlir_type, values, f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f", has_side_effects=False,
        is_align_stack=False,
    )  # fmt: skip
    return Int32(found)
