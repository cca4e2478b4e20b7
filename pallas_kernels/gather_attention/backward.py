"""Backward pass: recompute the weights of QUERY_BLOCK queries at a time, scatter-add what falls on their rows.

A row is key and value at once, so it receives scale * dscore * query and weight * cotangent, summed over heads. That
goes to the latent it was quantised from or, where no latents are given and rows are plain floats, to the row itself.

Queries add to the rows one after another: XLA's scatter-add on GPU adds repeated indices in any order, so one scatter
holds each row at most once, and the same call gives the same bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gather_attention.reference import EXACT, QUERY_BLOCK, gather


def gather_attention(static, arrays, cotangent_BTNH):
    """Returns the cotangents of `arrays`; those of packed planes and indices are zeros of no width."""
    scale, *formats, _ = static
    arrays = jax.tree.map(jnp.asarray, arrays)  # constants arrive as NumPy arrays
    query_BTNH, sink_N, window, window_index, entries, entry_index, latents = arrays
    receivers = [_receiver(*sources) for sources in zip((window, entries), formats, latents, strict=True)]

    def step(sums, block):
        query, cotangent, *index = block
        rows, valid = gather(window, entries, *index, *formats, query.dtype)
        d_query, d_rows, d_sink = _sink_attention(query, rows, valid, sink_N, cotangent, scale)
        d_rows = jnp.split(d_rows, [window_index.shape[2]], axis=2)
        sink_sum, *row_sums = sums
        row_sums = [_add_rows(*adds) for adds in zip(row_sums, index, d_rows, strict=True)]
        return (sink_sum + d_sink, *row_sums), d_query

    sums = [None if r is None else jnp.zeros(r.shape, jnp.float32) for r in receivers]
    sums = (jnp.zeros(sink_N.shape, jnp.float32), *sums)
    blocks = [_split(query_BTNH, 0), _split(cotangent_BTNH, 0), _split(window_index, -1)]
    blocks.append(None if entries is None else _split(entry_index, -1))
    (d_sink, *row_sums), d_query = lax.scan(step, sums, tuple(blocks))

    zeros = jax.tree.map(_zeros, arrays)
    d_planes, d_latents = [zeros[2], zeros[4]], list(zeros[6])
    for i, (receiver, total) in enumerate(zip(receivers, row_sums, strict=True)):
        if latents[i] is not None:
            d_latents[i] = total.astype(receiver.dtype)
        elif receiver is not None:
            d_planes[i] = (total.astype(receiver.dtype), d_planes[i][1])
    return (
        _join(d_query)[:, : query_BTNH.shape[1]], d_sink.astype(sink_N.dtype), d_planes[0], zeros[3], d_planes[1],
        zeros[5], tuple(d_latents),
    )  # fmt: skip


def _receiver(planes, format, latent):
    """What a row's gradient goes to; None: nothing."""
    if latent is None and planes is not None and format is None:
        return planes[0]
    return latent


def _sink_attention(query_BTNH, rows_BTKH, valid_BTK, sink_N, cotangent_BTNH, scale):
    """Differentiates reference.sink_attention: of the queries in their dtype, of the rows and the sink in float32."""
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
    d_rows = jnp.einsum("btnk,btnh->btkh", d_scores, query_BTNH, **EXACT)
    d_rows += jnp.einsum("btnk,btnh->btkh", weights.astype(dtype), cotangent_BTNH, **EXACT)
    return d_query, d_rows, -(sink_weight * mean).sum((0, 1))


def _add_rows(total_BSH, index_BTK, rows_BTKH):
    """Adds each query's rows where they belong; None is no sum."""
    if total_BSH is None or rows_BTKH.shape[2] == 0:
        return total_BSH
    B, _, K = index_BTK.shape
    # What a query repeats has equal shares, so the first stands for all of them.
    same = index_BTK[..., :, None] == index_BTK[..., None, :]
    repeated = (same & np.tri(K, k=-1, dtype=bool)).any(-1)
    rows_BTKH *= same.sum(-1, dtype=jnp.int32).astype(jnp.float32)[..., None]
    index_BTK = jnp.where((index_BTK < 0) | repeated, total_BSH.shape[1], index_BTK)
    batch = jnp.arange(B, dtype=jnp.int32)[:, None]

    def add(total, query):
        index_BK, rows_BKH = query
        return total.at[batch, index_BK].add(rows_BKH, mode="drop"), None

    return lax.scan(add, total_BSH, (jnp.moveaxis(index_BTK, 1, 0), jnp.moveaxis(rows_BTKH, 1, 0)))[0]


def _split(a, fill):
    """Cuts the query axis into leading blocks; queries that fill the last one attend to nothing."""
    block = max(1, min(QUERY_BLOCK, a.shape[1]))
    blocks = -(-a.shape[1] // block)
    a = jnp.pad(a, [(0, 0), (0, blocks * block - a.shape[1])] + [(0, 0)] * (a.ndim - 2), constant_values=fill)
    return jnp.moveaxis(a.reshape(a.shape[0], blocks, block, *a.shape[2:]), 1, 0)


def _join(a):
    a = jnp.moveaxis(a, 0, 1)
    return a.reshape(a.shape[0], a.shape[1] * a.shape[2], *a.shape[3:])


def _zeros(a):
    """The cotangent of what has no gradient: integers have one of no width."""
    return jnp.zeros_like(a) if jnp.issubdtype(a.dtype, jnp.floating) else np.zeros(a.shape, jax.dtypes.float0)
