"""Mask, pad to whole blocks, reshape, maximum: reads S and writes S / block_size floats a query."""

import jax.numpy as jnp


def block_max(scores_BTS, visible_BT, *, block_size: int):
    """See the contract."""
    entry = jnp.arange(scores_BTS.shape[-1], dtype=jnp.int32)
    seen = (entry < visible_BT[..., None]) & ~jnp.isnan(scores_BTS)
    masked = jnp.where(seen, scores_BTS, -jnp.inf)
    edge = [(0, 0)] * (masked.ndim - 1) + [(0, -masked.shape[-1] % block_size)]
    padded = jnp.pad(masked, edge, constant_values=-jnp.inf)
    return padded.reshape(*padded.shape[:-1], padded.shape[-1] // block_size, block_size).max(-1)


def count_nans(scores_BTS, visible_BT):
    """How many visible scores of each query are NaN: i32 [B, T]."""
    entry = jnp.arange(scores_BTS.shape[-1], dtype=jnp.int32)
    return (jnp.isnan(scores_BTS) & (entry < visible_BT[..., None])).sum(-1, dtype=jnp.int32)
