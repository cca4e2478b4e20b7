"""Exact top-k on TPU: the k-th greatest score by bisection, then the chosen positions in order; no row is ever sorted.

Fill. Scores become int32 keys in the same order (NaN, -inf and what lies past the length get the least key), kept
on the chip: a register holds 128 neighbouring entries along its lanes, and one query a sublane (eight queries
together), or 8 x 128 entries of a query that comes alone. Tiles past the greatest length are not read.

Bisect. A count of the keys >= t, for t built bit by bit from the top, finds the greatest t that at least k keys reach;
it stops as soon as every query has a t that exactly k reach. Chosen are all keys > t and the first of those equal to
t. So ties need no second sort, and equal scores go to the lower position.

Place. For each tile of 128 rows of 128 entries, products with triangles of ones count the chosen entries before each
row and within it. Each slot of the result finds its row by comparing these counts, fetches the ranks of that row's 128
entries by a product with a one-hot matrix, and takes the entry whose rank it wants. Counts within a tile are below
2^14, so float32 holds them exactly; positions are int32 throughout.

Bytes: 4 S + 4 k a query. Work: about 3 S operations a pass, at most 33 passes; a tile adds 5 products of 128^3 and each
128 slots one more.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 8
ZERO = np.int32(0)  # a bare 0 in an index map is 64 bits wide under x64, which Mosaic cannot lower
ROWS = 1024  # rows of 128 keys that one grid step fills: 512 KiB
FILLED = 8  # registers that one round of the filling loop stores
COUNTED = 256  # rows of keys that one round of a counting loop reads
LONGEST = 2**20  # entries; the keys of eight queries then take 32 of the 64 MiB on chip of a tpu7x core
BESIDE_KEYS = 8 * 2**20  # bytes on chip for everything but the keys
LEAST = -(2**31)  # the key of what may never be chosen


def masked_topk(scores_RS, length_R, *, k: int):
    """See the contract; rows R flattened, S at least 1."""
    R, S = scores_RS.shape
    if scores_RS.dtype != jnp.float32:
        raise NotImplementedError(f"scores of {scores_RS.dtype}; only float32 is ordered")
    if S > LONGEST:
        raise NotImplementedError(f"rows of {S} entries; the keys of {LONGEST} fit on the chip")
    if R == 0:
        return jnp.zeros((0, k), jnp.int32)
    length_R = jnp.clip(length_R.astype(jnp.int32), 0, S)
    queries = 1 if R == 1 else SUBLANES  # a query alone fills all sublanes by itself
    entries = ROWS * LANES // queries  # of one query, in one grid step
    steps, groups, slots = pl.cdiv(S, entries), pl.cdiv(R, queries), pl.cdiv(k, LANES) * LANES
    furthest = jnp.pad(length_R, (0, -R % queries)).reshape(groups, queries).max(1)

    def source(g, j, furthest):
        last = lax.div(jnp.maximum(furthest[g] - 1, 0), jnp.int32(entries))
        tile = jnp.minimum(j, last)
        return (tile, ZERO) if queries == 1 else (g, tile)

    scores, block = scores_RS, (SUBLANES, entries)
    if queries == 1:
        scores, block = jnp.pad(scores_RS, ((0, 0), (0, -S % LANES))).reshape(-1, LANES), (ROWS, LANES)
    chosen = pl.pallas_call(
        functools.partial(_kernel, queries=queries, k=k),
        out_shape=jax.ShapeDtypeStruct((R, slots), jnp.int32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(groups, steps),
            in_specs=[pl.BlockSpec(block, source), pl.BlockSpec((queries, 1), lambda g, j, _: (g, ZERO))],
            out_specs=pl.BlockSpec((queries, slots), lambda g, j, _: (g, ZERO)),
            scratch_shapes=[
                pltpu.VMEM((steps * ROWS, LANES), jnp.int32),
                pltpu.VMEM((SUBLANES, LANES), jnp.int32),
                pltpu.VMEM((SUBLANES, LANES), jnp.int32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=steps * ROWS * LANES * 4 + BESIDE_KEYS,
        ),
        name="masked_topk",
    )(furthest, scores, length_R[:, None])
    return chosen[:, :k]


def _kernel(furthest_ref, scores_ref, length_ref, chosen_ref, keys_ref, border_ref, ties_ref, *, queries: int, k: int):
    """Fills a tile of keys; the last grid step of a group of queries then bisects and places."""
    step, entries = pl.program_id(1), ROWS * LANES // queries
    filled = lax.div(furthest_ref[pl.program_id(0)] + jnp.int32(entries - 1), jnp.int32(entries))

    @pl.when(step < filled)
    def _():
        _fill(scores_ref, length_ref, keys_ref, step, queries)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        border, ties = _bisect(keys_ref, filled, queries, k)
        border_ref[...] = jnp.broadcast_to(border, border_ref.shape)
        ties_ref[...] = jnp.broadcast_to(ties, ties_ref.shape)
        chosen_ref[...] = jnp.full(chosen_ref.shape, -1, jnp.int32)
        tiles = filled * (ROWS // queries // LANES)

        def place(query, _):
            _place(chosen_ref, keys_ref, border_ref, ties_ref, query, tiles, queries)

        lax.fori_loop(jnp.int32(0), jnp.int32(queries), place, None)


def _fill(scores_ref, length_ref, keys_ref, step, queries: int):
    """Stores the keys of one tile: row (entry // 128) x queries + query."""
    first = step * (ROWS * LANES // queries)
    lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)

    def register(i):
        if queries == 1:
            scores = scores_ref[pl.ds(pl.multiple_of(i * SUBLANES, SUBLANES), SUBLANES), :]
            row = i * SUBLANES + lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)
        else:
            scores = scores_ref[:, pl.ds(pl.multiple_of(i * LANES, LANES), LANES)]
            row = i
        counts = first + row * LANES + lane < length_ref[...]
        start = pl.multiple_of(step * ROWS + i * SUBLANES, SUBLANES)
        keys_ref[pl.ds(start, SUBLANES), :] = jnp.where(counts, _key(scores), LEAST)

    def some(i, _):
        for c in range(FILLED):
            register(i * FILLED + c)

    lax.fori_loop(jnp.int32(0), jnp.int32(ROWS // SUBLANES // FILLED), some, None)


def _key(scores):
    """int32 in the order of the scores: -0 equals 0, and -inf and NaN are least."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    size = bits & 0x7FFFFFFF
    key = jnp.where(bits < 0, -size, size)
    return jnp.where((size > 0x7F800000) | (key == -0x7F800000), LEAST, key)


def _bisect(keys_ref, filled, queries: int, k: int):
    """Finds each query's border, and how many of the keys equal to it are chosen; both i32 [8, 1]."""

    def count(least):
        """Keys >= least."""

        def some(i, total):
            keys = keys_ref[pl.ds(pl.multiple_of(i * COUNTED, COUNTED), COUNTED), :]
            reach = (keys.reshape(-1, SUBLANES, LANES) >= least).astype(jnp.int32)
            return total + reach.sum(0, dtype=jnp.int32)

        rounds = filled * (ROWS // COUNTED)
        total = lax.fori_loop(jnp.int32(0), rounds, some, jnp.zeros((SUBLANES, LANES), jnp.int32))
        if queries == 1:
            total = jnp.broadcast_to(total.sum(0, keepdims=True, dtype=jnp.int32), total.shape)
        return total.sum(1, keepdims=True, dtype=jnp.int32)

    def undecided(state):
        bit, _, reached = state
        return (bit >= 0) & (jnp.max(reached) > k)

    def next_bit(state):
        bit, border, reached = state
        higher = border ^ lax.shift_left(jnp.int32(1), bit)
        reach = count(higher)
        enough = reach >= k
        return bit - 1, jnp.where(enough, higher, border), jnp.where(enough, reach, reached)

    border = jnp.full((SUBLANES, 1), LEAST, jnp.int32)
    _, border, _ = lax.while_loop(undecided, next_bit, (jnp.int32(31), border, count(border + 1)))
    return border, jnp.where(border == LEAST, 0, k - count(border + 1))


def _place(chosen_ref, keys_ref, border_ref, ties_ref, query, tiles, queries: int):
    """Writes one query's chosen positions into its slots, in ascending order."""
    border, ties = border_ref[pl.ds(query, 1), :], ties_ref[pl.ds(query, 1), :1]
    square = (LANES, LANES)
    row, column = (lax.broadcasted_iota(jnp.int32, square, axis) for axis in (0, 1))
    up_to_lane = (row <= column).astype(jnp.bfloat16)
    rows_above = (column < row).astype(jnp.bfloat16)
    number = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    sublane = lax.broadcasted_iota(jnp.int32, (queries, LANES), 0)

    def counts(mask):
        """Counts a mask's entries: in the rows above each [128, 1], and in each row up to each lane [128, 128]."""
        ones = mask.astype(jnp.bfloat16)
        above = _product(rows_above, ones).sum(1, keepdims=True)
        return above.astype(jnp.int32), _product(ones, up_to_lane).astype(jnp.int32)

    def tile(i, before):
        above_before, equal_before = before
        keys = keys_ref[pl.ds(i * (LANES * queries) + query, LANES, stride=queries), :]
        above_rows, above = counts(keys > border)
        equal_rows, equal = counts(keys == border)
        start = equal_before + equal_rows
        ties_taken = jnp.minimum(start, ties)
        is_chosen = (keys > border) | ((keys == border) & (start + equal <= ties))
        rank = above + jnp.minimum(start + equal, ties) - ties_taken  # of a chosen entry in its row, from 1
        first = above_before + above_rows + ties_taken  # slot of each row's first chosen entry
        end = first + rank[:, LANES - 1 :]
        rank_by_lane = jnp.where(is_chosen, rank, 0).astype(jnp.float32).T.astype(jnp.bfloat16)

        def window(w, _):
            slot = w * LANES + number
            own = (first <= slot) & (slot < end)  # [row, slot]
            ranks = _product(rank_by_lane, own.astype(jnp.bfloat16)).astype(jnp.int32)  # [lane, slot]
            wanted = slot + 1 - jnp.where(own, first, 0).sum(0, keepdims=True, dtype=jnp.int32)
            position = jnp.where(own, (i * LANES + row) * LANES, 0) + jnp.where(ranks == wanted, row, 0)
            position = position.sum(0, keepdims=True, dtype=jnp.int32)
            at = (slice(None), pl.ds(pl.multiple_of(w * LANES, LANES), LANES))
            here = (sublane == query) & (slot >= first[:1]) & (slot < end[LANES - 1 :])
            chosen_ref[at] = jnp.where(here, position, chosen_ref[at])

        low, high = jnp.max(first[:1]), jnp.max(end[LANES - 1 :])
        shift = jnp.int32(LANES.bit_length() - 1)
        stop = lax.shift_right_logical(high + jnp.int32(LANES - 1), shift)
        lax.fori_loop(lax.shift_right_logical(low, shift), jnp.where(high > low, stop, 0), window, None)
        last = (slice(LANES - 1, None), slice(LANES - 1, None))
        return above_before + above_rows[LANES - 1 :] + above[last], start[LANES - 1 :] + equal[last]

    nothing = jnp.zeros((1, 1), jnp.int32)
    lax.fori_loop(jnp.int32(0), tiles, tile, (nothing, nothing))


def _product(a, b):
    """A matrix product of small integers, exact in bfloat16 with sums in float32."""
    return lax.dot(a, b, preferred_element_type=jnp.float32)
