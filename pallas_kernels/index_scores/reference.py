"""Dequantise a tile of keys, one einsum a tile, mask, block maxima: some queries, KEY_TILE keys at a time."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_max import reference as block_max
from pallas_kernels.blocks import by_query_block, fitting
from pallas_kernels.products import contract
from pallas_kernels.quantize.reference import dequantize

KEY_TILE = 8192  # keys scored at a time


def index_scores(query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, visible_BT, *, format, block_size: int):
    """See the contract. Every tile is scored, visible or not."""

    def score(query, weight, visible):
        return _score_tiles(query, weight, codes_BSJ, scales_BSG, visible, format=format, block_size=block_size)

    return by_query_block(score, _queries_at_once(query_BTIJ, codes_BSJ), query_BTIJ, weight_BTI, visible_BT)


def _queries_at_once(query_BTIJ, codes_BSJ):
    """Bounds the products of a block of queries with a tile of keys."""
    B, _, heads, _ = query_BTIJ.shape
    return fitting(4 * B * heads * min(codes_BSJ.shape[1], KEY_TILE))


def _score_tiles(query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, visible_BT, *, format, block_size: int):
    S = codes_BSJ.shape[1]
    blocks = -(-S // block_size)

    def score(first, width):
        planes = (lax.dynamic_slice_in_dim(plane, first, width, axis=1) for plane in (codes_BSJ, scales_BSG))
        scores = weighted_relu("btij,bsj->btis", query_BTIJ, weight_BTI, *planes, format=format)
        return block_max.block_max(scores, visible_BT - first, block_size=block_size)

    tile = max(1, KEY_TILE // block_size) * block_size
    if S <= tile:
        return score(0, S)

    def score_tile(i, best):
        # The last tile is moved back, by whole blocks, to end with the keys; a short last block follows it.
        first = jnp.minimum(i * tile, S // block_size * block_size - tile)
        return lax.dynamic_update_slice_in_dim(best, score(first, tile), first // block_size, axis=2)

    best = jnp.full((*visible_BT.shape, blocks), -jnp.inf, jnp.float32)
    best = lax.fori_loop(0, -(-S // tile), score_tile, best)
    short = S % block_size
    return best if short == 0 else best.at[..., -1:].set(score(S - short, short))


def count_nans(query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, visible_BT, *, format):
    """How many visible scores of each query are NaN: i32 [B, T]."""
    S = codes_BSJ.shape[1]
    tile = min(S, KEY_TILE)
    if S == 0:
        return jnp.zeros(visible_BT.shape, jnp.int32)

    def count(query, weight, visible):
        def add(i, total):
            first = jnp.minimum(i * tile, S - tile)  # the last tile is moved back, and counts what no other has
            planes = (lax.dynamic_slice_in_dim(plane, first, tile, axis=1) for plane in (codes_BSJ, scales_BSG))
            scores = weighted_relu("btij,bsj->btis", query, weight, *planes, format=format)
            entry = first + jnp.arange(tile, dtype=jnp.int32)
            counts = jnp.isnan(scores) & (entry >= i * tile) & (entry < visible[..., None])
            return total + counts.sum(-1, dtype=jnp.int32)

        return lax.fori_loop(jnp.int32(0), jnp.int32(-(-S // tile)), add, jnp.zeros(visible.shape, jnp.int32))

    return by_query_block(count, _queries_at_once(query_BTIJ, codes_BSJ), query_BTIJ, weight_BTI, visible_BT)


def weighted_relu(subscripts: str, query_BTIJ, weight_BTI, codes, scales, *, format):
    """Sum over heads of weight x relu(query . key), float32."""
    keys = codes if format is None else dequantize(codes, scales, format=format, dtype=query_BTIJ.dtype)
    if keys.dtype != query_BTIJ.dtype:
        query_BTIJ, keys = query_BTIJ.astype(jnp.float32), keys.astype(jnp.float32)
    return weighted_sum(contract(subscripts, query_BTIJ, keys), weight_BTI)


def weighted_sum(product_BTIS, weight_BTI):
    """Sum over heads of weight x relu(product), float32."""
    return contract("btis,bti->bts", jax.nn.relu(product_BTIS), weight_BTI)
