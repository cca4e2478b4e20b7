"""`lax.top_k` over cleaned scores, then a sort of the k chosen positions."""

import jax.numpy as jnp
from jax import lax

LAST = 2**31 - 1


def masked_topk(scores, *, k: int):
    """See the contract."""
    width = min(k, scores.shape[-1])
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    scores = jnp.where(scores == 0, jnp.float32(0), scores)  # top_k puts +0 before -0
    best, position = lax.top_k(scores, width)
    position = jnp.sort(jnp.where(best > -jnp.inf, position.astype(jnp.int32), LAST), axis=-1)
    position = jnp.where(position == LAST, -1, position)
    edge = [(0, 0)] * (position.ndim - 1) + [(0, k - width)]
    return jnp.pad(position, edge, constant_values=-1)
