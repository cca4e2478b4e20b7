"""Gather the pool's packed keys query by query, dequantise, one einsum, mask."""

import jax.numpy as jnp

from pallas_kernels.blocks import by_query_block, fitting
from pallas_kernels.index_scores.reference import weighted_relu


def pool_scores(query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, block_BTC, visible_BT, *, format, block_size: int):
    """See the contract."""

    def score(*queries):
        scores, seen = _score_pool(codes_BSJ, scales_BSG, *queries, format=format, block_size=block_size)
        return jnp.where(seen & ~jnp.isnan(scores), scores, -jnp.inf)

    block = _queries_at_once(query_BTIJ, block_BTC, block_size)
    return by_query_block(score, block, query_BTIJ, weight_BTI, block_BTC, visible_BT)


def _queries_at_once(query_BTIJ, block_BTC, block_size):
    """Bounds the keys of a block of queries in float32, and their products."""
    B, _, heads, channels = query_BTIJ.shape
    return fitting(4 * B * block_BTC.shape[2] * block_size * (heads + channels))


def count_nans(query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, block_BTC, visible_BT, *, format, block_size: int):
    """How many visible scores of each query are NaN: i32 [B, T]."""

    def count(*queries):
        scores, seen = _score_pool(codes_BSJ, scales_BSG, *queries, format=format, block_size=block_size)
        return (seen & jnp.isnan(scores)).sum(-1, dtype=jnp.int32)

    block = _queries_at_once(query_BTIJ, block_BTC, block_size)
    return by_query_block(count, block, query_BTIJ, weight_BTI, block_BTC, visible_BT)


def _score_pool(codes_BSJ, scales_BSG, query_BTIJ, weight_BTI, block_BTC, visible_BT, *, format, block_size: int):
    """Returns scores [B, T, C * block_size] and which of them are of visible entries."""
    entry = jnp.maximum(block_BTC, 0)[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)
    seen = (block_BTC >= 0)[..., None] & (entry < jnp.minimum(visible_BT, codes_BSJ.shape[1])[..., None, None])
    entry, seen = (a.reshape(*block_BTC.shape[:2], -1) for a in (entry, seen))
    row = jnp.arange(codes_BSJ.shape[0], dtype=jnp.int32)[:, None, None]
    planes = (plane.at[row, entry].get(mode="clip") for plane in (codes_BSJ, scales_BSG))
    return weighted_relu("btij,btsj->btis", query_BTIJ, weight_BTI, *planes, format=format), seen
