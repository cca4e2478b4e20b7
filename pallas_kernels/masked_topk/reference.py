"""`lax.top_k` over cleaned scores, then a sort of the k chosen positions."""

import jax.numpy as jnp
from jax import lax

LAST = 2**31 - 1


def masked_topk(scores_RS, length_R, *, k: int):
    """See the contract; rows R flattened, S at least 1."""
    width = min(k, scores_RS.shape[-1])
    counts = jnp.arange(scores_RS.shape[-1], dtype=jnp.int32) < length_R[:, None]
    scores = jnp.where(counts & ~jnp.isnan(scores_RS), scores_RS, -jnp.inf)
    scores = jnp.where(scores == 0, jnp.float32(0), scores)  # top_k puts +0 before -0
    best, position = lax.top_k(scores, width)
    position = jnp.sort(jnp.where(best > -jnp.inf, position.astype(jnp.int32), LAST), axis=-1)
    position = jnp.where(position == LAST, -1, position)
    return jnp.pad(position, [(0, 0), (0, k - width)], constant_values=-1)
