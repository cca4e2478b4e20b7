"""Backward pass: recompute the weights of some queries at a time, add up what falls on their rows (`scatter`).

A row is key and value at once, so it receives scale * dscore * query and weight * cotangent, summed over heads. That
goes to the latent it was quantised from or, where no latents are given and rows are plain floats, to the row itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.blocks import join, split
from pallas_kernels.gather_attention.reference import EXACT, gather, queries_at_once
from pallas_kernels.scatter import add_products


def gather_attention(static, arrays, cotangent_BTNH):
    """Returns the cotangents of `arrays`; those of packed planes and indices are zeros of no width."""
    scale, *formats, _ = static
    arrays = jax.tree.map(jnp.asarray, arrays)  # constants arrive as NumPy arrays
    query_BTNH, sink_N, window, window_index, entries, entry_index, latents = arrays
    receivers = [_receiver(*sources) for sources in zip((window, entries), formats, latents, strict=True)]

    def step(sums, block):
        query, cotangent, *index = block
        rows, valid = gather(window, entries, *index, *formats, query.dtype)
        d_query, weights, d_sink = _sink_attention(query, rows, valid, sink_N, cotangent, scale)
        vectors = jnp.concatenate([query, cotangent], axis=2)
        weights = jnp.split(weights, [window_index.shape[2]], axis=3)
        sink_sum, *row_sums = sums
        row_sums = [
            None if total is None else total + add_products(weight, vectors, at, total.shape[1])
            for total, weight, at in zip(row_sums, weights, index, strict=True)
        ]
        return (sink_sum + d_sink, *row_sums), d_query

    sums = [None if r is None else jnp.zeros(r.shape, jnp.float32) for r in receivers]
    block = min(queries_at_once(query_BTNH, window_index, entry_index), max(1, query_BTNH.shape[1]))
    sums = (jnp.zeros(sink_N.shape, jnp.float32), *sums)
    blocks = [split(query_BTNH, block, 0), split(cotangent_BTNH, block, 0), split(window_index, block, -1)]
    blocks.append(None if entries is None else split(entry_index, block, -1))
    (d_sink, *row_sums), d_query = lax.scan(step, sums, tuple(blocks))

    zeros = jax.tree.map(_zeros, arrays)
    d_planes, d_latents = [zeros[2], zeros[4]], list(zeros[6])
    for i, (receiver, total) in enumerate(zip(receivers, row_sums, strict=True)):
        if latents[i] is not None:
            d_latents[i] = total.astype(receiver.dtype)
        elif receiver is not None:
            d_planes[i] = (total.astype(receiver.dtype), d_planes[i][1])
    return (
        join(d_query)[:, : query_BTNH.shape[1]], d_sink.astype(sink_N.dtype), d_planes[0], zeros[3], d_planes[1],
        zeros[5], tuple(d_latents),
    )  # fmt: skip


def _receiver(planes, format, latent):
    """What a row's gradient goes to; None: nothing."""
    if latent is None and planes is not None and format is None:
        return planes[0]
    return latent


def _sink_attention(query_BTNH, rows_BTKH, valid_BTK, sink_N, cotangent_BTNH, scale):
    """Differentiates reference.sink_attention.

    Returns:
      The queries' cotangent in their dtype; what the rows receive of query and cotangent, [B, T, 2 N, K], likewise; the
      sink's, f32.
    """
    dtype, scale = query_BTNH.dtype, jnp.float32(scale)
    scores = jnp.einsum("btnh,btkh->btnk", query_BTNH, rows_BTKH, **EXACT) * scale
    scores = jnp.where(valid_BTK[:, :, None], scores, -jnp.inf)
    top = jnp.maximum(scores.max(-1, initial=-jnp.inf), sink_N)  # finite, so no -inf - -inf
    weights, sink_weight = jnp.exp(scores - top[..., None]), jnp.exp(sink_N - top)
    total = weights.sum(-1) + sink_weight
    weights, sink_weight = weights / total[..., None], sink_weight / total

    d_weights = jnp.einsum("btnh,btkh->btnk", cotangent_BTNH, rows_BTKH, **EXACT)
    mean = (weights * d_weights).sum(-1)
    d_scores = (scale * weights * (d_weights - mean[..., None])).astype(dtype)
    d_query = jnp.einsum("btnk,btkh->btnh", d_scores, rows_BTKH, **EXACT).astype(dtype)
    return d_query, jnp.concatenate([d_scores, weights.astype(dtype)], axis=2), -(sink_weight * mean).sum((0, 1))


def _zeros(a):
    """The cotangent of what has no gradient: integers have one of no width."""
    return jnp.zeros_like(a) if jnp.issubdtype(a.dtype, jnp.floating) else np.zeros(a.shape, jax.dtypes.float0)
