"""Backward pass: recompute the weights of some queries at a time, scatter-add what falls on their rows.

A row is key and value at once, so it receives scale * dscore * query and weight * cotangent, summed over heads. That
goes to the latent it was quantised from or, where no latents are given and rows are plain floats, to the row itself.

XLA's scatter-add on GPU adds repeated indices in any order. There the sums are made of integers, whose order does not
matter, so that the same call gives the same bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gather_attention.reference import EXACT, gather, queries_at_once


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
    block = min(queries_at_once(query_BTNH, window_index, entry_index), max(1, query_BTNH.shape[1]))
    blocks = [_split(query_BTNH, block, 0), _split(cotangent_BTNH, block, 0), _split(window_index, block, -1)]
    blocks.append(None if entries is None else _split(entry_index, block, -1))
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
    if total_BSH is None or rows_BTKH.size == 0:
        return total_BSH
    index_BTK = jnp.where(index_BTK < 0, total_BSH.shape[1], index_BTK)
    batch = jnp.arange(index_BTK.shape[0], dtype=jnp.int32)[:, None, None]

    def add(rows):
        return jnp.zeros(total_BSH.shape, rows.dtype).at[batch, index_BTK].add(rows, mode="drop")

    return total_BSH + lax.platform_dependent(
        rows_BTKH, cuda=functools.partial(add_in_any_order, add), default=add
    ).astype(total_BSH.dtype)


def add_in_any_order(add, rows_BTKH):
    """Makes the sums of `add` from sums of integers: exact to 2^-30 of the largest row, or NaN if one is not finite.

    A row is cut into parts of `bits` bits, few enough that as many as there are rows add up below 2^31.
    """
    _, T, K, _ = rows_BTKH.shape
    bits = 30 - (T * K - 1).bit_length()
    top = jnp.max(jnp.abs(rows_BTKH))
    finite = jnp.isfinite(top)
    _, exponent = jnp.frexp(jnp.where(finite, top, 0))
    unit = jnp.exp2(jnp.maximum(exponent - bits, -126).astype(jnp.float32))
    rest, total = jnp.where(finite, rows_BTKH, 0) / unit, 0
    for part in range(-(-30 // bits)):
        whole = jnp.round(rest)
        total += add(whole.astype(jnp.int32)).astype(jnp.float32) * jnp.float32(2.0 ** (-bits * part))
        rest = (rest - whole) * jnp.float32(2.0**bits)
    return jnp.where(finite, total * unit, jnp.nan)


def _split(a, block, fill):
    """Cuts the query axis into leading blocks; queries that fill the last one attend to nothing."""
    blocks = -(-a.shape[1] // block)
    a = jnp.pad(a, [(0, 0), (0, blocks * block - a.shape[1])] + [(0, 0)] * (a.ndim - 2), constant_values=fill)
    return jnp.moveaxis(a.reshape(a.shape[0], blocks, block, *a.shape[2:]), 1, 0)


def _join(a):
    a = jnp.moveaxis(a, 0, 1)
    return a.reshape(a.shape[0], a.shape[1] * a.shape[2], *a.shape[3:])


def _zeros(a):
    """The cotangent of what has no gradient: integers have one of no width."""
    return jnp.zeros_like(a) if jnp.issubdtype(a.dtype, jnp.floating) else np.zeros(a.shape, jax.dtypes.float0)
