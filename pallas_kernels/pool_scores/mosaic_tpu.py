"""Scores of candidate pools on TPU: fetch the 128 keys around each block, keep its lanes, score 512 of them at a time.

Keys lie on lanes ([J / 2, S] and [G, S], as XLA stores both planes), and a copy must take whole tiles of 128 lanes, so
a block costs one tile: 8.5 KB. Queries go one by one through the grid, their blocks in groups that fill 512 lanes.
While one group is scored the tiles of the next are on their way (two buffers). A block in the same tile as the block
before it, none (-1) or wholly invisible starts no copy. A roll of the lanes brings a block from its place in the tile
to its place in the group, exactly, whatever lies beside it; then the group is dequantised and scored like a tile of
`index_scores`. What is invisible is masked outside. A last tile that S does not fill is read from a padded copy of it.

Bytes: at most 8704 a block and query in, 32 out; nothing grows with S. FLOP: 8192 an entry and query.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.formats import E8M0_NAN
from pallas_kernels.index_scores import mosaic_tpu as dense

LANES = dense.LANES
TUNING = {"entries": 512}  # all generations; entries scored at a time


def pool_scores(query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, block_BTC, visible_BT, *, format, block_size: int):
    """See the contract. Serves keys in fp4_e8m0_32 and blocks that divide 128 entries."""
    dense.refuse(query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, format=format)
    B, T, heads, J = query_BTIJ.shape
    S, C = codes_BSJ.shape[1], block_BTC.shape[2]
    if block_size < 1 or LANES % block_size:
        raise NotImplementedError(f"blocks that divide {LANES} entries, not {block_size}")
    if 0 in (B, T, C, S):
        return jnp.full((B, T, C * block_size), -jnp.inf, jnp.float32)

    visible = jnp.minimum(visible_BT, S)[..., None]
    there = (block_BTC >= 0) & (block_BTC < lax.div(visible + (block_size - 1), jnp.int32(block_size)))
    group = TUNING["entries"] // block_size  # blocks scored at a time
    block = jnp.where(there, block_BTC, -1)
    block = jnp.pad(block, [(0, 0), (0, 0), (0, -C % group)], constant_values=-1).reshape(B * T, 1, -1)
    last = jnp.max(jnp.where(block >= 0, jnp.arange(1, block.shape[2] + 1, dtype=jnp.int32), 0), axis=(1, 2))

    planes = [jnp.swapaxes(plane, 1, 2) for plane in (codes_BSJ, scales_BSG)]
    whole = S // LANES  # tiles that S fills
    short = [jnp.pad(plane[..., whole * LANES :], [(0, 0), (0, 0), (0, -S % LANES)]) for plane in planes]
    short = short if S % LANES else []
    planes = planes if whole else []

    def row(n, last):
        return n, jnp.int32(0), jnp.int32(0)

    entries = block.shape[2] * block_size
    scores = pl.pallas_call(
        functools.partial(_kernel, T=T, whole=whole, planes=len(planes), block_size=block_size, group=group),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B * T,),
            in_specs=[
                pl.BlockSpec((None, 1, block.shape[2]), row, memory_space=pltpu.SMEM),
                pl.BlockSpec((None, heads, J), row),
                pl.BlockSpec((None, heads, 1), row),
                *[pl.BlockSpec(memory_space=pl.ANY) for _ in planes + short],
            ],
            out_specs=pl.BlockSpec((None, 1, entries), row),
            scratch_shapes=[
                pltpu.VMEM((2, group, J // 2, LANES), jnp.uint8),
                pltpu.VMEM((2, group, J // dense.GROUP, LANES), jnp.uint8),
                pltpu.VMEM((J // 8, group * block_size), jnp.int32),
                pltpu.VMEM((J // dense.GROUP, group * block_size), jnp.int32),
                pltpu.SMEM((2, group), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((B * T, 1, entries), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="pool_scores",
    )(
        last,
        block,
        dense.order_channels(query_BTIJ).reshape(B * T, heads, J),
        dense.carry_nan(query_BTIJ, weight_BTI).reshape(B * T, heads, 1),
        *planes,
        *short,
    )
    scores = scores.reshape(B, T, -1, block_size)[:, :, :C]
    entry = block_BTC[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)
    seen = there[..., None] & (entry < visible[..., None]) & ~jnp.isnan(scores)
    return jnp.where(seen, scores, -jnp.inf).reshape(B, T, C * block_size)


def _kernel(last, block, query, weight, *refs, T: int, whole: int, planes: int, block_size: int, group: int):
    """Scores the blocks of one query."""
    *sources, out, codes, scales, words, byte, slots, semaphores = refs
    long, short = sources[:planes], sources[planes:]
    n = pl.program_id(0)
    b = lax.div(n, jnp.int32(T))
    in_tile = LANES // block_size  # blocks
    groups = lax.div(last[n] + jnp.int32(group - 1), jnp.int32(group))

    def copies(source, first, buffer, slot):
        return [
            pltpu.make_async_copy(plane.at[b, :, pl.ds(first, LANES)], into.at[buffer, slot], semaphores.at[buffer])
            for plane, into in zip(source, (codes, scales), strict=True)
        ]

    def start(i, buffer):
        """Starts the copies of group i and returns their number; a block's tile goes to `slots` of it."""

        def one(j, carried):
            before, count = carried
            id = block[0, i * jnp.int32(group) + j]
            tile = jnp.where(id < 0, before, lax.div(id, jnp.int32(in_tile)))
            new = tile != before

            def fetch(source, first):
                for copy in copies(source, first, buffer, count):
                    copy.start()

            if long:
                first = pl.multiple_of(tile * jnp.int32(LANES), LANES)
                pl.when(new & (tile < whole))(lambda: fetch(long, first))
            if short:
                pl.when(new & (tile >= whole))(lambda: fetch(short, 0))
            count += new.astype(jnp.int32)
            slots[buffer, j] = jnp.maximum(count - 1, 0)
            return tile, count

        blocks = jnp.where(i < groups, jnp.int32(group), jnp.int32(0))
        return lax.fori_loop(jnp.int32(0), blocks, one, (jnp.int32(-1), jnp.int32(0)))[1]

    def wait(count, buffer):
        def one(slot, _):
            for copy in copies(long or short, 0, buffer, slot):
                copy.wait()

        lax.fori_loop(jnp.int32(0), count, one, None)

    def gather(i, buffer, part):
        """Puts the lanes of blocks that fill 128 lanes side by side: code words [J / 8, 128], scale bytes [G, 128]."""
        lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        gathered: list[jax.Array] = []
        for place in range(in_tile):
            j = part * jnp.int32(in_tile) + jnp.int32(place)
            here = lax.rem(jnp.maximum(block[0, i * jnp.int32(group) + j], 0), jnp.int32(in_tile))
            turn = lax.rem(jnp.int32(place + in_tile) - here, jnp.int32(in_tile)) * jnp.int32(block_size)
            slot = slots[buffer, j]
            tile = pltpu.bitcast(codes[buffer, slot], jnp.int32), scales[buffer, slot].astype(jnp.int32)
            tile = [pltpu.roll(plane, turn, axis=1) for plane in tile]
            mine = lax.div(lane, jnp.int32(block_size)) == place
            gathered = [jnp.where(mine, *pair) for pair in zip(tile, gathered or tile, strict=True)]
        words[:, lanes(part)], byte[:, lanes(part)] = gathered

    def lanes(i, width=LANES):
        return pl.ds(pl.multiple_of(i * jnp.int32(width), width), width)

    def score(i, count):
        buffer = lax.rem(i, jnp.int32(2))
        following = start(i + 1, 1 - buffer)
        wait(count, buffer)
        lax.fori_loop(jnp.int32(0), jnp.int32(group // in_tile), lambda part, _: gather(i, buffer, part), None)
        keys = dense.dequantize(words[...], byte[...])
        products = dense.dot_relu(query[...], keys) * weight[...]
        total = jnp.sum(products, axis=0, keepdims=True)
        known = jnp.max(byte[...], axis=0, keepdims=True) < E8M0_NAN
        out[:, lanes(i, group * block_size)] = jnp.where(known, total, -jnp.inf)
        return following

    lax.fori_loop(jnp.int32(0), groups, score, start(jnp.int32(0), jnp.int32(0)))
