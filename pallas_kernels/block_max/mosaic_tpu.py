"""Block maxima on TPU, by lane rotations alone: no transpose, no gather from memory.

A register holds 128 neighbouring entries of a query along its lanes. To pool pairs, two registers a and b become one
that holds the maximum of a's pair i in lane 2 i and of b's in lane 2 i + 1: each is compared with itself rotated by one
lane, and the even lanes of the one meet the odd lanes of the other. log2(block_size) such rounds turn block_size
registers into one whose lane block_size i + c holds block i of register c; one permutation of the lanes then puts the
blocks in order.

A query alone in its sequence (decode) lies in memory as rows of 128 entries, so its registers hold 8 such rows; else
they hold 8 queries. Tiles past the last visible entry are not read.

Bytes: 4 S + 4 S / block_size a query. Work: about 2 rotations, 3 maxima and selects, and 5 operations of masking for
128 entries; memory is the limit.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 8
ZERO = np.int32(0)  # bare integers in index maps and rotations are 64 bits wide under x64, which Mosaic cannot lower
TILE = {"alone": 2**17, "together": 2**14}  # entries of one query in a grid step: 512 KiB either way


def block_max(scores_BTS, visible_BT, *, block_size: int):
    """See the contract."""
    if block_size & (block_size - 1) or not 1 <= block_size <= LANES:
        raise NotImplementedError(f"block_size={block_size}; the lanes pool powers of two from 1 to {LANES}")
    if scores_BTS.dtype != jnp.float32:
        raise NotImplementedError(f"scores of {scores_BTS.dtype}; only float32 is pooled")
    B, T, S = scores_BTS.shape
    M = -(-S // block_size)
    if 0 in (B, T, S):
        return jnp.full((B, T, M), -jnp.inf, jnp.float32)
    visible_R = jnp.clip(visible_BT.astype(jnp.int32), 0, S).reshape(B * T)
    if T == 1 and S % (LANES * block_size) == 0:
        best = _alone(scores_BTS.reshape(B, S // LANES, LANES), visible_R, block_size)
    else:
        best = _together(scores_BTS.reshape(B * T, S), visible_R, block_size)
    return best.reshape(B, T, M)


def _alone(scores_BCL, visible_B, block_size: int):
    """One query a grid row; its entries in rows C of 128 lanes L."""
    B, C, _ = scores_BCL.shape
    rows = TILE["alone"] // LANES
    pooled = rows // block_size

    def kernel(visible_ref, scores_ref, best_ref):
        shape = (pooled, LANES)
        group = pl.program_id(1) * pooled + lax.broadcasted_iota(jnp.int32, shape, 0)
        lane = lax.broadcasted_iota(jnp.int32, shape, 1)

        def register(c):
            scores = scores_ref[0, pl.ds(c, pooled, stride=block_size), :]
            return _mask(scores, (group * block_size + c) * LANES + lane, visible_ref[pl.program_id(0)])

        best_ref[0] = _pool(register, block_size)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((B, C // block_size, LANES), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, pl.cdiv(C, rows)),
            in_specs=[pl.BlockSpec((1, rows, LANES), lambda b, j, seen: (b, _last(j, seen[b], rows * LANES), ZERO))],
            out_specs=pl.BlockSpec((1, pooled, LANES), lambda b, j, _: (b, j, ZERO)),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="block_max_alone",
    )(visible_B, scores_BCL)


def _together(scores_RS, visible_R, block_size: int):
    """Eight queries a grid row, one a sublane."""
    R, S = scores_RS.shape
    tile = TILE["together"]
    groups = tile // LANES // block_size  # registers of results in one grid step
    furthest = jnp.pad(visible_R, (0, -R % SUBLANES)).reshape(-1, SUBLANES).max(1)

    def kernel(furthest_ref, scores_ref, visible_ref, best_ref):
        lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
        first = pl.program_id(1) * tile

        def one_group(group, _):
            def register(c):
                start = pl.multiple_of((group * block_size + c) * LANES, LANES)
                return _mask(scores_ref[:, pl.ds(start, LANES)], first + start + lane, visible_ref[...])

            best_ref[:, pl.ds(pl.multiple_of(group * LANES, LANES), LANES)] = _pool(register, block_size)

        lax.fori_loop(jnp.int32(0), jnp.int32(groups), one_group, None)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((R, -(-S // block_size)), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(R, SUBLANES), pl.cdiv(S, tile)),
            in_specs=[
                pl.BlockSpec((SUBLANES, tile), lambda r, j, seen: (r, _last(j, seen[r], tile))),
                pl.BlockSpec((SUBLANES, 1), lambda r, j, _: (r, ZERO)),
            ],
            out_specs=pl.BlockSpec((SUBLANES, tile // block_size), lambda r, j, _: (r, j)),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="block_max_together",
    )(furthest, scores_RS, visible_R[:, None])


def _last(tile_index, visible, tile: int):
    """The tile to read: past the last visible one it stays the same, so nothing is copied."""
    return jnp.minimum(tile_index, lax.div(jnp.maximum(visible - 1, 0), jnp.int32(tile)))


def _mask(scores, entry, visible):
    """-inf for entries that are invisible or NaN."""
    return jnp.where((entry < visible) & (scores == scores), scores, -jnp.inf)


def _pool(register, block_size: int):
    """Pools registers 0 .. block_size - 1 into one, whose lanes hold the block maxima of each in turn."""
    pooled = _interleave(register, 0, block_size)
    blocks = LANES // block_size
    lane = lax.broadcasted_iota(jnp.int32, pooled.shape, 1)
    source = (lane & (blocks - 1)) * block_size + lax.shift_right_logical(lane, jnp.int32(blocks.bit_length() - 1))
    return jnp.take_along_axis(pooled, source, axis=1, mode="promise_in_bounds")


def _interleave(register, first: int, count: int):
    """Pools `count` registers into one: lane count i + c holds the maximum of lanes count i .. of register c."""
    if count == 1:
        return register(first)
    half = count // 2
    low, high = (_interleave(register, first + c, half) for c in (0, half))
    lane = lax.broadcasted_iota(jnp.int32, low.shape, 1)
    low = jnp.maximum(low, pltpu.roll(low, jnp.int32(LANES - half), 1))
    high = jnp.maximum(high, pltpu.roll(high, jnp.int32(half), 1))
    return jnp.where((lane & half) == 0, low, high)
