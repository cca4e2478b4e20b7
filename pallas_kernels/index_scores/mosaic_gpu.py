"""Index scores on Hopper: packed keys are expanded in registers and meet the heads of all queries on the tensor cores.

A row is up to 16 queries of one sequence; its work is the tiles of 64 keys up to the row's largest `visible`. All
tiles of all rows are laid end to end and cut into one equal range for each multiprocessor, so ragged sequences
balance. In its range a block of threads keeps the row's queries in shared memory, and each warpgroup walks over every
fifth (fourth, third) tile on its own:

1. Each thread copies its own keys' bytes, several tiles ahead, and reads only what it copied: no barrier is needed.
   Thread g of a quad owns the 16 bytes of scale group g of two keys, so one scale serves all of its values.
2. A 32-bit word of 8 nibbles becomes four registers of two bfloat16: masks and a multiplication put a code's bits at
   the bottom of the exponent, where they are the value times 2^-126; exact multiplications bring 2^126 and the group's
   scale. Which channel lands in which column follows from the nibbles' order; the queries are permuted to match.
3. wgmma: 64 keys (registers) x 128 channels x 32 heads of 1, 2 or 4 queries (shared memory), accumulated in float32.
4. In registers: ReLU, times the head's weight, sum over heads (columns, then the four threads of a quad), mask, maximum
   over the keys of a block, store. A NaN passes the ReLU and loses against -inf.

Blocks past the row's last tile get -inf by plain stores; no key of theirs is read. Sums run in the same order whatever
T, block_size and the tile are, so block maxima equal the maxima of the scores to the bit.

Cost: a key is 64 + 4 bytes, read once for each row (16 queries): 16.7 us for 1M keys at 4.3 TB/s. A
query and key take 8192 FLOP. What limits it are the some 222 instructions of a warp for a tile.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.index_scores import hopper_store, hopper_tile
from pallas_kernels.index_scores.hopper_tile import CHANNELS, GROUP, HEADS, ROWS, TILE

# warpgroups by queries per wgmma: 5 x 96, 4 x 128 or 3 x 168 registers a thread; stages: slots of each, for tiles on
# their way and the one in hand
TUNING = {"hopper": {"blocks": 132, "warpgroups": {1: 5, 2: 4, 4: 3}, "stages": 2, "row": 16, "fill": 8192}}
HOPPER = TUNING["hopper"]


def index_scores(query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, visible_BT, *, format, block_size: int):
    """See the contract."""
    (B, T), S = visible_BT.shape, codes_BSJ.shape[1]
    check(query_BTIJ, codes_BSJ, format)
    if block_size not in (1, 2, 4, 8):
        raise NotImplementedError(f"block_size={block_size}; the blocks of one register are 1, 2, 4 or 8 keys")
    M = -(-S // block_size)
    if B * T * S == 0:
        return jnp.full((B, T, M), -jnp.inf, jnp.float32)

    step = 1 if T == 1 else 2 if T in (2, 5, 6) else 4
    row = min(HOPPER["row"], -(-T // step) * step)
    rows = -(-T // row)  # of each sequence
    tiles = -(-S // TILE)
    if B * rows * tiles >= 2**31:
        raise NotImplementedError(f"{B} x {rows} rows of {tiles} tiles of {TILE} keys pass 2^31")

    # first_R[r]: tiles before row r. One fused sum instead of a scan.
    limit_BT = jnp.pad(jnp.clip(visible_BT, 0, S), ((0, 0), (0, rows * row - T)))
    tiles_R = (jnp.max(limit_BT.reshape(B * rows, row), axis=1) + jnp.int32(TILE - 1)) // jnp.int32(TILE)
    before = jnp.arange(B * rows, dtype=jnp.int32) < jnp.arange(B * rows + 1, dtype=jnp.int32)[:, None]
    first_R = jnp.sum(jnp.where(before, tiles_R, jnp.int32(0)), axis=1, dtype=jnp.int32)

    def row_of(first, tile):
        """The last row that starts at or before `tile`: empty rows are passed over."""
        found = jnp.int32(0)
        for jump in (1 << bit for bit in reversed(range((B * rows - 1).bit_length()))):
            there = jnp.minimum(found + jump, B * rows - 1)
            found = jnp.where(first[there] <= tile, there, found)
        return found

    def keys_at(unused, row, place):
        return place

    def fill(first, visible, out, worker, workers):
        chunks = -(-M // HOPPER["fill"])

        def fill_chunk(i, _):
            item = worker + i * workers
            query, begin = div(item, chunks), rem(item, chunks) * HOPPER["fill"]
            at = div(query, T) * rows + div(rem(query, T), row)
            unscored = (first[at + 1] - first[at]) * (TILE // block_size)
            chunk = HOPPER["fill"]
            pl.when(unscored < begin + chunk)(lambda: hopper_store.store_minus_inf(out, query, begin, unscored, chunk))

        lax.fori_loop(jnp.int32(0), div(B * T * chunks - worker + (workers - 1), workers), fill_chunk, None)

    out_QM = score_rows(
        query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, visible_BT, first_R, M, keys_at=keys_at, fill=fill,
        row_of=row_of, first_of=lambda first, row: first[row], rows=rows, row=row, step=step, block_size=block_size,
        whole=S % TILE == 0,
    )  # fmt: skip
    return out_QM.reshape(B, T, M)


def div(a, b):
    """Divides non-negative i32; `b` may be a Python integer, which x64 would widen."""
    return lax.div(a, jnp.int32(b))


def rem(a, b):
    """The remainder of `div`."""
    return lax.rem(a, jnp.int32(b))


def check(query_BTIJ, codes_BSJ, format):
    """Raises NotImplementedError for what neither scoring kernel serves."""
    heads, channels = query_BTIJ.shape[2:]
    if format != "fp4_e8m0_32":
        raise NotImplementedError(f"keys of format {format}; the kernel expands fp4_e8m0_32")
    if (heads, channels) != (HEADS, CHANNELS):
        raise NotImplementedError(f"{heads} heads of {channels} channels; the kernel has {HEADS} of {CHANNELS}")
    if codes_BSJ.shape[0] * codes_BSJ.shape[1] >= 2**31:
        raise NotImplementedError(f"{codes_BSJ.shape[0]} x {codes_BSJ.shape[1]} keys pass 2^31")


def score_rows(
    query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, visible_BT, extra, width, *, keys_at, fill, row_of, first_of, rows,
    row, step, block_size, whole=False,
):  # fmt: skip
    """Scores places 0, 1, ... of every row of queries, one [TILE] of places at a time: f32 [B * T, width].

    Args:
      extra: i32 array handed to the callbacks as a reference in device memory.
      width: results of one query, of block_size places each.
      keys_at: (extra, row, place) -> the key at each place, i32 [TILE]; past S: none.
      row_of, first_of: (extra, tile) -> row; (extra, row) -> its first tile, in the order of all rows.
      fill: (extra, visible, out, worker, workers) stores what no tile covers, or None.
      rows, row, step: rows of a sequence, queries in a row, queries in one wgmma.
      whole: the keys of every tile are neighbours and below S.
    """
    (B, T), S = visible_BT.shape, codes_BSJ.shape[1]
    blocks, warpgroups, stages = HOPPER["blocks"], HOPPER["warpgroups"][step], HOPPER["stages"]
    steps = row // step
    tiles = B * rows * -(-width * block_size // TILE)
    together = 2 if step == 1 and tiles > 4 * blocks * warpgroups else 1  # tiles that share sums over lanes and stores
    # Column 16 k + 8 s + 2 g + h of a key holds channel 32 g + 8 (k // 2) + 4 h + 2 (k % 2) + s.
    query = (query_BTIJ.astype(jnp.float32) * jnp.float32(32)).astype(jnp.bfloat16)  # 2^5: see `hopper_tile.expand`
    query = query.reshape(B * T * HEADS, 4, 4, 2, 2, 2)
    query = query.transpose(0, 2, 4, 5, 1, 3).reshape(B * T * HEADS, CHANNELS)

    def body(
        query, weight, visible, codes, scales, extra, out, query_smem, weight_smem, codes_smem, scales_smem, loaded,
        free,
    ):  # fmt: skip
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        tiles = first_of(extra, B * rows)
        share, rest = div(tiles, blocks), rem(tiles, blocks)
        start = block * share + jnp.minimum(block, rest)
        stop = start + share + (block < rest).astype(jnp.int32)

        def score_row(r, _):
            base = first_of(extra, r)
            low = jnp.maximum(start, base) - base
            high = jnp.minimum(stop, first_of(extra, r + 1)) - base
            pl.when(low < high)(lambda: score_range(r, low + warpgroup, high))

        def score_range(r, low, high):
            sequence = div(r, rows)
            skipped = rem(r, rows) * row
            queries = jnp.minimum(T - skipped, row)
            first_query = sequence * T + skipped
            mine = div(high - low + (warpgroups - 1), warpgroups)

            def keys_of(i):
                place = (low + i * warpgroups) * TILE + plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROWS)
                return place, keys_at(extra, r, place)

            def slot_of(i, j):
                turn, place = divmod(j, together)
                return warpgroup * stages + rem(i + turn, stages // together) * together + place

            def copy(i, j):
                """Starts the copy of tile i * together + j."""
                tile = i * together + j

                @pl.when(tile < mine)
                def _():
                    key = keys_of(tile)[1]
                    smem = codes_smem, scales_smem, slot_of(i, j)
                    hopper_tile.copy_keys(codes, scales, *smem, sequence, key, whole)

                hopper_tile.commit_copies()

            for j in range(stages - 1):
                copy(jnp.int32(0), j)

            # The last row's queries are overwritten only after every warpgroup has left it.
            plgpu.barrier_arrive(free)
            plgpu.barrier_wait(free)

            @pl.when(warpgroup == 0)
            def _():
                for i in range(steps):
                    first = first_query + i * step
                    heads = pl.ds(first * HEADS, step * HEADS)
                    plgpu.copy_gmem_to_smem(query.at[heads], query_smem.at[i], loaded)
                    plgpu.copy_gmem_to_smem(weight.at[pl.ds(first, step)], weight_smem.at[i], loaded)

            plgpu.barrier_wait(loaded)

            def constants(n):
                """What is the same for all tiles: the weights of a step's heads and how far its queries see."""
                first, left = first_query + n * step, queries - n * step
                weights = hopper_tile.load_weights(weight_smem, n, step)
                return weights, hopper_store.load_visible(visible, first, left, step, S)

            once = constants(jnp.int32(0)) if steps == 1 else None

            def score_tiles(i, _):
                spots = [keys_of(i * together + j) for j in range(together)]

                def totals_of(keys_SJ, n, weights):
                    dots_SH = pl.run_scoped(
                        lambda acc: (plgpu.wgmma(acc, keys_SJ, query_smem.at[n].transpose((1, 0))), acc[...])[1],
                        plgpu.ACC((TILE, step * HEADS), jnp.float32),
                    )
                    return hopper_tile.weigh(dots_SH, weights, step)

                def expand(j):
                    copy(i, j + stages - 1)
                    return hopper_tile.expand(codes_smem, scales_smem, slot_of(i, j), stages)

                def store(totals, n, visible_of_lane):
                    items = queries - n * step if step > 1 else jnp.minimum(mine - i * together, together)
                    hopper_store.store_scores(
                        totals, out, visible_of_lane, first_query + n * step, items, *zip(*spots, strict=True),
                        step=step, block_size=block_size,
                    )  # fmt: skip

                if steps == 1:
                    weights, visible_of_lane = once
                    totals = [totals_of(expand(j), jnp.int32(0), weights) for j in range(together)]
                    store(totals, jnp.int32(0), visible_of_lane)
                    return
                keys_SJ = expand(0)

                def score_step(n, _):
                    weights, visible_of_lane = constants(n)
                    store([totals_of(keys_SJ, n, weights)], n, visible_of_lane)

                lax.fori_loop(jnp.int32(0), div(queries + (step - 1), step), score_step, None)

            lax.fori_loop(jnp.int32(0), div(mine + (together - 1), together), score_tiles, None)

        last = jnp.where(start < stop, row_of(extra, jnp.maximum(stop - 1, 0)) + 1, 0)
        lax.fori_loop(row_of(extra, start), last, score_row, None)
        if fill is not None:
            fill(extra, visible, out, block * warpgroups + warpgroup, blocks * warpgroups)

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B * T, width), jnp.float32),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((steps, step * HEADS, CHANNELS), jnp.bfloat16, transforms=swizzled),
            plgpu.SMEM((steps, step, HEADS), jnp.float32),
            plgpu.SMEM((warpgroups * stages * TILE * CHANNELS // 8,), jnp.int32),
            plgpu.SMEM((warpgroups * stages * TILE * CHANNELS // GROUP,), jnp.int32),
            plgpu.Barrier(num_arrivals=2 * steps),
            plgpu.Barrier(num_arrivals=warpgroups),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(
        query,
        weight_BTI.astype(jnp.float32).reshape(B * T, HEADS),
        visible_BT.reshape(B * T),
        codes_BSJ,
        scales_BSG,
        extra,
    )
