"""Gather the pool's packed keys query by query, dequantise, one einsum, mask."""

import jax.numpy as jnp

from pallas_kernels.blocks import by_query_block
from pallas_kernels.index_scores.reference import weighted_relu

QUERY_BLOCK = 32  # queries whose keys are dequantised at a time


def pool_scores(query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, block_BTC, visible_BT, *, format, block_size: int):
    """See the contract."""

    def score(*queries):
        scores, seen = _score_pool(codes_BSJ, scales_BSG, *queries, format=format, block_size=block_size)
        return jnp.where(seen & ~jnp.isnan(scores), scores, -jnp.inf)

    return by_query_block(score, QUERY_BLOCK, query_BTIJ, weight_BTI, block_BTC, visible_BT)


def count_nans(query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, block_BTC, visible_BT, *, format, block_size: int):
    """How many visible scores of each query are NaN: i32 [B, T]."""

    def count(*queries):
        scores, seen = _score_pool(codes_BSJ, scales_BSG, *queries, format=format, block_size=block_size)
        return (seen & jnp.isnan(scores)).sum(-1, dtype=jnp.int32)

    return by_query_block(count, QUERY_BLOCK, query_BTIJ, weight_BTI, block_BTC, visible_BT)


def _score_pool(codes_BSJ, scales_BSG, query_BTIJ, weight_BTI, block_BTC, visible_BT, *, format, block_size: int):
    """Returns scores [B, T, C * block_size] and which of them are of visible entries."""
    entry = jnp.maximum(block_BTC, 0)[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)
    seen = (block_BTC >= 0)[..., None] & (entry < jnp.minimum(visible_BT, codes_BSJ.shape[1])[..., None, None])
    entry, seen = (a.reshape(*block_BTC.shape[:2], -1) for a in (entry, seen))
    row = jnp.arange(codes_BSJ.shape[0], dtype=jnp.int32)[:, None, None]
    planes = (plane.at[row, entry].get(mode="clip") for plane in (codes_BSJ, scales_BSG))
    return weighted_relu("btij,btsj->btis", query_BTIJ, weight_BTI, *planes, format=format), seen
